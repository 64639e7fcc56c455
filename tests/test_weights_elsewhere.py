"""Weights that are not where a module has them as a rule: offloaded, sharded, replaced, swapped, merged, packed."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expected_rows import expected_row
from keeps import Keeps
from torch import Tensor, nn
from torch.nn.utils import parametrize
from value_kinds import Quantized8, quiet

from overflowstat import Monitor, NonFiniteError, TensorStats, capture
from overflowstat.monitor import WeightsName
from overflowstat.recorder import RecorderName

X = torch.ones(2, 4)


@pytest.fixture(params=["forward", "on_change"])
def weights(request: pytest.FixtureRequest) -> WeightsName:
    name: WeightsName = request.param
    return name


def shown(sink: Keeps, module: str) -> dict[str, TensorStats | str]:
    """The weights in the last frame of a module."""
    last = next(frame for frame in reversed(sink.frames) if frame.module == module)
    return {line.label: line.content for line in last.lines if not line.label.startswith(("input", "output"))}


class Watched:
    """A model of three layers, of which the second is what is changed."""

    def __init__(self, recorder_name: RecorderName, weights: WeightsName) -> None:
        torch.manual_seed(0)
        self.options: dict[str, Any] = {"recorder": recorder_name, "weights": weights}
        self.layer = nn.Linear(4, 4)
        self.model = nn.Sequential(nn.Linear(4, 4), self.layer, nn.Linear(4, 4))
        self.sink = Keeps()

    def attach(self) -> Monitor:
        return Monitor(self.model, sinks=[self.sink], **self.options)

    def run(self) -> dict[str, TensorStats | str]:
        """The layer's weights as a batch shows them."""
        self.model(X)
        return shown(self.sink, "1")


@pytest.fixture
def watched(recorder_name: RecorderName, weights: WeightsName) -> Watched:
    return Watched(recorder_name, weights)


def assert_is(content: TensorStats | str, plain: Tensor) -> None:
    assert isinstance(content, TensorStats), content
    expected = expected_row(plain)
    assert (content.abs_min, content.abs_max, content.numel) == tuple(
        expected[name] for name in ("abs_min", "abs_max", "numel")
    )


def with_nan(plain: Tensor) -> Tensor:
    changed = plain.detach().clone()
    changed.view(-1)[-1] = math.nan
    return changed


def assert_found(watched: Watched, label: str = "weight") -> None:
    with pytest.raises(NonFiniteError, match=rf"first in 1 \(\w+\), {label}: \d+ of \d+ (is|are) nan"):
        watched.model(X)


# offloaded between forwards


class Offload:
    """Keeps a module's parameters, which are on meta when it does not run."""

    def __init__(self, module: nn.Module) -> None:
        self.kept = {name: weight.detach() for name, weight in module.named_parameters(recurse=False)}
        self.free(module)

    def load(self, module: nn.Module, *_: Any) -> None:
        for name, weight in self.kept.items():
            module._parameters[name] = nn.Parameter(weight.clone(), requires_grad=False)

    def free(self, module: nn.Module, *_: Any) -> None:
        for name, weight in self.kept.items():
            module._parameters[name] = nn.Parameter(weight.to("meta"), requires_grad=False)

    def around_forward(self, module: nn.Module) -> None:
        """As accelerate does: it puts another forward in place of the module's own."""
        forward = module.forward

        def offloading(*args: Any, **kwargs: Any) -> Any:
            self.load(module)
            try:
                return forward(*args, **kwargs)
            finally:
                self.free(module)

        module.forward = offloading


def test_weights_that_are_gone_when_the_forward_ends_are_offloaded(watched: Watched) -> None:
    Offload(watched.layer).around_forward(watched.layer)
    watched.attach()
    for _ in range(3):
        assert watched.run() == {"weight": "offloaded", "bias": "offloaded"}
    assert all(isinstance(content, TensorStats) for content in shown(watched.sink, "0").values())


def test_weights_that_are_offloaded_after_the_first_batch_say_so(watched: Watched) -> None:
    watched.attach()
    before = watched.layer.weight.detach().clone()
    assert_is(watched.run()["weight"], before)
    Offload(watched.layer).around_forward(watched.layer)
    assert watched.run()["weight"] == "offloaded"


def test_a_nan_in_an_offloaded_weight_shows_in_the_output(watched: Watched) -> None:
    watched.layer.weight.data = with_nan(watched.layer.weight)
    Offload(watched.layer).around_forward(watched.layer)
    watched.attach()
    assert_found(watched, "output")


def test_weights_that_are_freed_by_a_later_hook_are_read(watched: Watched) -> None:
    offload = Offload(watched.layer)
    watched.layer.register_forward_pre_hook(offload.load)
    watched.attach()
    watched.layer.register_forward_hook(offload.free)
    for _ in range(2):
        shown = watched.run()
        assert_is(shown["weight"], offload.kept["weight"])
        assert_is(shown["bias"], offload.kept["bias"])
    offload.kept["weight"] = with_nan(offload.kept["weight"])
    assert_found(watched)


def test_a_model_that_is_wholly_on_meta_is_not_offloaded(watched: Watched) -> None:
    watched.model.to_empty(device="meta")
    watched.attach()
    watched.model(X.to("meta"))
    assert shown(watched.sink, "1") == {"weight": "meta", "bias": "meta"}


# sharded, so that nothing is here between uses


class Shard:
    """A weight whose storage is there only while its module runs."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.kept = weight, weight.detach().clone()

    def gather(self, *_: Any) -> None:
        self.weight.untyped_storage().resize_(self.kept.nbytes)
        with torch.no_grad():
            self.weight.copy_(self.kept)

    def free(self, *_: Any) -> None:
        self.weight.untyped_storage().resize_(0)


def test_weights_whose_storage_is_freed_between_uses_are_read_while_they_are_there(watched: Watched) -> None:
    shard = Shard(watched.layer.weight)
    shard.free()
    watched.layer.register_forward_pre_hook(shard.gather)
    watched.attach()
    watched.layer.register_forward_hook(shard.free)
    for _ in range(2):
        assert_is(watched.run()["weight"], shard.kept)
    shard.kept.view(-1)[-1] = math.nan
    assert_found(watched)


def test_weights_whose_storage_is_freed_when_the_hook_comes_are_empty_here(watched: Watched) -> None:
    shard = Shard(watched.layer.weight)
    watched.layer.register_forward_pre_hook(shard.gather)
    watched.layer.register_forward_hook(shard.free)
    watched.attach()
    for _ in range(2):
        shown = watched.run()
        assert shown["weight"] == "empty here"
        assert_is(shown["bias"], watched.layer.bias)


class Flat:
    """One parameter for all of a module's, which are views of it and plain attributes, as FSDP has them."""

    def __init__(self, module: nn.Linear) -> None:
        self.kept = torch.cat([module.weight.detach().view(-1), module.bias.detach()])
        self.flat = nn.Parameter(self.kept.clone(), requires_grad=False)
        for name, start, shape in (("weight", 0, (4, 4)), ("bias", 16, (4,))):
            delattr(module, name)
            count = math.prod(shape)
            setattr(module, name, self.flat[start : start + count].view(shape))
        module.register_parameter("flat_parameter", self.flat)

    def gather(self, *_: Any) -> None:
        self.flat.untyped_storage().resize_(self.kept.nbytes)
        self.flat.copy_(self.kept)

    def free(self, *_: Any) -> None:
        self.flat.untyped_storage().resize_(0)


@pytest.mark.parametrize("flat_first", [False, True], ids=["flattened later", "flattened before"])
def test_views_of_a_flat_parameter_are_shown_as_the_weights_that_they_are(watched: Watched, flat_first: bool) -> None:
    with torch.no_grad():
        if not flat_first:
            watched.attach()
        flat = Flat(watched.layer)
        watched.layer.register_forward_pre_hook(flat.gather)
        if flat_first:
            watched.attach()
        watched.layer.register_forward_hook(flat.free)
        for _ in range(2):
            shown = watched.run()
            assert_is(shown["weight"], flat.kept[:16])
            assert_is(shown["bias"], flat.kept[16:])
            assert_is(shown["flat_parameter"], flat.kept)
        flat.kept[19] = math.nan
        assert_found(watched, "flat_parameter")


def test_a_shard_without_elements_is_empty_here(watched: Watched, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    class Sharded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            local = torch.empty(0, 4)
            shape = torch.Size([3, 4])
            shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(4, 1))
            self.weight = nn.Parameter(shard)
            self.other = nn.Parameter(DTensor.from_local(torch.full((2, 4), 3.0), mesh, [Shard(0)], run_check=False))

        def forward(self, x: Tensor) -> Tensor:
            return x

    watched.model[1] = Sharded()
    watched.attach()
    shown = watched.run()
    assert shown["weight"] == "empty here"
    assert_is(shown["other"], torch.full((2, 4), 3.0))
    with torch.no_grad():
        watched.model[1].other._local_tensor[1, 1] = math.nan  # type: ignore[union-attr, operator]
    assert_found(watched, "other")


# plain tensors and buffers in place of parameters


def as_attribute(module: nn.Module, name: str, value: Tensor) -> None:
    delattr(module, name)
    setattr(module, name, value)


def as_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    delattr(module, name)
    module.register_buffer(name, value)


def beside_another(module: nn.Module, name: str, value: Tensor) -> None:
    as_attribute(module, name, value)
    module.register_parameter("lora_a", nn.Parameter(torch.ones(2)))
    module.register_parameter("lora_b", nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("replace", [as_attribute, as_buffer, beside_another])
def test_what_takes_a_parameters_place_is_shown_under_its_name(
    watched: Watched, replace: Callable[[nn.Module, str, Tensor], None]
) -> None:
    watched.attach()
    watched.run()
    replace(watched.layer, "weight", torch.full((4, 4), 2.0))
    assert_is(watched.run()["weight"], torch.full((4, 4), 2.0))
    watched.layer.weight[1, 2] = math.nan
    assert_found(watched)


def test_a_parameter_of_any_name_may_be_replaced(watched: Watched) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    layer = Scales()
    watched.model[1] = layer
    watched.attach()
    as_attribute(layer, "gain", torch.full((4,), 5.0))
    assert_is(watched.run()["gain"], torch.full((4,), 5.0))


def test_a_plain_weight_from_the_beginning_is_shown(watched: Watched) -> None:
    as_attribute(watched.layer, "weight", torch.full((4, 4), 2.0))
    watched.attach()
    assert_is(watched.run()["weight"], torch.full((4, 4), 2.0))


def test_a_plain_tensor_of_another_name_is_not_taken_for_a_weight(watched: Watched) -> None:
    watched.layer.causal_mask = torch.full((4, 4), -math.inf)
    watched.attach()
    assert list(watched.run()) == ["weight", "bias"]


def test_functional_call_shows_the_weights_that_it_is_given(watched: Watched) -> None:
    watched.attach()
    given = {name: weight.detach() * 3 for name, weight in watched.model.named_parameters()}
    torch.func.functional_call(watched.model, given, (X,))
    assert_is(shown(watched.sink, "1")["weight"], given["1.weight"])
    given["1.weight"] = with_nan(given["1.weight"])
    with pytest.raises(NonFiniteError, match=r"first in 1 \(Linear\), weight"):
        torch.func.functional_call(watched.model, given, (X,))


# swapped by .data, and merged


def swap(weight: Tensor, value: Tensor) -> None:
    weight.data = value


def merge_in_place(weight: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        weight += value - weight


def merge_by_data(weight: Tensor, value: Tensor) -> None:
    weight.data = weight.data + (value - weight.data)


CHANGES = pytest.mark.parametrize("change", [swap, merge_in_place, merge_by_data])


@CHANGES
def test_a_weight_that_is_changed_between_batches_is_shown_as_it_is(
    watched: Watched, change: Callable[[Tensor, Tensor], None]
) -> None:
    watched.attach()
    before = watched.layer.weight.detach().clone()
    assert_is(watched.run()["weight"], before)
    change(watched.layer.weight, before + 8)
    assert_is(watched.run()["weight"], before + 8)
    change(watched.layer.weight, before)
    watched.run()
    change(watched.layer.weight, with_nan(before))
    assert_found(watched)


@CHANGES
def test_a_weight_that_is_changed_within_a_batch_is_shown_as_its_module_uses_it(
    watched: Watched, change: Callable[[Tensor, Tensor], None]
) -> None:
    watched.attach()
    before = watched.layer.weight.detach().clone()
    watched.run()
    handle = watched.model[0].register_forward_hook(lambda *_: change(watched.layer.weight, before + 8))
    assert_is(watched.run()["weight"], before + 8)
    handle.remove()
    watched.model[0].register_forward_hook(lambda *_: change(watched.layer.weight, with_nan(before)))
    assert_found(watched)


def test_another_view_of_the_same_storage_is_another_weight(watched: Watched) -> None:
    memory = torch.cat([torch.ones(16), torch.full((16,), 7.0)]).view(4, 8)

    watched.layer.weight.data = memory.view(-1)[:16].view(4, 4)
    watched.attach()
    assert_is(watched.run()["weight"], torch.ones(16))
    watched.layer.weight.data = memory[:, :4]
    assert_is(watched.run()["weight"], memory[:, :4])
    memory[3, 3] = math.nan
    watched.layer.weight.data = memory.view(-1)[:16].view(4, 4)
    assert_is(watched.run()["weight"], memory.view(-1)[:16])
    watched.layer.weight.data = memory[:, :4]
    assert_found(watched)


def test_a_merge_into_what_data_gives_is_seen_in_the_next_batch_unless_only_changes_are_read(
    recorder_name: RecorderName,
) -> None:
    for weights in ("forward", "on_change"):
        watched = Watched(recorder_name, weights)
        watched.attach()
        before = watched.layer.weight.detach().clone()
        watched.run()
        watched.layer.weight.data += 8.0  # which changes neither version nor storage
        assert_is(watched.run()["weight"], before + 8 if weights == "forward" else before)


# packed, quantized, or nowhere


def quantize(layer: nn.Linear) -> Quantized8:
    data = torch.randint(-128, 127, (4, 4), dtype=torch.int8)
    quantized = Quantized8(data, torch.full((4, 1), 0.01))
    layer.weight = nn.Parameter(quantized, requires_grad=False)
    return layer.weight  # type: ignore[return-value]


def test_the_parts_of_a_quantized_weight_are_shown(watched: Watched) -> None:
    weight = quantize(watched.layer)
    watched.attach()
    shown = watched.run()
    assert list(shown) == ["weight.int_data", "weight.scale", "bias"]
    assert_is(shown["weight.int_data"], weight.int_data)
    assert_is(shown["weight.scale"], weight.scale)
    weight.scale[2] = math.nan
    assert_found(watched, "weight.scale")


def test_the_parts_of_a_quantized_weight_are_read_as_often_as_any_weight(
    recorder_name: RecorderName, weights: WeightsName
) -> None:
    watched = Watched(recorder_name, weights)
    quantize(watched.layer)
    model = nn.Sequential(watched.layer, watched.layer, watched.layer)
    monitor = Monitor(model, sinks=[], **watched.options)
    read = []
    for _ in range(2):
        before = monitor.counters().tensors
        model(X)
        read.append(monitor.counters().tensors - before)
    others = 4  # the input, and what each of three calls gives
    assert read == [3 + others, (3 if weights == "forward" else 0) + others]


def test_a_weight_that_is_packed_away_is_not_visible(watched: Watched) -> None:
    with quiet():
        model = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
            nn.Sequential(nn.Identity(), watched.layer), {nn.Linear}
        )
    watched.model = model
    watched.attach()
    model(X)
    assert shown(watched.sink, "1") == {"_packed_params._packed_params": "not visible"}


@pytest.mark.parametrize("value", [[torch.ones(2, 4)] * 2, object()], ids=["a list", "an object"])
def test_a_weight_that_becomes_something_else_is_not_visible(watched: Watched, value: Any) -> None:
    watched.attach()
    whole = watched.layer.weight.detach()
    bias = watched.layer.bias
    delattr(watched.layer, "weight")
    watched.layer.weight = value
    watched.layer.__dict__["forward"] = lambda x: nn.functional.linear(x, whole, bias)
    assert watched.run()["weight"] == "not visible"
    delattr(watched.layer, "weight")
    shown = watched.run()
    assert shown["weight"] == "not visible" and isinstance(shown["bias"], TensorStats)


def test_a_weight_that_is_no_more_has_no_line(watched: Watched) -> None:
    watched.attach()
    watched.layer.bias = None  # type: ignore[assignment]
    assert list(watched.run()) == ["weight"]
    delattr(watched.layer, "bias")
    watched.layer.bias = None  # type: ignore[assignment]
    assert list(watched.run()) == ["weight"]


def test_a_weight_that_is_parametrized_later_is_shown_where_it_went(watched: Watched) -> None:
    class Doubles(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    watched.attach()
    watched.run()
    parametrize.register_parametrization(watched.layer, "weight", Doubles())
    shown = watched.run()
    assert "weight" not in shown
    frame = next(f for f in reversed(watched.sink.frames) if f.module == "1.parametrizations.weight")
    assert [line.label for line in frame.lines] == ["original", "output"]


@pytest.fixture
def third_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"is_available": lambda: True, "is_initialized": lambda: True, "get_rank": lambda group: 2}
    monkeypatch.setattr(capture, "dist", SimpleNamespace(**here))


def in_zero3(whole: int, size: int) -> tuple[nn.Parameter, Tensor]:
    """A weight of so many elements, and a part of it of such a size, whose first elements are 0, 1, ..."""
    weight, part = nn.Parameter(torch.empty(0)), torch.arange(float(size))
    weight.ds_numel, part.ds_numel = whole, size  # type: ignore[attr-defined]
    return weight, part


@pytest.mark.usefixtures("third_of_four")
@pytest.mark.parametrize(("whole", "here"), [(12, 3), (13, 3), (9, 3), (8, 2), (7, 1), (6, 0), (2, 0)])
def test_a_part_in_zero3_is_read_as_far_as_it_is_of_the_weight(whole: int, here: int) -> None:
    """Parts are of 3, and the third one begins with element 6."""
    weight, part = in_zero3(whole, 3)
    found = capture.without_padding(weight, part)
    assert found.tolist() == [0.0, 1.0, 2.0][:here]
    assert capture.without_padding(weight, part) is found
    part[0] = 5.0
    assert found._version == part._version


@pytest.mark.usefixtures("third_of_four")
def test_a_part_in_zero3_whose_memory_is_another_now_is_read_there() -> None:
    weight, part = in_zero3(8, 3)
    capture.without_padding(weight, part)
    part.data = torch.tensor([7.0, 8.0, 9.0])
    assert capture.without_padding(weight, part).tolist() == [7.0, 8.0]
    part.data = torch.empty(1)  # as while it is on a disk
    assert capture.without_padding(weight, part) is weight


def test_a_part_that_tells_no_size_is_read_whole() -> None:
    weight, part = in_zero3(8, 3)
    assert capture.without_padding(weight, part) is part  # where no group is formed
    del part.ds_numel  # type: ignore[attr-defined]
    assert capture.without_padding(weight, part) is part

"""A module that computes in float32 inside of a model that does not."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overflowstat import Monitor, NonFiniteError, run_in_float32
from overflowstat.errors import MonitorWarning
from overflowstat.recorder import RecorderName

WIDTH = 8


class Norm(nn.Module):
    """T5's, which computes in float32 and gives the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(self.weight.dtype)


class FeedForward(nn.Module):
    """wo(wi(x)), which is some `size`, beyond float16 on the way if that is above 2 ** 16 / 64."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.norm = Norm()
        self.wi = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            self.wi.weight.copy_(torch.eye(WIDTH) * 64)
            self.wo.weight.copy_(torch.eye(WIDTH) * size)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wo(self.wi(self.norm(x))) / 64
        return x + y


class Block(nn.Module):
    def __init__(self, sizes: list[float]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(map(FeedForward, sizes))
        self.final = Norm()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        y: Tensor = self.final(x)
        return y


class Encoder(nn.Module):
    def __init__(self, sizes: list[float]) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.block = Block(sizes)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.block(self.embed(tokens))
        return y


TOKENS = torch.tensor([[0, 1, 2], [3, 4, 0]])


def encoder(sizes: list[float], dtype: torch.dtype = torch.float16) -> Encoder:
    torch.manual_seed(0)
    return Encoder(sizes).to(dtype)


def test_what_overflows_inside_and_fits_outside_is_cured(recorder_name: RecorderName) -> None:
    """64 * 2000 is beyond float16, a 64th of it is not."""
    model = encoder([1.0, 2000.0])
    monitor = Monitor(model, sinks=[], recorder=recorder_name)
    with pytest.raises(NonFiniteError, match=r"first in block\.layer\.1\.wo \(Linear\)"):
        model(TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with run_in_float32(model, "block.layer.1", recorder=recorder_name):
            output = model(TOKENS)
    assert output.dtype == torch.float16
    expected = encoder([1.0, 2000.0]).float()(TOKENS)
    torch.testing.assert_close(output.float(), expected, rtol=2e-3, atol=2e-3)
    with pytest.raises(NonFiniteError):
        model(TOKENS)
    monitor.remove()


def test_a_sum_beyond_float16_is_not_cured_by_its_module_which_says_so_once(recorder_name: RecorderName) -> None:
    model = encoder([60000.0, 60000.0])
    region = run_in_float32(model, "block.layer.1", recorder=recorder_name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert not model.block.layer[1](torch.full((1, WIDTH), 60000.0).half()).isfinite().any()
    assert all(warning.category is MonitorWarning for warning in caught)
    assert [str(warning.message) for warning in caught] == [
        "block.layer.1 runs in float32, and 8 of 8 values of its output, up to 1.2e+05, are beyond float16's 65504, so "
        'that they are inf where it is cast back. What to do: run_in_float32(model, "block") for the module around it, '
        "bfloat16 for the model, or a clamp of its output"
    ]
    region.remove()
    assert not torch.isfinite(model(TOKENS)).all()
    expected = encoder([60000.0, 60000.0]).float()(TOKENS)
    with run_in_float32(model, "block", recorder=recorder_name):  # one module up, as that says
        torch.testing.assert_close(model(TOKENS).float(), expected, rtol=2e-3, atol=2e-3)
    in_bfloat16 = encoder([60000.0, 60000.0], torch.bfloat16)(TOKENS)
    torch.testing.assert_close(in_bfloat16.float(), expected, rtol=2e-2, atol=2e-2)


def test_values_that_were_bad_before_they_were_cast_back_are_no_overflow_of_it() -> None:
    model = nn.Sequential(nn.Identity(), nn.Softplus()).half()
    run_in_float32(model, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(torch.tensor([float("inf"), float("nan"), 1.0]).half())[:2].isfinite().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("checkpointed", [None, True, False])
def test_gradients_are_those_of_float32_on_the_very_parameters(dtype: torch.dtype, checkpointed: bool | None) -> None:
    """None: without checkpoint; or whether that is reentrant."""
    torch.manual_seed(0)

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) if checkpointed is None else checkpoint(layer, x, use_reentrant=checkpointed)
            return x

    outer = nn.Sequential(Model()).to(dtype)
    parameters = list(outer.parameters())
    reference = copy.deepcopy(outer).float()
    run_in_float32(outer, "0")
    x = torch.randn(4, 6).to(dtype).requires_grad_()
    y = x.detach().float().requires_grad_()
    output = outer(x)
    assert output.dtype == dtype
    output.float().square().sum().backward()
    reference(y).square().sum().backward()
    assert all(one is other for one, other in zip(outer.parameters(), parameters, strict=True))
    assert all(type(parameter) is nn.Parameter and parameter.dtype == dtype for parameter in parameters)
    unit = torch.finfo(dtype).eps
    assert x.grad is not None and y.grad is not None
    torch.testing.assert_close(x.grad.float(), y.grad, rtol=4 * unit, atol=8 * unit)
    for one, other in zip(outer.parameters(), reference.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=4 * unit, atol=8 * unit)
    before = parameters[0].detach().clone()
    torch.optim.SGD(outer.parameters(), lr=1.0).step()
    assert not torch.equal(parameters[0], before)


def test_the_checkpoint_around_the_module(recorder_name: RecorderName) -> None:
    model = encoder([1.0, 2000.0])
    run_in_float32(model, "block.layer.1", recorder=recorder_name)
    x = torch.randn(2, WIDTH).half().requires_grad_()
    checkpoint(model.block, x, use_reentrant=False).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_it_computes_in_float32_and_its_output_stays_that(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    met: list[torch.dtype] = []
    model[1].register_forward_hook(lambda module, args, output: met.append(output.dtype))
    region = run_in_float32(model, "1")
    x = torch.randn(3, 6)
    with torch.autocast("cpu", dtype):
        assert model(x).dtype == dtype
        hidden = model[0](x)
        output = model[1](hidden)
        assert torch.is_autocast_enabled("cpu")
    assert met == [torch.float32, torch.float32]
    region.remove()
    torch.testing.assert_close(output, model[1](hidden.float()))
    output.sum().backward()
    gradient = model.get_parameter("1.weight").grad
    assert gradient is not None and gradient.dtype == torch.float32
    with torch.autocast("cpu", dtype):
        assert model[1](hidden).dtype == dtype


def test_inputs_are_cast_wherever_they_are_and_others_left_alone() -> None:
    @dataclass
    class Data:
        x: Tensor
        n: int

    class Looks(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.seen = args, kwargs
            return {"dtypes": [args[0][1], args[1]["a"]], "n": 3, "half": kwargs["data"].x * 2}

    model = nn.Sequential(Looks())
    run_in_float32(model, "0")
    half, wide, ids = torch.ones(2).half(), torch.ones(2).double(), torch.ones(2, dtype=torch.int64)
    data, plain = Data(half, 4), {"ids": ids}
    output = model[0]([ids, half], {"a": wide}, data=data, plain=plain)
    looks = model[0]
    assert isinstance(looks, Looks)
    (first, second), seen = looks.seen
    assert first[0] is ids and first[1].dtype == torch.float32 and second["a"] is wide
    assert seen["data"].x is first[1] and seen["data"].n == 4 and data.x is half  # one copy; the caller's is as it was
    assert seen["plain"] is plain
    assert output["dtypes"][0] is half and output["dtypes"][1] is wide and output["n"] == 3
    assert output["half"].dtype == torch.float16


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_running_statistics_are_written_in_their_own_dtype(mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4)).half().train()
    reference = copy.deepcopy(model).float()
    mean, variance, count = (model.get_buffer(f"0.{name}") for name in list(model[0]._buffers))
    run_in_float32(model, "0")
    x = torch.randn(5, 4)
    with mode():
        model(x.half())
        reference(x.half().float())
    assert model[0].running_mean is mean and mean.dtype == torch.float16 and int(count) == 1
    torch.testing.assert_close(mean, reference.get_buffer("0.running_mean").half())
    torch.testing.assert_close(variance, reference.get_buffer("0.running_var").half())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_it_writes_into_an_input_is_written_back(mode: Callable[[], Any]) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            cache[1] = x.sum()
            return x.mul_(2)

    model = nn.Sequential(Writes())
    run_in_float32(model, "0")
    with mode():
        x, cache = torch.ones(3).half(), torch.zeros(2).half()
        output = model[0](x, cache)
        assert output is x and x.tolist() == [2.0, 2.0, 2.0] and cache.tolist() == [0.0, 3.0]
        model[0](torch.ones(1).half().expand(3).clone(), cache)
    with torch.autocast("cpu"):
        y = torch.ones(3).half()
        output = model[0](y, torch.zeros(2))
    assert output.dtype == torch.float32 and y.tolist() == output.tolist() == [2.0, 2.0, 2.0]


def test_a_buffer_that_the_forward_replaces_keeps_its_dtype() -> None:
    class Counts(nn.Module):
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(1).half())

        def forward(self, x: Tensor) -> Tensor:
            self.total = self.total + x.sum()
            return x * 1

    model = nn.Sequential(Counts())
    run_in_float32(model, "0")
    model(torch.ones(3).half())
    total = model.get_buffer("0.total")
    assert total.dtype == torch.float16 and total.tolist() == [3.0]


def test_tied_weights_get_the_gradients_of_both_uses() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.embed(x))
            return y

    torch.manual_seed(0)
    model = nn.Sequential(Tied()).half()
    reference = copy.deepcopy(model).float()
    run_in_float32(model, "")
    ids = torch.tensor([0, 2])
    output = model(ids)
    assert output.dtype == torch.float16  # of the weights, since no input has a floating point
    output.sum().backward()
    reference(ids).sum().backward()
    weight, expected = (each.get_parameter("0.embed.weight") for each in (model, reference))
    assert model.get_parameter("0.head.weight") is weight
    assert weight.grad is not None and expected.grad is not None
    torch.testing.assert_close(weight.grad.float(), expected.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(4, 3, batch_first=True),
        lambda: nn.GRU(4, 3, num_layers=2, batch_first=True),
        lambda: nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.0, batch_first=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_modules_that_keep_their_weights_in_ways_of_their_own(make: Callable[[], nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"m": make()}).bfloat16().train(training)
    reference = copy.deepcopy(model).float()
    run_in_float32(model, "m")
    x = torch.randn(2, 5, 4).bfloat16()
    output, expected = model["m"](x), reference["m"](x.float())
    if isinstance(output, tuple):
        output, expected = output[0], expected[0]
    torch.testing.assert_close(output, expected.bfloat16())
    output.sum().backward()
    assert all(weight.grad is not None and weight.grad.dtype == torch.bfloat16 for weight in model.parameters())


def test_no_copy_of_the_weights_is_left_after_a_forward_without_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 3)).half()
    copies: list[weakref.ref[Tensor]] = []
    original = nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        assert weight.dtype == torch.float32
        copies.append(weakref.ref(weight))
        return original(x, weight, bias)

    run_in_float32(model, "0")
    nn.functional.linear = linear  # type: ignore[assignment]
    try:
        with torch.no_grad():
            model(torch.ones(1, 3).half())
    finally:
        nn.functional.linear = original
    assert len(copies) == 1 and copies[0]() is None


def test_state_dict_and_attributes_are_as_they_were() -> None:
    model = encoder([1.0])
    before, signature = model.state_dict(), inspect.signature(model.block.forward)
    region = run_in_float32(model, "block")
    model(TOKENS)
    after = model.state_dict()
    assert list(after) == list(before) and all(after[name] is not None for name in before)
    assert all(after[name].data_ptr() == before[name].data_ptr() for name in before)
    assert inspect.signature(model.block.forward) == signature
    model.load_state_dict(before)
    region.remove()
    region.remove()
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_run_in_float32_on_weights_of_their_own(copied: Callable[[Any], Any]) -> None:
    model = encoder([2000.0])
    run_in_float32(model, "block.layer.0")
    other = copied(model)
    for weight in model.parameters():
        weight.data.fill_(float("nan"))
    assert other(TOKENS).isfinite().all() and not model(TOKENS).isfinite().any()


def test_removed_in_any_order_and_inside_of_each_other() -> None:
    model = encoder([2000.0])
    outer, inner = run_in_float32(model, "block"), run_in_float32(model, "block.layer.0")
    expected = model(TOKENS)
    assert expected.isfinite().all()
    outer.remove()
    assert model(TOKENS).isfinite().all()
    inner.remove()
    assert not model(TOKENS).isfinite().all()


def test_a_forward_that_raises_leaves_the_weights_as_they_were() -> None:
    class Raises(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert self.weight.dtype == torch.float32
            raise KeyError("mine")

    model = nn.Sequential(Raises(2, 2)).half()
    run_in_float32(model, "0")
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            model(torch.ones(1, 2).half())
        assert type(model[0].weight) is nn.Parameter and model[0].weight.dtype == torch.float16


def test_a_monitor_sees_float32_inside_and_the_dtype_of_the_model_outside(recorder_name: RecorderName) -> None:
    model, sink = encoder([1.0]), Keeps()
    run_in_float32(model, "block.layer.0")
    with Monitor(model, sinks=[sink], recorder=recorder_name):
        model(TOKENS)
    lines = {
        f"{frame.module}:{line.label}": str(line.content.dtype).removeprefix("torch.")  # type: ignore[union-attr]
        for frame in sink.take()
        for line in frame.lines
    }
    assert lines["block.layer.0.wo:weight"] == lines["block.layer.0.wo:output"] == "float32"
    assert lines["block.layer.0.norm:input[0]"] == "float32"
    assert lines["block.layer.0:input[0]"] == lines["block.layer.0:output"] == lines["embed:weight"] == "float16"


def test_threads_take_turns() -> None:
    model = encoder([2000.0])
    run_in_float32(model, "block")
    with torch.no_grad():
        expected = model(TOKENS)
    wrong: list[int] = []

    def work() -> None:
        with torch.no_grad():
            wrong.extend(1 for _ in range(50) if not torch.equal(model(TOKENS), expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and all(weight.dtype == torch.float16 for weight in model.parameters())


def test_a_compiled_model_runs_it_as_it_is() -> None:
    model = encoder([2000.0])
    run_in_float32(model, "block.layer.0")
    try:
        assert torch.compile(model, backend="eager")(TOKENS).isfinite().all()
    finally:
        torch.compiler.reset()


def test_names_that_are_none_are_told_with_those_that_are_near() -> None:
    model = encoder([1.0, 1.0])
    with pytest.raises(ValueError, match=r"name='block\.layers\.1': the model has no such module; near: 'block\.layer"):
        run_in_float32(model, "block.layers.1")
    with pytest.raises(ValueError, match=r"name='wo': .*; near: 'block\.layer\.0\.wo', 'block\.layer\.1\.wo'"):
        run_in_float32(model, "wo")
    with pytest.raises(TypeError, match="name=3: must be the qualified name of a module, not int"):
        run_in_float32(model, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not list"):
        run_in_float32([], "")  # type: ignore[arg-type]
    assert all("forward" not in module.__dict__ for module in model.modules())

"""Every kind of tensor that a hook may meet: what is seen of it, and that it is left as it was."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expected_rows import expected_row
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from value_kinds import KINDS, Kind, Untouchable, floats, freed, quiet
from wrapper import Wrapper

from overflowstat import DebugUnderflowOverflow, Monitor, NonFiniteError, TensorStats
from overflowstat.errors import MonitorWarning
from overflowstat.frames import Frame
from overflowstat.monitor import WeightsName
from overflowstat.recorder import RecorderName
from overflowstat.report import Report


class Takes(nn.Module):
    """Takes anything, and gives `gives`."""

    def __init__(self) -> None:
        super().__init__()
        self.gives: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.gives


def give(model: Takes, value: Any) -> None:
    # Past nn.Module, which would make a parameter of a parameter.
    model.__dict__["gives"] = value
    model()


PLACES: dict[str, Callable[[Takes, Any], None]] = {
    "input[0]": lambda model, value: model(value),
    "input[key]": lambda model, value: model(key=value),
    "input[0][a][1]": lambda model, value: model({"a": [None, value]}),
    "output": give,
    "output[0][0]": lambda model, value: give(model, ([value],)),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
bad_kinds = {name: kind for name, kind in KINDS.items() if kind.can_be_bad}
places = pytest.mark.parametrize("place", PLACES)


def watched(recorder_name: RecorderName, **options: Any) -> tuple[Takes, Monitor]:
    model = Takes()
    return model, Monitor(model, recorder=recorder_name, sinks=[], **options)


def lines_under(monitor: Monitor, place: str) -> list[tuple[str, TensorStats | str]]:
    """(what comes after the place, content) of the lines of the last frame that begin with it."""
    lines = monitor.frames[-1].lines
    return [(line.label.removeprefix(place), line.content) for line in lines if line.label.startswith(place)]


def assert_is(content: TensorStats | str, plain: Tensor | str) -> None:
    if isinstance(plain, str) or isinstance(content, str):
        assert content == plain
        return
    for name, value in expected_row(plain).items():
        found = getattr(content, name)
        assert found == value or (math.isnan(found) and math.isnan(value)), (name, found, value)  # type: ignore[arg-type]
    assert content.dtype == plain.dtype and content.shape == tuple(plain.shape)


@places
@kinds
def test_a_line_shows_the_numbers_or_says_what_it_is(recorder_name: RecorderName, kind: Kind, place: str) -> None:
    model, monitor = watched(recorder_name)
    value, shown = kind.make(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        kind.within(lambda x: PLACES[place](model, x), value)
    lines = lines_under(monitor, place)
    assert [suffix for suffix, _ in lines] == [suffix for suffix, _ in shown]
    for (_, content), (_, plain) in zip(lines, shown, strict=True):
        assert_is(content, plain)
    assert monitor.batch_number == 1 and not monitor.detected_overflow


@places
@pytest.mark.parametrize("kind", bad_kinds.values(), ids=bad_kinds)
def test_a_nan_in_it_is_detected(recorder_name: RecorderName, kind: Kind, place: str) -> None:
    model, _ = watched(recorder_name)
    value, shown = kind.make(True)
    with pytest.raises(NonFiniteError) as raised:
        kind.within(lambda x: PLACES[place](model, x), value)
    found = {line.label: line.content for line in raised.value.frames[-1].bad_lines}
    bad = {place + s: plain for s, plain in shown if isinstance(plain, Tensor) and expected_row(plain)["nan_count"]}
    assert bad and found.keys() == bad.keys()
    for label, plain in bad.items():
        assert_is(found[label], plain)


def bytes_of(tensor: Tensor) -> list[int]:
    """Of all memory that a plain tensor is a view of."""
    return list(tensor.detach().untyped_storage())


def state(tensor: Tensor) -> tuple[Any, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        asked = []
        for name in ("requires_grad", "is_leaf", "_version", "device", "layout", "shape", "_base"):
            try:
                asked.append(getattr(tensor, name))
            except RuntimeError as error:
                asked.append(str(error))
        return (*asked, id(tensor.grad_fn) if tensor.grad_fn is not None else None, type(tensor))


@kinds
def test_watching_leaves_it_as_it_was(recorder_name: RecorderName, kind: Kind) -> None:
    model, _ = watched(recorder_name)
    value, shown = kind.make(False)
    plain = [p for _, p in shown if isinstance(p, Tensor)]
    before = [bytes_of(p) for p in plain], [state(p) for p in plain], torch.get_rng_state().tolist()

    def call(x: Tensor) -> None:
        of_value = state(x)
        for put in PLACES.values():
            put(model, x)
        after = state(x)
        assert all(a is b or a == b for a, b in zip(of_value, after, strict=True))

    kind.within(call, value)
    assert [bytes_of(p) for p in plain] == before[0]
    assert repr([state(p) for p in plain]) == repr(before[1])
    assert torch.get_rng_state().tolist() == before[2]


@kinds
@pytest.mark.parametrize("traced", [(), (0, 1, 2, 3, 4)], ids=["judged", "traced"])
def test_the_drop_in_takes_it(
    recorder_name: RecorderName, kind: Kind, traced: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    model = Takes()
    debugger = DebugUnderflowOverflow(model, recorder=recorder_name, trace_batch_nums=traced)
    value, _ = kind.make(False)

    def call(x: Tensor) -> None:
        for put in PLACES.values():
            put(model, x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may say what it could not read
        kind.within(call, value)
    assert debugger.batch_number == len(PLACES)
    assert (" input[0]\n" in capsys.readouterr().out) == bool(traced)


@kinds
@pytest.mark.parametrize("weights", ["forward", "on_change"])
def test_as_a_weight_it_is_shown_the_same(recorder_name: RecorderName, kind: Kind, weights: WeightsName) -> None:
    frames: list[Frame] = []

    def watch(weight: Tensor) -> None:
        model = Takes()
        model._parameters["weight"] = weight  # type: ignore[assignment]
        monitor = Monitor(
            model, recorder=recorder_name, sinks=[], weights=weights, on_detect=lambda report: frames.append(report.bad)
        )
        for _ in range(2):
            model(torch.ones(2))
            frames.extend(monitor.frames)

    for bad in (False, True)[: 1 + kind.can_be_bad]:
        value, shown = kind.make(bad)
        kind.within(watch, value)
        for frame in frames:
            lines = [line for line in frame.lines if line.label.startswith("weight")]
            assert [line.label for line in lines] == ["weight" + suffix for suffix, _ in shown]
            for line, (_, plain) in zip(lines, shown, strict=True):
                assert_is(line.content, "offloaded" if isinstance(plain, str) and plain == "meta" else plain)
        assert any(frame.bad_lines for frame in frames) == bad and len(frames) >= 1
        frames.clear()


# nothing is copied


class LargestAllocation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of the storage that operations make, in bytes, besides that of `memory`."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0
        self.known = memory.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self.known, *(x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if has_storage(x))}
        result = func(*args, **(kwargs or {}))
        for made in filter(has_storage, tree_leaves(result)):
            if made.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, made.untyped_storage().nbytes())
        return result


def has_storage(x: Any) -> bool:
    return isinstance(x, Tensor) and torch._C._has_storage(x)


def memory(x: Tensor) -> Tensor:
    """A plain tensor in the memory of which the numbers are."""
    if isinstance(x, Wrapper):
        return x.parts["part0"]
    return x._values() if x.is_sparse else x


LARGE = 1 << 22


def large_nested() -> Tensor:
    with quiet():
        return torch.nested.nested_tensor([torch.ones(LARGE // 2), torch.ones(LARGE // 2)])


LARGE_VALUES: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.ones(LARGE),
    "float16, transposed": lambda: torch.ones(LARGE // 1024, 1024, dtype=torch.float16).t()[:, 1:],
    "bool": lambda: torch.ones(4 * LARGE, dtype=torch.bool),
    "conjugated": lambda: torch.ones(LARGE, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.sparse_coo_tensor(torch.arange(LARGE).unsqueeze(0), torch.ones(LARGE), (LARGE,)),
    "nested": large_nested,
    "nested, transposed": lambda: torch.nested.nested_tensor([torch.ones(1024, LARGE // 1024)]).transpose(1, 2),
    "wrapper": lambda: Wrapper(torch.ones(LARGE)),
    "requires grad": lambda: torch.ones(LARGE, requires_grad=True),
}


@pytest.mark.parametrize("make", LARGE_VALUES.values(), ids=LARGE_VALUES)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_large_one_is_not_copied(recorder_name: RecorderName, make: Callable[[], Tensor]) -> None:
    value = make()
    model, monitor = watched(recorder_name)
    model(torch.ones(3))
    with LargestAllocation(memory(value)) as allocated:
        model(value)
    (_, content), *_ = lines_under(monitor, "input[0]")
    assert isinstance(content, TensorStats) and content.numel > LARGE // 2
    assert allocated.largest <= LARGE // 8  # bytes, of 8 * LARGE and more


def test_what_is_counted_as_a_copy_is_one() -> None:
    value = torch.ones(LARGE)
    with LargestAllocation(value) as allocated:
        value.view(2, -1)[1].detach()
    assert allocated.largest == 0
    with LargestAllocation(value) as allocated:
        value.clone()
    assert allocated.largest == 4 * LARGE


# shards of many processes


class Refused(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A collective would wait for other processes, which may not be in this hook."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise AssertionError(f"a collective: {func}")
        return func(*args, **(kwargs or {}))


COLLECTIVES = [
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier", "reduce"),
    *(
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
        "gather",
        "scatter",
        "send",
        "recv",
    ),
]


def refuse_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a collective")

    for name in COLLECTIVES:
        monkeypatch.setattr(dist, name, refuse)
        monkeypatch.setattr(dist.distributed_c10d, name, refuse)


@places
def test_of_a_sharded_tensor_the_part_that_is_here_is_read_and_nothing_waits_for_others(
    recorder_name: RecorderName, mesh: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        for bad in (False, True):
            local = floats(bad, 3, 4)
            value = DTensor.from_local(local, mesh, [placement], run_check=False)
            reports: list[Report] = []
            model, monitor = watched(recorder_name, on_detect=reports.append)
            with monkeypatch.context() as patch, Refused():  # type: ignore[no-untyped-call]
                refuse_collectives(patch)
                PLACES[place](model, value)
            frame = reports[0].bad if bad else monitor.frames[-1]
            ((_, content),) = [(line.label, line.content) for line in frame.lines if line.label == place]
            assert_is(content, local)
            assert monitor.detected_overflow == bad


@places
def test_a_sharded_tensor_without_a_part_here_says_so(recorder_name: RecorderName, mesh: Any, place: str) -> None:
    from torch.distributed.tensor import DTensor, Shard

    local = torch.empty(0, 4)
    value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([3, 4]), stride=(4, 1))
    model, monitor = watched(recorder_name)
    PLACES[place](model, value)
    assert lines_under(monitor, place) == [("", "empty here")]
    of_none = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    PLACES[place](model, of_none)
    ((_, content),) = lines_under(monitor, place)
    assert isinstance(content, TensorStats) and content.numel == 0


# one that cannot be read does not keep others from being read


def test_what_cannot_be_read_does_not_hide_what_can(recorder_name: RecorderName) -> None:
    model, monitor = watched(recorder_name)
    words = {name: kind.make(False) for name, kind in KINDS.items() if isinstance(kind.make(False)[1][0][1], str)}
    assert len(words) > 10
    model(*(value for value, _ in words.values()), torch.ones(2))
    assert [line.content for line in monitor.frames[-1].lines[:-2]] == [shown[0][1] for _, shown in words.values()]
    with pytest.raises(NonFiniteError, match=rf"input\[{len(words)}\]: 1 of 2 is nan"):
        model(*(value for value, _ in words.values()), torch.tensor([1.0, math.nan]))


def test_rows_without_a_finite_number_are_counted_whatever_the_class_of_the_tensor_allows(
    recorder_name: RecorderName,
) -> None:
    value = torch.ones(3, 4)
    value[1] = math.nan
    reports: list[Report] = []
    model, _ = watched(recorder_name, on_detect=reports.append)
    kept = value.as_subclass(Untouchable)
    model(kept)
    assert reports[0].wholly_bad_rows == (1, 3)


def test_storage_that_is_freed_after_it_was_read_leaves_what_was_read(recorder_name: RecorderName) -> None:
    model, monitor = watched(recorder_name)
    value = torch.full((4,), 3.0)
    model(value)
    value.untyped_storage().resize_(0)
    ((_, content),) = lines_under(monitor, "input[0]")
    assert isinstance(content, TensorStats) and content.abs_max == 3.0
    model(value, freed())
    assert [line.content for line in monitor.frames[-1].lines[:2]] == ["empty here", "empty here"]

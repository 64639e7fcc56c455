"""Modes in which somebody counts, keeps or changes what a model computes do not see what watching computes."""

import functools
from typing import Any

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from overflowstat import Monitor, NonFiniteError, TensorStats
from overflowstat.recorder import RecorderName


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Zeroes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives zeros in place of all results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return torch.zeros_like(result) if isinstance(result, Tensor) else result


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.linear(x) if x.layout == torch.strided and x.dtype == torch.float32 and not x.is_nested else x


VALUES = {
    "floats": torch.ones(2, 4),
    "transposed": torch.ones(4, 2).t(),
    "integers": torch.arange(8),
    "bools": torch.ones(3, dtype=torch.bool),
    "complex": torch.ones(3, dtype=torch.complex64),
    "sparse": torch.eye(3).to_sparse(),
    "compressed": torch.eye(3).to_sparse_csr(),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}
every_value = pytest.mark.parametrize("x", VALUES.values(), ids=VALUES)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning", "ignore:.*CSR tensor.*:UserWarning")
@every_value
@pytest.mark.parametrize("mode", [Dispatched, Called])
def test_a_mode_sees_the_model_and_nothing_else(recorder_name: RecorderName, mode: Any, x: Tensor) -> None:
    model = Passes()
    with mode() as before:
        model(x)
    Monitor(model, recorder=recorder_name, sinks=[], reuse_unchanged=False, buffers=True)
    with mode() as watched:
        model(x)
    assert watched.seen == before.seen


@pytest.mark.parametrize("mode", [Dispatched, Called])
def test_a_mode_does_not_see_a_report_being_made(recorder_name: RecorderName, mode: Any) -> None:
    model = Passes()
    x = torch.full((2, 4), float("nan"))
    with mode() as before:
        model(x)
    Monitor(model, recorder=recorder_name, sinks=[], on_detect=lambda report: None)
    with mode() as watched:
        model(x)
    assert watched.seen == before.seen


def test_what_a_mode_makes_of_operations_does_not_change_what_is_read(recorder_name: RecorderName, sink: Keeps) -> None:
    model = Passes()
    nn.init.constant_(model.linear.weight, -3.0)
    Monitor(model, recorder=recorder_name, sinks=[sink])
    x = torch.full((2, 4), 2.0)
    with Zeroes():  # type: ignore[no-untyped-call]
        model(x)
    found = {line.label: line.content for line in sink.frames[0].lines}
    shown = {label: found[label] for label in ("weight", "input[0]", "output")}
    assert {k: v.abs_max for k, v in shown.items() if isinstance(v, TensorStats)} == {
        "weight": 3.0,
        "input[0]": 2.0,
        "output": 0.0,
    }


@pytest.mark.filterwarnings("error::overflowstat.errors.MonitorWarning")
def test_real_weights_are_read_among_fake_tensors(recorder_name: RecorderName, sink: Keeps) -> None:
    model = Passes()
    nn.init.constant_(model.linear.weight, -3.0)
    Monitor(model, recorder=recorder_name, sinks=[sink])
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.ones(2, 4))
    found = {line.label: line.content for line in sink.frames[0].lines}
    assert isinstance(found["weight"], TensorStats) and found["weight"].abs_max == 3.0
    assert found["input[0]"] == found["output"] == "FakeTensor"
    model.linear.weight.data[1, 2] = float("nan")
    with pytest.raises(NonFiniteError, match=r"weight: 1 of 16 is nan, first at \[1, 2\]"):
        model(torch.ones(2, 4))


def test_selective_checkpointing_recomputes_what_was_computed(recorder_name: RecorderName, sink: Keeps) -> None:
    """It keeps results by the order of the operations: ours would be given as the model's, or the other way round."""

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            keep_all = functools.partial(
                create_selective_checkpoint_contexts, lambda context, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE
            )
            y: Tensor = checkpoint(self.block, x, use_reentrant=False, context_fn=keep_all)
            return y

    model = Selective()
    Monitor(model, recorder=recorder_name, sinks=[sink], reuse_unchanged=False)
    model(torch.full((2, 4), 0.5)).sum().backward()
    computed = {frame.module: frame.lines for frame in sink.frames if not frame.is_recompute}
    recomputed = {frame.module: frame.lines for frame in sink.frames if frame.is_recompute}
    assert recomputed and all(computed[module] == lines for module, lines in recomputed.items())


@pytest.mark.parametrize("place", ["input", "weight"])
def test_a_lazy_clone_stays_one(recorder_name: RecorderName, place: str) -> None:
    """It shares the memory of what it was made of until one of the two is written to."""
    model = Passes()
    clone = torch._lazy_clone(torch.ones(4, 4))
    if place == "weight":
        model.linear.weight.data = clone
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    with torch.no_grad():
        model(clone if place == "input" else torch.ones(2, 4))
    assert monitor.counters().bytes_read >= 64
    shown = model.linear.weight.data if place == "weight" else clone
    assert torch._C._is_cow_tensor(shown)  # type: ignore[attr-defined]

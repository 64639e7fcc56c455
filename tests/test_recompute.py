"""Activation checkpointing: the backward runs parts of the forward once more, which is no forward of the model."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from transformers.debug_utils import DebugUnderflowOverflow as Reference

from overflowstat import DebugUnderflowOverflow, Monitor, NonFiniteError
from overflowstat.frames import Frame
from overflowstat.recorder import RecorderName


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(torch.tanh(self.linear(x)))
        return y


class Model(nn.Module):
    """Two blocks, each of them checkpointed."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, self.second):
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Whole(nn.Module):
    """As a part of a larger model that is checkpointed as a whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.model, x, use_reentrant=False)
        return y


reentrant = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def inputs() -> Tensor:
    return torch.linspace(-2, 2, 12).reshape(3, 4).requires_grad_()


@reentrant
def test_frames_of_a_recompute_say_so_and_are_in_no_batch(recorder_name: RecorderName, use_reentrant: bool) -> None:
    sink = Keeps()
    model = Model(use_reentrant)
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    for number in range(2):
        sink.frames.clear()
        loss = model(inputs()).sum()
        forward = list(sink.frames)
        assert not any(frame.is_recompute for frame in forward)
        assert monitor.batch_number == number + 1
        sink.frames.clear()
        loss.backward()
        # The blocks in reverse; a non-reentrant recompute ends where it has what the backward needs.
        again = [frame.module for frame in sink.frames]
        assert again[0] == "second.linear" and "first.linear" in again
        assert all(frame.is_recompute and not frame.starts_batch for frame in sink.frames)
        assert {frame.batch_number for frame in forward + sink.frames} == {number}
        assert monitor.batch_number == number + 1


@reentrant
def test_what_is_recomputed_is_what_was_computed(recorder_name: RecorderName, use_reentrant: bool) -> None:
    """With dropout: reading draws no random numbers."""
    sink = Keeps()
    model = Model(use_reentrant)
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model(inputs()).sum().backward()
    first: dict[str, Frame] = {}
    compared = 0
    for frame in sink.frames:
        if frame.is_recompute:
            assert frame.lines == first[frame.module].lines
            compared += 1
        else:
            first[frame.module] = frame
    assert compared >= 2


@reentrant
def test_gradients_are_those_of_the_unwatched_model(recorder_name: RecorderName, use_reentrant: bool) -> None:
    plain = Model(use_reentrant)
    watched = copy.deepcopy(plain)
    Monitor(watched, recorder=recorder_name, sinks=[])
    gradients = []
    for model in (plain, watched):
        torch.manual_seed(1)
        x = inputs()
        model(x).square().sum().backward()
        gradients.append([x.grad, *(weight.grad for weight in model.parameters())])
    assert all(a is not None and torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_weights_are_not_read_once_more_for_a_recompute(recorder_name: RecorderName) -> None:
    sink = Keeps()
    model = Model(use_reentrant=True)
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    loss = model(inputs()).sum()
    before = monitor.counters()
    sink.frames.clear()
    loss.backward()
    assert monitor.counters().frames - before.frames == len(sink.frames) == 6
    # Of each block: its input, which comes back from where it was saved, and what its modules make of it.
    assert monitor.counters().tensors - before.tensors == 2 * 5


def test_a_traced_batch_shows_its_recompute_and_no_other(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(use_reentrant=True)
    Monitor(model, recorder=recorder_name, trace_batch_nums=[1])
    for _ in range(3):
        model(inputs()).sum().backward()
    out = capsys.readouterr().out
    assert out.count("Starting batch number=") == out.count("Starting batch number=1 ") == 1
    assert out.count(" first.linear Linear\n") == 1 and out.count(" first.linear Linear (recomputed)\n") == 1


def traced(watch: Any, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The modules that a trace of batch 1 of three prints."""
    model = Model(use_reentrant=True)
    watch(model, trace_batch_nums=[1])
    for _ in range(3):
        model(inputs()).sum().backward()
    lines = capsys.readouterr().out.splitlines()
    return [line.split()[0] for line in lines if line.endswith(" Linear")]


def test_the_drop_in_shows_what_is_recomputed_with_what_it_repeats(capsys: pytest.CaptureFixture[str]) -> None:
    """The original shows it with the batch after that, before the forward of that one."""
    forward, recompute = ["first.linear", "second.linear"], ["second.linear", "first.linear"]
    assert traced(Reference, capsys) == recompute + forward
    assert traced(DebugUnderflowOverflow, capsys) == forward + recompute


def test_the_drop_in_leaves_the_headings_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(use_reentrant=True)
    DebugUnderflowOverflow(model, trace_batch_nums=[0])
    model(inputs()).sum().backward()
    out = capsys.readouterr().out
    assert out.count(" first.linear Linear\n") == 2 and "recomputed" not in out


def test_a_model_that_is_checkpointed_as_a_whole_runs_one_batch_a_step(recorder_name: RecorderName) -> None:
    model = Model(use_reentrant=False)
    whole = Whole(model)
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    for number in range(1, 4):
        whole(inputs()).sum().backward()
        assert monitor.batch_number == number


def test_a_root_that_is_recomputed_to_its_end_runs_one_batch_a_step(recorder_name: RecorderName) -> None:
    sink = Keeps()
    model = Block()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    for number in range(1, 3):
        sink.frames.clear()
        checkpoint(model, inputs(), use_reentrant=True).sum().backward()
        assert monitor.batch_number == number
        assert [frame.is_recompute for frame in sink.frames if frame.module == ""] == [False, True]


@reentrant
def test_checkpointing_of_segments(recorder_name: RecorderName, use_reentrant: bool) -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint_sequential(self.blocks, 2, x, use_reentrant=use_reentrant)  # type: ignore[no-untyped-call]
            return y

    sink = Keeps()
    model = Segments()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    for _ in range(2):
        model(inputs()).sum().backward()
    assert monitor.batch_number == 2
    # The last segment is not checkpointed.
    assert {frame.module[:8] for frame in sink.frames if frame.is_recompute} == {"blocks.0", "blocks.1"}


class BadOnceMore(nn.Module):
    """Finite when it is called first, and not when it is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.exp() * (1.0 if self.calls % 2 else float("inf"))


def test_a_recompute_that_goes_bad_is_told_with_the_batch_that_it_recomputes(recorder_name: RecorderName) -> None:
    model = Model(use_reentrant=True)
    model.second.dropout = BadOnceMore()  # type: ignore[assignment]
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    for number in range(2):
        loss = model(inputs()).sum()
        with pytest.raises(NonFiniteError) as raised:
            loss.backward()
        assert raised.value.batch_number == number and raised.value.frames[-1].is_recompute
        assert monitor.batch_number == number + 1


def detach_by_remove(monitor: Monitor) -> None:
    monitor.remove()


def detach_by_disable(monitor: Monitor) -> None:
    monitor.disable()


@reentrant
@pytest.mark.parametrize("detach", [detach_by_remove, detach_by_disable])
def test_detaching_between_forward_and_backward_is_safe(
    recorder_name: RecorderName, use_reentrant: bool, detach: Callable[[Monitor], None]
) -> None:
    model = Model(use_reentrant)
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    x = inputs()
    loss = model(x).sum()
    detach(monitor)
    loss.backward()
    assert x.grad is not None and monitor.batch_number == 1


@reentrant
def test_attaching_between_forward_and_backward_is_safe(recorder_name: RecorderName, use_reentrant: bool) -> None:
    model = Model(use_reentrant)
    loss = model(inputs()).sum()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    loss.backward()
    assert monitor.batch_number == 0 and all(frame.is_recompute for frame in monitor.frames)
    model(inputs()).sum().backward()
    assert monitor.batch_number == 1


@reentrant
def test_gradient_accumulation_counts_each_forward_once(recorder_name: RecorderName, use_reentrant: bool) -> None:
    model = Model(use_reentrant)
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    losses = [model(inputs()).sum() for _ in range(3)]
    for loss in losses:
        loss.backward()
    assert monitor.batch_number == 3


def test_a_backward_inside_the_forward_is_no_batch(recorder_name: RecorderName) -> None:
    """As where a penalty on gradients is computed."""

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(use_reentrant=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            z: Tensor = y + gradient
            return z

    sink = Keeps()
    model = Penalised()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    model(inputs())
    assert monitor.batch_number == 1
    assert {frame.batch_number for frame in sink.frames} == {0}
    assert sink.frames[-1].module == "" and not sink.frames[-1].is_recompute
    assert any(frame.is_recompute for frame in sink.frames)


def deep_copy(model: nn.Module) -> Any:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [deep_copy, pickled])
def test_a_copy_of_a_watched_model_is_not_watched_and_works(
    recorder_name: RecorderName, copied: Callable[[nn.Module], Any]
) -> None:
    model = Model(use_reentrant=False).eval()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    model(inputs())
    before = monitor.counters()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = copied(model)
        out = other(inputs())
        out.sum().backward()
    assert monitor.counters() == before
    assert torch.equal(out, model(inputs()))
    assert monitor.batch_number == 2
    another = Monitor(other, recorder=recorder_name, sinks=[])
    other(inputs())
    assert another.batch_number == 1

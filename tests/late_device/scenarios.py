"""The default monitor, with the log of calls in C++, on a device that is late.

Run by tests/test_late_device.py, with an extension whose recorder is tests/late_device/recorder.cpp: every tensor in
host memory is on that device.
"""

from __future__ import annotations

import ctypes
import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError, TensorStats, native
from overflowstat.monitor import CheckName
from overflowstat.recorder import NativeRecorder

ASSERT = "cudaErrorAssert (device-side assert triggered)"


class LateDevice:
    def __init__(self) -> None:
        extension = native.load()
        assert extension is not None and extension.__file__ is not None
        self.library = ctypes.CDLL(extension.__file__)
        self.library.late_pending.restype = ctypes.c_int64
        self.library.late_finish.argtypes = [ctypes.c_int64]
        self.library.late_replay.argtypes = [ctypes.c_uint64, ctypes.c_int64]
        self.library.late_capture.argtypes = self.library.late_drop.argtypes = [ctypes.c_uint64]

    def finish(self, launches: int = -1) -> None:
        self.library.late_finish(launches)

    @property
    def pending(self) -> int:
        return int(self.library.late_pending())

    def fail(self, reason: str) -> None:
        self.library.late_fail(reason.encode())

    @contextmanager
    def capturing(self, graph: int) -> Iterator[None]:
        self.library.late_capture(graph)
        yield
        self.library.late_capture(0)

    def replay(self, graph: int, launches: int = -1) -> None:
        self.library.late_replay(graph, launches)

    def drop(self, graph: int) -> None:
        self.library.late_drop(graph)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    device = LateDevice()
    device.library.late_reset()
    # Which does not ask where torch has no CUDA.
    monkeypatch.setattr(NativeRecorder, "capture", lambda self: self.extension.current_capture() or None)
    yield device
    device.library.late_reset()


class Times(nn.Module):
    """Writes what it makes to the same memory each time, as a captured module does."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([factor]), requires_grad=False)
        self.made = torch.zeros(50)
        self.ran = 0

    def forward(self, x: Tensor) -> Tensor:
        self.ran += 1
        return torch.mul(x, self.factor, out=self.made)


def chain(*factors: float) -> nn.Sequential:
    model = nn.Sequential(*map(Times, factors))
    # A model that is in host memory alone is in no CUDA graph.
    model.register_parameter("elsewhere", nn.Parameter(torch.empty(1, device="meta"), requires_grad=False))
    return model


X = torch.full((50,), 2.0)


def largest(monitor: Monitor) -> list[float | int]:
    contents = [frame.lines[-1].content for frame in monitor.frames]
    return [content.abs_max for content in contents if isinstance(content, TensorStats)]


@pytest.mark.parametrize(("check", "waits"), [("module", 4), ("batch", 1), ("step", 0)])
def test_launches_and_waits_of_a_batch(device: LateDevice, check: CheckName, waits: int) -> None:
    """One launch for all weights, one a module for what is new there, none for the root; waits as `check` has it."""
    model = chain(2.0, 3.0, 4.0, 5.0)
    monitor = Monitor(model, check=check, sinks=[])
    device.finish()
    for _ in range(3):
        before = monitor.counters()
        model(X)
        after = monitor.counters()
        assert after.launches - before.launches == 1 + 4
        assert after.syncs - before.syncs == waits
        assert after.tensors - before.tensors == 4 + 1 + 4  # weights, the input, and what each module makes
        assert device.pending == (5 if check == "step" else 0)
        device.finish()
    monitor.check()
    assert monitor.counters() == after and largest(monitor) == [4, 12, 48, 240, 240] * 3


@pytest.mark.parametrize("check", ["module", "batch", "step"])
def test_an_overflow_is_found_however_late_its_number_is(device: LateDevice, check: CheckName) -> None:
    model = chain(2.0, 3e38, 4.0)
    monitor = Monitor(model, check=check, sinks=[], drill=False)  # which would run it again

    def run() -> None:
        model(X)
        monitor.check()

    with pytest.raises(NonFiniteError) as raised:
        run()
    assert [frame.module for frame in raised.value.frames] == ["0", "1"]
    ran = [module.ran for module in model if isinstance(module, Times)]
    assert ran == ([1, 1, 0] if check == "module" else [1, 1, 1])


@pytest.mark.parametrize(("check", "again"), [("module", [0, 1, 0]), ("batch", [1, 1, 0])])
def test_a_verdict_runs_again_what_is_in_progress(device: LateDevice, check: CheckName, again: list[int]) -> None:
    """The module alone in its own hook, the model as far as there in the root's."""
    model = chain(2.0, 3e38, 4.0)
    Monitor(model, check=check, sinks=[])
    with pytest.raises(NonFiniteError) as raised:
        model(X)
    verdict = raised.value.verdict
    assert verdict is not None and (verdict.module, verdict.label, verdict.produced) == ("1", "output", True)
    assert (verdict.operation, verdict.kind) == ("aten.mul", "arithmetic-overflow")
    once = [1, 1, 0] if check == "module" else [1, 1, 1]
    assert [m.ran for m in model if isinstance(m, Times)] == [a + b for a, b in zip(once, again, strict=True)]


def test_what_has_come_is_judged_by_the_next_hook_without_a_wait(device: LateDevice) -> None:
    model = chain(3e38, 1.0, 1.0)
    monitor = Monitor(model, sinks=[], drill=False)  # which would read more
    model[2].register_forward_pre_hook(lambda *_: device.finish(3))  # the weights, and two modules
    with pytest.raises(NonFiniteError) as raised:
        model(X)
    assert [frame.module for frame in raised.value.frames] == ["0"]
    assert monitor.counters().syncs == 0 and device.pending == 1


def test_numbers_are_those_of_the_launch_whatever_comes_after_it(device: LateDevice) -> None:
    model = chain(2.0, 3.0)
    monitor = Monitor(model, check="step", sinks=[])
    x = X.clone()
    model(x)
    x.fill_(float("nan"))
    for module in model:
        assert isinstance(module, Times)
        module.made.fill_(float("inf"))
    monitor.check()
    assert largest(monitor) == [4, 12, 12]


def test_nothing_keeps_an_activation_alive_while_its_numbers_are_late(device: LateDevice) -> None:
    made: list[weakref.ref[Tensor]] = []

    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            made.append(weakref.ref(y))
            return y

    model = nn.Sequential(Makes(), nn.Flatten(0))
    monitor = Monitor(model, check="step", sinks=[])
    with torch.no_grad():
        model(X.view(5, 10))
    gc.collect()
    assert made[0]() is None and device.pending > 0 and monitor._log.pending == 3


def test_what_was_read_before_a_device_side_assert_is_judged(device: LateDevice) -> None:
    model = chain(2.0, 3e38, 4.0, 5.0)
    monitor = Monitor(model, check="step", sinks=[])
    device.finish()
    model(X)
    device.finish(3)  # the weights, and two modules
    device.fail(ASSERT)
    with pytest.raises(NonFiniteError) as raised:
        monitor.check()
    assert [frame.module for frame in raised.value.frames] == ["0", "1"]


def test_frames_after_a_device_side_assert_say_why_they_have_no_numbers(device: LateDevice) -> None:
    model = chain(2.0, 3.0, 4.0)
    monitor = Monitor(model, check="step", sinks=[])
    device.finish()
    model(X)
    device.finish(2)
    device.fail(ASSERT)
    with pytest.warns(UserWarning, match="device-side assert triggered"):
        monitor.check()
    outputs = [frame.lines[-1].content for frame in monitor.frames]
    assert isinstance(outputs[0], TensorStats) and outputs[0].abs_max == 4
    assert outputs[1:] == [f"not read: {ASSERT}"] * 3


def test_a_traced_batch_is_waited_for_and_told_in_order(device: LateDevice) -> None:
    sink = Keeps()
    model = chain(2.0, 3.0)
    Monitor(model, check="step", trace_batch_nums=[1], sinks=[sink])
    for _ in range(3):
        model(X)
    assert {frame.batch_number for frame in sink.frames} == {0, 1} and device.pending > 0


def test_the_last_replay_of_a_graph_is_judged_and_all_are_counted(device: LateDevice) -> None:
    model, static = chain(2.0, 3.0), X.clone()
    monitor = Monitor(model, sinks=[])
    model(static)
    with device.capturing(7):
        model(static)
    monitor.check()
    assert monitor.batch_number == 1
    for value, batches in ((5.0, 3), (7.0, 5)):
        for _ in range(2):
            rerun(model, static, value)
            device.replay(7)
        monitor.check()
        assert monitor.batch_number == batches
        assert largest(monitor)[-3:] == [2 * value, 6 * value, 6 * value]
    rerun(model, static, float("nan"))
    device.replay(7)
    with pytest.raises(NonFiniteError, match=r"nan in batch 5, first in 0 \(Times\), input\[0\]: 50 of 50 are nan"):
        monitor.check()


def rerun(model: nn.Sequential, static: Tensor, value: float) -> None:
    """What a replay computes, without hooks."""
    x = static.fill_(value)
    for module in model:
        assert isinstance(module, Times)
        x = torch.mul(x, module.factor, out=module.made)


def test_a_replay_that_breaks_off_is_judged_as_far_as_it_came(device: LateDevice) -> None:
    sink = Keeps()
    model = chain(2.0, 3.0)
    monitor = Monitor(model, sinks=[sink])
    with device.capturing(1):
        model(X)
    device.replay(1, launches=2)  # the weights, and the first module
    device.fail(ASSERT)
    with pytest.warns(UserWarning, match="did not come to its end.*device-side assert"):
        monitor.check()
    assert sink.modules() == ["0"]


def test_calls_of_a_graph_that_is_gone_are_dropped(device: LateDevice) -> None:
    model = chain(2.0)
    monitor = Monitor(model, sinks=[])
    for graph in (1, 2):
        with device.capturing(graph):
            model(X)
        device.replay(graph)
        device.drop(graph)
    monitor.check()
    assert monitor.batch_number == 2 and monitor._captured == []


def test_many_calls_are_not_one_ring_too_many(device: LateDevice) -> None:
    """When it is full the oldest are waited for, and keep what they got."""
    model = chain(2.0, 3.0)
    monitor = Monitor(model, check="step", max_frames_to_save=None, sinks=[])
    for number in range(2000):
        x = torch.full((50,), float(number % 10))
        model(x)
        if number % 500 == 499:
            monitor.check()
    assert largest(monitor) == [k for n in range(2000) for k in (2 * (n % 10), 6 * (n % 10), 6 * (n % 10))]


def details(monitor: Monitor) -> list[tuple[int | None, int | None, float | int | None]]:
    """Of the last line of each frame."""
    contents = [frame.lines[-1].content for frame in monitor.frames]
    return [
        (content.zero_count, content.subnormal_count, content.abs_min_nonzero)
        for content in contents
        if isinstance(content, TensorStats)
    ]


def test_detail_comes_as_late_and_what_is_subnormal_is_told_of_then(device: LateDevice) -> None:
    model = chain(2.0**-130)
    x = X.clone()
    x[:20] = 0.0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        monitor = Monitor(model, detail=True, check="step", sinks=[])
        before = monitor.counters().launches
        model(x)
        assert device.pending == monitor.counters().launches - before > 0 and told == []
        monitor.check()
        monitor.check()
    assert [str(warning.message).split(",")[1] for warning in told] == [
        " output: 100 % of what is not zero is subnormal in float32"
    ] * 2
    assert details(monitor) == [(20, 30, 2.0**-129)] * 2


def test_detail_of_a_replay(device: LateDevice) -> None:
    model = chain(1.0)
    monitor = Monitor(model, detail=True, sinks=[])
    device.finish()
    with device.capturing(1):
        model(X)
    for zeros in (7, 50, 0):
        made = model[0].made
        assert isinstance(made, Tensor)
        made.copy_(X)[:zeros] = 0.0
        device.replay(1)
        monitor.check()
        assert details(monitor)[-1] == (zeros, 0, 2.0) if zeros < 50 else details(monitor)[-1][:2] == (50, 0)

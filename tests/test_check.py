"""When numbers are judged that are late, as those of a GPU are: `check="module"`, "batch" and "step"."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overflowstat import BatchLimitReached, Monitor, NonFiniteError, torch_recorder
from overflowstat.monitor import CHECKS, CheckName
from overflowstat.recorder import NativeRecorder, Reading, make_recorder
from overflowstat.row import Row


class LateReading:
    def __init__(self, recorder: "LateRecorder", reading: Reading) -> None:
        self.recorder = recorder
        self.reading = reading
        self.failure: str | None = None
        self.arrived = False

    def ready(self) -> bool:
        return self.arrived

    def rows(self) -> Sequence[Row | str]:
        if not self.arrived:
            self.recorder.waited_for.append(self)
            self.recorder.arrive()  # whoever waits for one waits for all that was launched before, and takes no longer
        rows = self.reading.rows()
        return rows if self.failure is None else [self.failure] * len(rows)

    def replays(self) -> None:
        return None


class LateRecorder:
    """Reads at once, as a stream does in its order, and tells only when it is told to, or waited for."""

    name = "late"

    def __init__(self) -> None:
        self.recorder = make_recorder("torch")
        self.readings: list[LateReading] = []
        self.waited_for: list[LateReading] = []

    def record(self, tensors: Sequence[Tensor]) -> LateReading:
        self.readings.append(LateReading(self, self.recorder.record(tensors)))
        return self.readings[-1]

    def capture(self) -> None:
        return None

    def arrive(self) -> None:
        for reading in self.readings:
            reading.arrived = True

    @property
    def of_calls(self) -> list[LateReading]:
        """The readings but that of the weights."""
        return self.readings[1:]


class LateNativeRecorder(LateRecorder, NativeRecorder):
    """With the log of calls that is written in C++.

    That reads CPU tensors itself, the weights too, and leaves those of a class of their own to its recorder.
    """

    def __init__(self) -> None:
        recorder = make_recorder("native")
        assert isinstance(recorder, NativeRecorder)
        NativeRecorder.__init__(self, recorder.extension)
        LateRecorder.__init__(self)

    @property
    def of_calls(self) -> list[LateReading]:
        return self.readings


@pytest.fixture(params=[LateRecorder, LateNativeRecorder], ids=["log in Python", "log in C++"])
def late(request: pytest.FixtureRequest) -> type[LateRecorder]:
    recorder: type[LateRecorder] = request.param
    return recorder


class Foreign(Tensor):
    """And what is made of one."""


class Step(nn.Module):
    """Does something to its input, and tells that it ran."""

    def __init__(self, ran: list[str], name: str, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.ran, self.name, self.does = ran, name, does

    def forward(self, x: Tensor) -> Tensor:
        self.ran.append(self.name)
        return self.does(x * self.weight)


def chain(ran: list[str], **steps: Callable[[Tensor], Tensor]) -> nn.Sequential:
    return nn.Sequential(*[Step(ran, name, does) for name, does in steps.items()])


def same(x: Tensor) -> Tensor:
    return x


def overflow(x: Tensor) -> Tensor:
    return x * 1e39


X = torch.ones(2).as_subclass(Foreign)


def detect(
    late: type[LateRecorder], check: CheckName, call: Callable[[nn.Sequential, Monitor], Any]
) -> tuple[NonFiniteError, list[str]]:
    """The error that `call` raises on a model that overflows in the second of four modules, and which of them ran."""
    ran: list[str] = []
    model = chain(ran, a=same, b=overflow, c=same, d=same)
    monitor = Monitor(model, recorder=late(), check=check, verdict=False)
    with pytest.raises(NonFiniteError) as raised:
        call(model, monitor)
    return raised.value, ran


def forward(model: nn.Sequential, monitor: Monitor) -> None:
    model(X)


def test_module_raises_in_the_very_hook(late: type[LateRecorder]) -> None:
    _, ran = detect(late, "module", forward)
    assert ran == ["a", "b"]


def test_batch_raises_out_of_the_call_of_the_model(late: type[LateRecorder]) -> None:
    _, ran = detect(late, "batch", forward)
    assert ran == ["a", "b", "c", "d"]


def forward_then_forward(model: nn.Sequential, monitor: Monitor) -> None:
    model(X)
    assert monitor.batch_number == 1
    model(X)


def forward_then_optimizer(model: nn.Sequential, monitor: Monitor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(X).sum().backward()
    before = [p.clone() for p in model.parameters()]
    try:
        optimizer.step()
    finally:
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def forward_then_check(model: nn.Sequential, monitor: Monitor) -> None:
    model(X)
    monitor.check()


def forward_then_remove(model: nn.Sequential, monitor: Monitor) -> None:
    model(X)
    monitor.remove()


def forward_in_a_block(model: nn.Sequential, monitor: Monitor) -> None:
    with monitor:
        model(X)


@pytest.mark.parametrize(
    "call", [forward_then_forward, forward_then_optimizer, forward_then_check, forward_then_remove, forward_in_a_block]
)
def test_step_raises_before_the_numbers_are_used(
    late: type[LateRecorder], call: Callable[[nn.Sequential, Monitor], None]
) -> None:
    error, ran = detect(late, "step", call)
    assert ran == ["a", "b", "c", "d"] and error.batch_number == 0


def test_the_report_is_the_same_whenever_it_is_made(
    late: type[LateRecorder], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = {"module": forward, "batch": forward, "step": forward_then_check}
    reports = []
    for check in CHECKS:
        error, _ = detect(late, check, calls[check])
        assert [frame.module for frame in error.frames] == ["0", "1"]
        reports.append((capsys.readouterr().out, str(error), error.frames))
    assert reports[0] == reports[1] == reports[2]


@pytest.mark.parametrize(("check", "ran"), [("module", "ab b"), ("batch", "abcd ab")])
def test_a_verdict_runs_again_what_is_still_in_progress(late: type[LateRecorder], check: CheckName, ran: str) -> None:
    names: list[str] = []
    model = chain(names, a=same, b=overflow, c=same, d=same)
    Monitor(model, recorder=late(), check=check, sinks=[])
    with pytest.raises(NonFiniteError) as raised:
        model(X)
    verdict = raised.value.verdict
    assert verdict is not None and names == list(ran.replace(" ", ""))
    assert (verdict.module, verdict.label, verdict.operation) == ("1", "output", "aten.mul")
    assert verdict.source == f"test_check.py:{overflow.__code__.co_firstlineno + 1}"


def test_a_verdict_on_a_forward_that_is_over_says_how_to_get_the_operation(late: type[LateRecorder]) -> None:
    names: list[str] = []
    model = chain(names, a=same, b=lambda x: x * 2e38)
    monitor = Monitor(model, recorder=late(), check="step", sinks=[])
    model(2 * X)
    with pytest.raises(NonFiniteError) as raised:
        model(X)
    verdict = raised.value.verdict
    assert verdict is not None and names == ["a", "b"]
    assert (verdict.module, verdict.produced, verdict.operation) == ("1", True, None)
    assert "monitor.drill(batch)" in verdict.text
    again = monitor.drill(2 * X)
    assert again is not None and again.operation == "aten.mul" and monitor.batch_number == 1
    assert monitor.drill(X) is None


def test_what_has_arrived_is_judged_by_the_next_hook_without_a_wait(late: type[LateRecorder]) -> None:
    ran: list[str] = []
    recorder = late()

    def arrive(x: Tensor) -> Tensor:
        recorder.arrive()
        return x

    model = chain(ran, a=overflow, b=same, c=arrive, d=same)
    Monitor(model, recorder=recorder, sinks=[], verdict=False)
    with pytest.raises(NonFiniteError) as raised:
        model(X)
    assert ran == ["a", "b", "c"] and [f.module for f in raised.value.frames] == ["0"]
    assert recorder.waited_for == []


@pytest.mark.parametrize(("check", "waits"), [("module", 4), ("batch", 1), ("step", 0)])
def test_waits_of_a_batch(late: type[LateRecorder], check: CheckName, waits: int) -> None:
    recorder = late()
    model = chain([], a=same, b=same, c=same, d=same)
    monitor = Monitor(model, recorder=recorder, check=check, sinks=[])
    model(X)
    # One for each module; the log in C++ has what Python reads read again for the root.
    root = check == "module" and late is LateNativeRecorder
    assert len(recorder.waited_for) == waits + root
    recorder.arrive()
    recorder.waited_for.clear()
    monitor.check()
    assert recorder.waited_for == []


def test_traced_batches_are_printed_as_they_run(late: type[LateRecorder], capsys: pytest.CaptureFixture[str]) -> None:
    def tell(x: Tensor) -> Tensor:
        print("the model's own line")
        return x

    model = chain([], a=same, b=tell, c=same)
    Monitor(model, recorder=late(), check="step", trace_batch_nums=[0])
    model(X)
    out = capsys.readouterr().out
    assert out.index(" 0 Step") < out.index("the model's own line") < out.index(" 1 Step")
    assert out.rstrip().endswith("output") and out.count(" Sequential\n") == 1


def test_a_bad_value_in_host_memory_raises_in_its_module_after_what_ran_before_it(
    late: type[LateRecorder],
) -> None:
    class LateAtFirst(late):  # type: ignore[valid-type,misc]
        def record(self, tensors: Sequence[Tensor]) -> LateReading:
            reading: LateReading = super().record(tensors)
            reading.arrived = len(self.of_calls) != 1  # only the first call's numbers are on a device
            return reading

    for first, bad in ((same, "1"), (overflow, "0")):
        ran: list[str] = []
        recorder = LateAtFirst()
        model = chain(ran, a=first, b=overflow, c=same)
        Monitor(model, recorder=recorder, sinks=[], verdict=False)
        with pytest.raises(NonFiniteError) as raised:
            model(X)
        assert ran == ["a", "b"] and raised.value.frames[-1].module == bad


def test_an_exception_of_the_forward_tells_that_the_numbers_had_gone_bad_before(late: type[LateRecorder]) -> None:
    """As a device-side assert or an index error after an overflow does."""

    def fail(x: Tensor) -> Tensor:
        raise IndexError("index out of range")

    model = chain([], a=same, b=overflow, c=fail)
    recorder = late()
    monitor = Monitor(model, recorder=recorder, sinks=[])
    with pytest.raises(IndexError) as raised:
        model(X)
    found = raised.value.non_finite  # type: ignore[attr-defined]
    assert isinstance(found, NonFiniteError) and [frame.module for frame in found.frames] == ["0", "1"]
    if hasattr(raised.value, "__notes__"):
        assert raised.value.__notes__ == [str(found)]
    assert monitor.batch_number == 1


def test_an_exception_of_a_clean_forward_is_left_as_it_is(late: type[LateRecorder]) -> None:
    def fail(x: Tensor) -> Tensor:
        raise IndexError("index out of range")

    model = chain([], a=same, b=fail)
    monitor = Monitor(model, recorder=late(), sinks=[])
    with pytest.raises(IndexError) as raised:
        model(X)
    assert not hasattr(raised.value, "non_finite") and not hasattr(raised.value, "__notes__")
    assert monitor.batch_number == 1


def test_a_device_that_fails_leaves_lines_that_say_so(late: type[LateRecorder]) -> None:
    recorder = late()
    model = chain([], a=same, b=same)
    monitor = Monitor(model, recorder=recorder, check="step", sinks=[])
    model(X)
    for reading in recorder.of_calls[1:]:
        reading.failure = "cudaErrorAssert (device-side assert triggered)"
    monitor.check()
    first, second, _ = monitor.frames
    assert not isinstance(first.lines[-1].content, str)
    assert second.lines[-1].content == "not read: cudaErrorAssert (device-side assert triggered)"


def test_the_batches_after_a_detection_are_judged_on_their_own(late: type[LateRecorder]) -> None:
    model = chain([], a=overflow, b=same)
    monitor = Monitor(model, recorder=late(), check="step", sinks=[])
    for number in range(3):
        model(X)
        with pytest.raises(NonFiniteError) as raised:
            monitor.check()
        assert raised.value.batch_number == number
        monitor.check()


def test_abort_comes_after_the_numbers_of_its_batch_are_judged(late: type[LateRecorder]) -> None:
    for does, error in ((overflow, NonFiniteError), (same, BatchLimitReached)):
        model = chain([], a=does)
        Monitor(model, recorder=late(), abort_after_batch_num=0, sinks=[])
        with pytest.raises(error):
            model(X)


def test_nothing_keeps_activations_alive_while_their_numbers_are_late(late: type[LateRecorder]) -> None:
    import gc
    import weakref

    made: list[weakref.ref[Tensor]] = []

    def make(x: Tensor) -> Tensor:
        y = x + 1
        made.append(weakref.ref(y))
        return y

    model = chain([], a=make, b=lambda x: x * 2)
    with torch.no_grad():
        monitor = Monitor(model, recorder=late(), check="step", sinks=[])
        model(X)
    gc.collect()
    assert made[0]() is None and monitor._log.pending == 3


def test_plain_torch_fetches_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_recorder, "_results_are_at_hand", lambda device: False)
    fetches: list[torch_recorder.TorchRecorder] = []
    fetch = torch_recorder.TorchRecorder.fetch

    def counted(self: torch_recorder.TorchRecorder) -> None:
        fetches.append(self)
        fetch(self)

    monkeypatch.setattr(torch_recorder.TorchRecorder, "fetch", counted)
    model = chain([], a=same, b=same, c=same)
    expected_fetches: dict[CheckName, int] = {"module": 3, "batch": 1, "step": 0}  # the root shows what was read before
    for check, expected in expected_fetches.items():
        fetches.clear()
        monitor = Monitor(model, recorder="torch", check=check, sinks=[])
        model(X)
        assert len(fetches) == expected
        monitor.remove()


def test_a_fetch_of_plain_torch_that_fails_is_the_reason_for_what_is_missing_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_recorder, "_results_are_at_hand", lambda device: False)
    model = chain([], a=same, b=same)
    monitor = Monitor(model, recorder="torch", sinks=[])

    def fail(tensors: Sequence[Tensor]) -> Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered\nand much advice")

    stack = torch.stack
    model(X)
    before = monitor.counters()
    monkeypatch.setattr(torch_recorder.torch, "stack", lambda x: fail(x) if len(x) > 4 else stack(x))  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="could not be read, and are not judged: RuntimeError: CUDA error"):
        model(X)
    monkeypatch.setattr(torch_recorder.torch, "stack", stack)  # type: ignore[attr-defined]
    first = monitor.frames[-3].lines[0].content
    assert first == "not read: RuntimeError: CUDA error: device-side assert triggered"
    model(X)
    assert monitor.counters().frames == before.frames + 6 and monitor.batch_number == 3
    assert not isinstance(monitor.frames[-1].lines[0].content, str)


def test_threads_may_ask_plain_torch_for_their_numbers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_recorder, "_results_are_at_hand", lambda device: False)
    recorder = make_recorder("torch")
    readings = [recorder.record([torch.full((2,), float(i))]) for i in range(200)]
    found: list[list[float | int]] = []

    def ask() -> None:
        rows = [reading.rows()[0] for reading in readings]
        found.append([row.abs_max for row in rows if isinstance(row, Row)])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[float(i) for i in range(200)]] * 4


@pytest.mark.parametrize("check", ["", "Module", None, True])
def test_another_word_for_check_is_refused(check: Any) -> None:
    model = nn.Sequential(nn.Identity())
    with pytest.raises(ValueError, match="check="):
        Monitor(model, check=check)
    assert not model._forward_hooks

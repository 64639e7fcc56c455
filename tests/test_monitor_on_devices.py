"""A monitor over the host side of csrc/cuda on fake devices (fake_cuda.py): what it asks of them, and what it makes of
numbers that are late or never come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from device_on_cpu import compiler
from fake_cuda import Build, FakeCuda, FakeReading, FakeRecorder
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError
from overflowstat.monitor import CheckName
from overflowstat.recorder import Recorder, Replays
from overflowstat.row import Row

pytestmark = pytest.mark.skipif(compiler() is None, reason="compiling the host side needs a C++ compiler")


class DeviceReading:
    def __init__(self, recorder: DeviceRecorder, reading: FakeReading) -> None:
        self.recorder = recorder
        self.reading = reading

    def ready(self) -> bool:
        return self.reading.ready()

    def rows(self) -> Sequence[Row | str]:
        raw, _ = self.reading.raw_rows()
        self.recorder.waits += self.recorder.cuda.counts()["cudaStreamQuery"] > 0
        return [
            values
            if isinstance(values, str)
            else Row(
                values["abs_min"],
                values["abs_max"],
                values["finite_abs_max"],
                values["nan_count"],
                values["posinf_count"],
                values["neginf_count"],
                None if values["first_bad"] is None else row.first_bad,
            )
            for values, row in zip(self.reading.rows(), raw, strict=True)
        ]

    def replays(self) -> Replays | None:
        found = self.reading.replays()
        return None if found is None else Replays(*found)


class DeviceRecorder(Recorder):
    """Reads tensors in host memory as if they were in that of device 0, which gets to it when it gets to it."""

    name = "device"

    def __init__(self, cuda: FakeCuda, recorder: FakeRecorder) -> None:
        self.cuda = cuda
        self.recorder = recorder
        self.launches = self.waits = 0

    def record(self, tensors: Sequence[Tensor]) -> DeviceReading:
        reading = self.recorder.launch(tensors)
        self.launches += self.cuda.counts()["cudaLaunchKernelExC"]
        return DeviceReading(self, reading)

    def capture(self) -> int | None:
        return self.cuda.current_capture() or None


@pytest.fixture(scope="session")
def machine() -> FakeCuda:
    return FakeCuda(Build().compile())


@pytest.fixture
def cuda(machine: FakeCuda) -> Iterator[FakeCuda]:
    machine.reset()
    machine.faults()
    machine.counts()
    yield machine
    assert machine.faults() == []


@pytest.fixture
def recorder(cuda: FakeCuda) -> DeviceRecorder:
    return DeviceRecorder(cuda, cuda.recorder())


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([factor]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def chain(*factors: float) -> nn.Sequential:
    return nn.Sequential(*map(Times, factors))


X = torch.full((50,), 2.0)


@pytest.mark.parametrize(("check", "waits"), [("module", 4), ("batch", 1), ("step", 0)])
def test_waits_of_a_batch_whose_numbers_are_late(recorder: DeviceRecorder, check: CheckName, waits: int) -> None:
    """When the last one is there all are."""
    model = chain(2.0, 3.0, 4.0, 5.0)
    monitor = Monitor(model, recorder=recorder, check=check, sinks=[])
    for _ in range(3):
        recorder.waits = recorder.launches = 0
        before = monitor.counters().syncs
        model(X)
        assert recorder.waits == monitor.counters().syncs - before == waits
        # All weights, the input and what each module made of it; the root shows nothing that is new.
        assert recorder.launches == 1 + 4
        recorder.cuda.run()
    monitor.check()
    assert recorder.waits == waits
    outputs = [frame.lines[-1].content for frame in monitor.frames]
    largest = [content.abs_max for content in outputs if not isinstance(content, str)]
    assert largest == 3 * [4, 12, 48, 240, 240]


@pytest.mark.parametrize("check", ["module", "batch", "step"])
def test_an_overflow_is_found_however_late_its_number_is(recorder: DeviceRecorder, check: CheckName) -> None:
    model = chain(2.0, 3e38, 4.0)
    monitor = Monitor(model, recorder=recorder, check=check, sinks=[])

    def forward_and_check() -> None:
        model(X)
        monitor.check()

    with pytest.raises(NonFiniteError) as raised:
        forward_and_check()
    assert [frame.module for frame in raised.value.frames] == ["0", "1"]


def test_what_was_read_before_a_device_side_assert_is_judged(cuda: FakeCuda, recorder: DeviceRecorder) -> None:
    """And what comes after it says why it was not read."""
    model = chain(2.0, 3e38, 4.0, 5.0)
    monitor = Monitor(model, recorder=recorder, check="step", sinks=[])
    cuda.assert_after(kernels=3)  # the weights, and two modules
    model(X)
    cuda.run()
    with pytest.raises(NonFiniteError) as raised:
        monitor.check()
    assert [frame.module for frame in raised.value.frames] == ["0", "1"]


def test_frames_after_a_device_side_assert_say_why_they_have_no_numbers(
    cuda: FakeCuda, recorder: DeviceRecorder
) -> None:
    model = chain(2.0, 3.0, 4.0)
    monitor = Monitor(model, recorder=recorder, check="step", sinks=[])
    cuda.assert_after(kernels=2)
    model(X)
    with pytest.warns(UserWarning, match="device-side assert triggered"):
        monitor.check()
    outputs = [frame.lines[-1].content for frame in monitor.frames]
    assert not isinstance(outputs[0], str) and outputs[0].abs_max == 4.0
    assert outputs[1:] == ["not read: cudaErrorAssert (device-side assert triggered)"] * 3


def test_a_forward_in_a_graph_is_judged_after_its_replays(cuda: FakeCuda, recorder: DeviceRecorder) -> None:
    model, static = chain(2.0, 3.0), X.clone()
    monitor = Monitor(model, recorder=recorder, sinks=[])
    stream = cuda.new_stream()
    with cuda.capturing(stream) as graph:
        model(static)
    assert graph.error == 0 and monitor.batch_number == 0
    with cuda.on(stream):
        for number in (1, 2):
            graph.replay(stream)
            monitor.check()
            assert monitor.batch_number == number
        static[7] = float("nan")
        graph.replay(stream)
        with pytest.raises(NonFiniteError, match=r"nan in batch 2, first in 0 \(Times\), input\[0\]: 1 of 50 is nan"):
            monitor.check()

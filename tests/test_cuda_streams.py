"""Streams of a CUDA device. Run by `pytest -m cuda` where there is one; skipped elsewhere."""

from __future__ import annotations

import threading

import pytest
import torch
from on_cuda import chain, is_busy, keep_busy, late, overflow, requires_cuda, same
from torch import Tensor

from overflowstat import Monitor, NonFiniteError
from overflowstat.recorder import Reading, Recorder, RecorderName, make_recorder
from overflowstat.row import Row

pytestmark = [pytest.mark.cuda, requires_cuda]


def largest(reading: Reading) -> list[float | str]:
    return [row.abs_max if isinstance(row, Row) else row for row in reading.rows()]


def streams(count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream() for _ in range(count)]  # type: ignore[no-untyped-call]


def test_streams_that_are_late_are_read_each_in_its_own_order(recorder: Recorder) -> None:
    readings, kept = [], []
    for number, stream in enumerate(streams(4)):
        with torch.cuda.stream(stream):
            keep_busy(0.02 * (4 - number))
            x = torch.full((1 << 18,), float(number), device="cuda")
            readings.append(recorder.record([x, x[::3]]))
            kept.append(x)  # its memory belongs to its stream
    assert [largest(reading) for reading in readings] == [[n, n] for n in range(4)]


def test_a_reading_is_ready_when_its_own_stream_is_done() -> None:
    recorder = make_recorder("native")
    slow, fast = streams(2)
    x = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        keep_busy(0.3)
        of_slow = recorder.record([x])
    with torch.cuda.stream(fast):
        of_fast = recorder.record([x])
    fast.synchronize()
    assert of_fast.ready() and not of_slow.ready()
    assert largest(of_fast) == [1] and not of_slow.ready()
    assert largest(of_slow) == [1]


def test_work_of_one_stream_that_another_waits_for(recorder: Recorder) -> None:
    first, second = streams(2)
    with torch.cuda.stream(first):
        keep_busy()
        x = torch.full((1 << 18,), 3.0, device="cuda")
    second.wait_stream(first)
    with torch.cuda.stream(second):
        y = x * 2
        reading = recorder.record([x, y])
    assert largest(reading) == [3, 6]


def test_memory_that_is_used_again_was_read_before(recorder: Recorder) -> None:
    """Tensors die as soon as their reading is launched; the allocator gives their memory to the next."""
    (stream,) = streams(1)
    with torch.cuda.stream(stream):
        recorder.record([torch.ones(1 << 16, device="cuda")]).rows()  # loads all that is needed
        keep_busy(0.3)
        readings, addresses = [], set()
        for number in range(30):
            x = torch.full((1 << 16,), float(number), device="cuda")
            addresses.add(x.data_ptr())
            readings.append(recorder.record([x]))
            del x
        assert is_busy() and len(addresses) < 30
        assert [largest(reading) for reading in readings] == [[n] for n in range(30)]


def test_the_current_stream_and_device_stay(recorder: Recorder) -> None:
    (stream,) = streams(1)
    with torch.cuda.stream(stream):
        recorder.record([torch.ones(10, device="cuda")]).rows()
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_threads_with_streams_of_their_own() -> None:
    recorder = make_recorder("native")
    errors: list[BaseException] = []

    def work(start: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                for number in range(start, start + 100):
                    tensors = [
                        torch.full((100 + number,), float(number), device="cuda") for _ in range(1 + number % 70)
                    ]
                    assert largest(recorder.record(tensors)) == [number] * len(tensors)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_model_is_watched_on_a_side_stream(recorder_name: RecorderName) -> None:
    model = chain([], a=late, b=same, c=overflow)
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    (stream,) = streams(1)
    x = torch.ones(4, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), pytest.raises(NonFiniteError) as raised:
        model(x)
    assert [frame.module for frame in raised.value.frames] == ["0", "1", "2"]
    assert monitor.batch_number == 1


def test_modules_of_one_forward_on_several_streams(recorder_name: RecorderName) -> None:
    side = streams(2)

    def on(stream: torch.cuda.Stream) -> object:
        def run(x: Tensor) -> Tensor:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                keep_busy(0.02)
                y = x + 1
            torch.cuda.current_stream().wait_stream(stream)
            y.record_stream(torch.cuda.current_stream())
            return y

        return run

    model = chain([], a=on(side[0]), b=on(side[1]), c=same)  # type: ignore[arg-type]
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    model(torch.ones(4, device="cuda"))
    outputs = [frame.lines[-1].content for frame in monitor.frames]
    assert [content.abs_max for content in outputs if not isinstance(content, str)] == [2, 3, 3, 3]

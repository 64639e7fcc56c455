"""The host side of csrc/cuda, behaviour by behaviour, on a machine of fake devices (fake_cuda.py).

Where OVERFLOWSTAT_CUDA_HOST names a library, that one is tested: test_cuda_host_mutants.py runs this file so.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from device_on_cpu import compiler, same
from expected_rows import detailed_row, expected_row
from fake_cuda import (
    GLOBAL,
    INVALIDATED,
    NO_KERNEL_IMAGE,
    OUT_OF_MEMORY,
    THREAD_LOCAL,
    Build,
    FakeCuda,
    FakeReading,
    FakeRecorder,
    Stream,
)
from torch import Tensor

pytestmark = [
    pytest.mark.any_torch,
    pytest.mark.skipif(compiler() is None, reason="compiling the host side needs a C++ compiler"),
]


@pytest.fixture(scope="session")
def machine() -> FakeCuda:
    library = os.environ.get("OVERFLOWSTAT_CUDA_HOST")
    return FakeCuda(Path(library) if library else Build().compile())


@pytest.fixture
def cuda(machine: FakeCuda) -> Iterator[FakeCuda]:
    machine.reset()
    machine.faults()
    machine.counts()
    yield machine
    assert machine.faults() == []


@pytest.fixture
def recorder(cuda: FakeCuda) -> FakeRecorder:
    return cuda.recorder()


def some(count: int, start: int = 0) -> list[Tensor]:
    """Tensors of any dtype and up to a few chunks, every seventh with something in it that is not finite."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.float16]
    tensors = []
    for i in range(start, start + count):
        tensor = torch.arange(1 + 37 * i % 700).add(i).to(dtypes[i % 5])
        if i % 7 == 0 and tensor.is_floating_point():
            tensor[i % len(tensor)] = float("-inf")
        tensors.append(tensor)
    return tensors


STRIDED = torch.arange(60.0).reshape(6, 10)[::2, 1::3]


def check(reading: FakeReading, tensors: Sequence[Tensor]) -> None:
    for row, tensor in zip(reading.rows(), tensors, strict=True):
        assert not isinstance(row, str), row
        assert same(row, expected_row(tensor)), (row, tensor)


# What a launch is made of, all else being in its place: which device, which stream, is that captured; the kernel.
ONE_LAUNCH = Counter({"cudaGetDevice": 3, "cudaStreamGetCaptureInfo": 1, "cudaLaunchKernelExC": 1})


# ---- what a launch costs


@pytest.mark.parametrize("count", [1, 2, 60, 64, 65, 3000])
def test_a_launch_makes_the_same_calls_however_many_tensors_it_reads(
    cuda: FakeCuda, recorder: FakeRecorder, count: int
) -> None:
    tensors = some(count)
    recorder.launch(tensors)
    cuda.run()
    cuda.counts()
    reading = recorder.launch(tensors)
    assert cuda.counts() == ONE_LAUNCH
    cuda.run()
    check(reading, tensors)
    assert cuda.counts() == Counter()


def test_all_dense_tensors_share_a_launch_and_each_strided_one_has_its_own(
    cuda: FakeCuda, recorder: FakeRecorder
) -> None:
    transposed = torch.arange(12.0).reshape(3, 4).t()  # dense in memory
    tensors = [STRIDED, *some(3), STRIDED[1:], transposed, torch.ones(7)[::3]]
    recorder.launch(tensors)
    cuda.counts()
    reading = recorder.launch(tensors)
    assert [launch.tensors for launch in cuda.launches()] == [4, 0, 0, 0]
    assert cuda.counts() == ONE_LAUNCH + Counter({"cudaGetDevice": 3, "cudaLaunchKernelExC": 3})
    cuda.run()
    check(reading, tensors)


def test_each_device_has_a_launch_on_its_current_stream_and_the_callers_device_stays(
    cuda: FakeCuda, recorder: FakeRecorder
) -> None:
    tensors, devices = [*some(6), STRIDED], [2, 0, 1, 0, 2, 2, 1]
    side = cuda.new_stream(2)
    cuda.device = 3
    for _ in range(2):
        with cuda.on(side):
            cuda.counts()
            reading = recorder.launch(tensors, devices)
        launches = [(launch.device, launch.stream, launch.tensors) for launch in cuda.launches()]
        assert launches == [(0, 0, 2), (1, 0, 1), (1, 0, 0), (2, side.id, 3)]
        assert cuda.device == 3
        cuda.run()
        check(reading, tensors)


def test_a_device_is_asked_for_its_size_once_for_each_kernel(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    for device in range(3):
        recorder.launch([torch.ones(3), STRIDED], device)
    cuda.counts()
    for device in range(3):
        recorder.launch([torch.ones(3), STRIDED], device)
    calls = cuda.counts()
    assert calls["cudaDeviceGetAttribute"] == 0 and calls["cudaOccupancyMaxActiveBlocksPerMultiprocessor"] == 0


# ---- batch after batch


def test_a_frame_of_a_steady_batch_is_a_launch_and_nothing_else(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    weights, activations = some(100), [some(n, start=100 * n) for n in (1, 3, 2, 5)]
    for batch in range(4):
        for tensors in (weights, *activations):
            cuda.counts()
            reading = recorder.launch(tensors)
            calls = cuda.counts()
            cuda.run()  # the rows arrive in time
            assert reading.ready()
            check(reading, tensors)
            if batch > 0:
                assert calls == ONE_LAUNCH and cuda.counts() == Counter()


def test_rows_that_are_late_are_waited_for_once_a_batch(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    """Who waits for the last waits for all that were launched before it."""
    for first in (-1, 0):
        frames = [some(3, start=n) for n in range(10)]
        readings = [recorder.launch(tensors) for tensors in frames]
        assert not any(reading.ready() for reading in readings)
        waits = 0
        for i in (*range(first, 10), *range(10 + first)):
            cuda.counts()
            check(readings[i], frames[i])
            waits += cuda.counts()["cudaStreamQuery"] > 0
        assert waits == (1 if first == -1 else 10)


def test_ready_never_asks_a_device(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    reading = recorder.launch([torch.ones(3)])
    cuda.counts()
    assert not reading.ready() and not reading.ready()
    cuda.run()
    assert reading.ready() and cuda.counts() == Counter()


# ---- the table of a long list

UPLOAD = ("torch: pinned memory", "torch: device memory", "cudaMemcpyAsync")


def uploads(cuda: FakeCuda) -> int:
    calls = cuda.counts()
    assert len({calls[name] for name in UPLOAD}) == 1, calls
    return calls["cudaMemcpyAsync"]


def test_a_table_is_sent_once_and_again_only_if_a_pointer_size_or_dtype_changed(
    cuda: FakeCuda, recorder: FakeRecorder
) -> None:
    tensors = some(80)
    recorder.launch(tensors)
    assert cuda.counts()["cudaMemcpyAsync"] == 1

    def sent_again() -> int:
        cuda.run()
        reading = recorder.launch(tensors)
        sent = uploads(cuda)
        cuda.run()
        check(reading, tensors)
        return sent

    assert [sent_again() for _ in range(3)] == [0, 0, 0]
    tensors[79] = tensors[79].clone()
    assert sent_again() == 1
    tensors[40] = tensors[40][:-1]
    assert sent_again() == 1
    tensors[0] = tensors[0].view(torch.int32)
    assert sent_again() == 1
    tensors[0].fill_(-5)  # its numbers are none of the table's
    assert sent_again() == 0


def test_a_short_list_needs_no_table_and_leaves_the_one_that_is_there(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    long, short = some(65), some(64)
    recorder.launch(long)
    cuda.counts()
    recorder.launch(short)
    recorder.launch(long)
    assert uploads(cuda) == 0


def test_a_few_long_lists_may_take_turns_without_being_sent_again(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    """As those of two models on one stream do."""
    lists = [some(65), some(70), some(80)]
    for tensors in lists:
        recorder.launch(tensors)
    assert cuda.counts()["cudaMemcpyAsync"] == 3
    for _ in range(3):
        readings = [recorder.launch(tensors) for tensors in lists]
        assert cuda.counts()["cudaMemcpyAsync"] == 0
        cuda.run()
        for reading, tensors in zip(readings, lists, strict=True):
            check(reading, tensors)
    for size in range(81, 86):  # more of them than are kept
        recorder.launch(some(size))
    cuda.run()
    cuda.counts()
    reading = recorder.launch(lists[0])
    assert cuda.counts()["cudaMemcpyAsync"] == 1
    cuda.run()
    check(reading, lists[0])


def test_each_stream_has_a_table_of_its_own(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    tensors = some(70)
    streams = [Stream(0, 0), cuda.new_stream(), cuda.new_stream(), cuda.new_stream(1)]
    for sent in (1, 0, 0):
        cuda.counts()
        for stream in streams:
            with cuda.on(stream):
                recorder.launch(tensors, stream.device)
        launches = cuda.launches()
        assert cuda.counts()["cudaMemcpyAsync"] == sent * len(streams)
        assert len({launch.table for launch in launches}) == len({launch.workspace for launch in launches}) == 4


def test_a_table_that_is_replaced_is_there_for_launches_that_are_waiting(
    cuda: FakeCuda, recorder: FakeRecorder
) -> None:
    lists = [some(70, start) for start in range(6)]
    readings = [recorder.launch(tensors) for tensors in lists]
    cuda.run()
    for reading, tensors in zip(readings, lists, strict=True):
        check(reading, tensors)


@pytest.mark.parametrize("count", [5, 90])
def test_empty_tensors_have_rows_wherever_they_are(cuda: FakeCuda, recorder: FakeRecorder, count: int) -> None:
    empty = torch.empty(0, dtype=torch.float16)
    for places in ([0], [count - 1], [count // 2], [0, 1, 2, count - 2, count - 1], range(count)):
        tensors = [empty if i in places else tensor for i, tensor in enumerate(some(count))]
        reading = recorder.launch(tensors)
        cuda.run()
        check(reading, tensors)


def test_workspaces_grow_with_the_lists_while_launches_are_waiting(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    lists = [some(count) for count in (1, 3, 50, 2, 200, 64)]
    readings = [recorder.launch(tensors) for tensors in lists]
    cuda.run()
    for reading, tensors in zip(readings, lists, strict=True):
        check(reading, tensors)


# ---- the ring


def test_a_ring_is_used_again_and_again(cuda: FakeCuda) -> None:
    recorder = cuda.recorder(rows=8)
    frames = [some(1 + n % 4, start=n) for n in range(60)]
    for tensors in frames:
        reading = recorder.launch(tensors)
        cuda.run()
        check(reading, tensors)
    assert len({launch.rows for launch in cuda.launches()}) <= 8
    assert [launch.stamp for launch in cuda.launches()] == list(range(1, 61))
    assert cuda.counts()["cudaStreamQuery"] == 0


def test_a_full_ring_waits_for_a_device_that_is_late_and_loses_no_row(cuda: FakeCuda) -> None:
    recorder = cuda.recorder(rows=8)
    frames = [some(3, start=n) for n in range(12)]
    readings = [recorder.launch(tensors) for tensors in frames]
    assert cuda.counts()["cudaStreamQuery"] > 0
    assert readings[0].ready() and not readings[-1].ready()
    for reading, tensors in zip(readings, frames, strict=True):
        check(reading, tensors)


def test_streams_finish_in_any_order(cuda: FakeCuda) -> None:
    recorder = cuda.recorder(rows=12)
    a, b = cuda.new_stream(), cuda.new_stream(1)
    for n in range(10):
        first, second = some(3, start=n), some(2, start=2 * n)
        with cuda.on(a):
            of_a = recorder.launch(first, 0)
        with cuda.on(b):
            of_b = recorder.launch(second, 1)
        cuda.run(b)
        assert of_b.ready() and not of_a.ready()
        check(of_b, second)
        cuda.run(a)
        check(of_a, first)


@pytest.mark.parametrize("answering", [0, 1])
def test_a_device_that_is_stuck_refuses_no_launch_and_is_waited_for_once(cuda: FakeCuda, answering: int) -> None:
    """Work that waits on the stuck device is on a stream of its own, so that its default stream may answer, too."""
    recorder = cuda.recorder(rows=8, limit=0.3)
    cuda.turns_a_query(0)
    with cuda.on(cuda.new_stream(0)):
        stuck = [recorder.launch(some(3, start=n)) for n in range(2)]
    frames = [some(3, start=n) for n in range(10, 30)]
    start = time.monotonic()
    readings = []
    for tensors in frames:
        readings.append(recorder.launch(tensors, answering))
        cuda.run(Stream(answering, 0))
    assert 0.25 < time.monotonic() - start < 5
    assert cuda.counts()["cudaHostAlloc"] == 2  # rings
    assert stuck[0].rows(limit=0.05) == ["the device did not answer in time"] * 3
    cuda.run()  # late, into rows that are nobody else's
    check(stuck[1], some(3, start=1))
    for reading, tensors in zip(readings, frames, strict=True):
        check(reading, tensors)
    for n in range(5):
        launched = recorder.launch(some(4, start=n), [0, 1, 0, 1])
        cuda.run()
        check(launched, some(4, start=n))
    assert cuda.counts()["cudaHostAlloc"] == 0


def test_a_device_that_stays_stuck_takes_launches_and_as_much_memory_as_waits(cuda: FakeCuda) -> None:
    recorder = cuda.recorder(rows=8, limit=0.2)
    cuda.turns_a_query(0)
    start = time.monotonic()
    readings = [recorder.launch(some(2, start=n)) for n in range(13)]  # of which a ring takes four
    assert 0.55 < time.monotonic() - start < 10
    assert cuda.counts()["cudaHostAlloc"] == 4
    cuda.run()
    for n, reading in enumerate(readings):
        if n % 4 == 0 and n < 12:  # the oldest of a ring, for which the next launch could not wait longer
            assert reading.rows() == ["the device did not answer in time"] * 2
        else:
            check(reading, some(2, start=n))


def test_a_ring_that_there_is_no_memory_for_in_place_of_a_stuck_one_is_asked_for_again_without_a_wait(
    cuda: FakeCuda,
) -> None:
    recorder = cuda.recorder(rows=4, limit=0.5)
    cuda.turns_a_query(0)
    for _ in range(2):
        recorder.launch(some(2))
    cuda.counts()
    for attempt in range(3):
        cuda.fail_call("cudaHostAlloc", OUT_OF_MEMORY)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"^no pinned memory for 4 rows, 256 bytes: "):
            recorder.launch(some(1), 1)
        assert attempt == 0 or time.monotonic() - start < 0.3
    cuda.counts()
    reading = recorder.launch(some(1), 1)
    assert cuda.counts()["cudaStreamQuery"] == 0
    cuda.run()
    check(reading, some(1))


def test_rows_that_do_not_come_in_time_are_missing(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    cuda.turns_a_query(0)
    reading = recorder.launch(some(2))
    start = time.monotonic()
    assert reading.rows(limit=0.1) == ["the device did not answer in time"] * 2
    assert 0.05 < time.monotonic() - start < 10


def test_many_frames_of_a_device_that_does_not_answer_take_no_longer_than_one(
    cuda: FakeCuda, recorder: FakeRecorder
) -> None:
    cuda.turns_a_query(0)
    readings = [recorder.launch(some(2)) for _ in range(50)]
    start = time.monotonic()
    for reading in readings:
        assert reading.rows(limit=0.5) == ["the device did not answer in time"] * 2
    assert time.monotonic() - start < 5


def test_a_list_longer_than_the_ring_gets_a_larger_one_and_older_frames_are_still_read(cuda: FakeCuda) -> None:
    recorder = cuda.recorder(rows=4)
    frames = [some(count) for count in (3, 9, 2, 70, 1)]
    readings = [recorder.launch(tensors) for tensors in frames]
    assert cuda.counts()["cudaHostAlloc"] == 3 + 1  # rings of 6, 18 and 140 rows, and what the table is sent from
    cuda.run()
    for reading, tensors in zip(readings, frames, strict=True):
        check(reading, tensors)


def test_readings_that_nobody_asks_for_do_no_harm(cuda: FakeCuda) -> None:
    recorder = cuda.recorder(rows=6)
    for n in range(20):
        recorder.launch(some(4, start=n)).close()
    reading = recorder.launch(some(5))
    check(reading, some(5))


# ---- inside CUDA graphs


@pytest.fixture
def stream(cuda: FakeCuda) -> Stream:
    return cuda.new_stream()


def test_a_launch_inside_a_capture_is_captured_and_the_capture_stays_valid(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream
) -> None:
    tensors = [*some(3), STRIDED]
    with cuda.capturing(stream) as graph:
        cuda.counts()
        reading = recorder.launch(tensors)
        first = cuda.counts()
        recorder.launch(tensors)
        # The graph's memory is there now: besides the kernels only the device and its stream are asked after.
        assert cuda.counts() == ONE_LAUNCH + Counter({"cudaGetDevice": 1, "cudaLaunchKernelExC": 1})
    assert graph.error == 0 and graph.nodes() == ["kernel"] * 4
    assert first["cudaHostAlloc"] <= 1 and first["torch: device memory"] == 1
    assert reading.replays() == (0, False, "")
    assert reading.rows() == ["the CUDA graph that reads it has not been replayed"] * 4
    graph.replay(stream)
    with cuda.on(stream):
        assert reading.replays() == (1, False, "")
    check(reading, tensors)


def test_the_ring_is_not_touched_by_a_capture(cuda: FakeCuda, stream: Stream) -> None:
    recorder = cuda.recorder(rows=8, limit=2)
    recorder.launch(some(3))
    with cuda.capturing(stream):
        for _ in range(10):
            recorder.launch(some(7))
    eager = recorder.launch(some(3))
    launches = cuda.launches()
    before, after = launches[0], launches[-1]
    assert after.stamp == before.stamp + 1 and after.rows == before.rows + 3 * 64
    captured = launches[1:-1]
    assert {launch.stamp for launch in captured} == {0} and len({launch.rows for launch in captured}) == 10
    ring = range(before.rows, before.rows + 8 * 64)
    assert not any(launch.rows in ring for launch in captured)
    cuda.run()
    check(eager, some(3))


def test_each_replay_writes_the_rows_anew_and_is_counted(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream
) -> None:
    static = [torch.zeros(500), torch.zeros(300, dtype=torch.bfloat16), torch.zeros(40)[::4]]
    with cuda.capturing(stream) as graph:
        reading = recorder.launch(static)
    for number in range(1, 6):
        for tensor in static:
            tensor.fill_(number)
        static[1][7 * number] = float("nan")
        graph.replay(stream)
        with cuda.on(stream):
            assert reading.replays() == (number, False, "")
        check(reading, static)


def test_one_row_of_a_replayed_reading_is_read_without_the_others(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream
) -> None:
    """Else a judge, who looks at one weight after the other, would take n * n steps."""
    tensors = [STRIDED, *some(3000), STRIDED[1:]]
    with cuda.capturing(stream) as graph:
        reading = recorder.launch(tensors)
    assert reading.raw_rows(one_by_one=True)[1] == ["the CUDA graph that reads it has not been replayed"] * 3002
    graph.replay(stream)
    cuda.run()
    for row, tensor in zip(reading.rows(one_by_one=True), tensors, strict=True):
        assert not isinstance(row, str) and same(row, expected_row(tensor))

    def seconds(one_by_one: bool) -> float:
        start = time.perf_counter()
        reading.raw_rows(one_by_one=one_by_one)
        return time.perf_counter() - start

    at_once, in_turn = (min(seconds(one_by_one) for _ in range(5)) for one_by_one in (False, True))
    assert in_turn < 30 * at_once  # 3002 times, if each looked at all


def test_the_workspace_is_zero_again_after_each_replay(cuda: FakeCuda, recorder: FakeRecorder, stream: Stream) -> None:
    import ctypes

    tensors = some(20)
    with cuda.capturing(stream) as graph:
        reading = recorder.launch(tensors)
    (launch,) = cuda.launches()
    for _ in range(3):
        graph.replay(stream)
        cuda.run()
        assert not any(ctypes.string_at(launch.workspace, 8 + 48 * len(tensors)))
    check(reading, tensors)


def test_two_graphs_are_apart(cuda: FakeCuda, recorder: FakeRecorder, stream: Stream) -> None:
    lists = [some(5), some(70, start=3)]
    graphs, readings = [], []
    for tensors in lists:
        with cuda.capturing(stream) as graph:
            readings.append(recorder.launch(tensors))
        graphs.append(graph)
    for replayed, counts in ((1, (0, 1)), (0, (1, 1)), (1, (1, 2)), (1, (1, 3))):
        graphs[replayed].replay(stream)
        with cuda.on(stream):
            assert [found.completed for reading in readings if (found := reading.replays())] == list(counts)
    for reading, tensors in zip(readings, lists, strict=True):
        check(reading, tensors)


@pytest.mark.parametrize("order", range(6))
def test_two_captures_at_once_are_apart(cuda: FakeCuda, recorder: FakeRecorder, order: int) -> None:
    cuda.reset(order)
    streams = [cuda.new_stream(), cuda.new_stream()]
    lists = [[some(4, start=n) for n in range(6)], [some(68, start=n) for n in range(6)]]
    readings: list[list[FakeReading]] = [[], []]
    with cuda.capturing(streams[0]) as first, cuda.capturing(streams[1]) as second:
        for n in range(6):
            for stream, tensors, found in zip(streams, lists, readings, strict=True):
                with cuda.on(stream):
                    found.append(recorder.launch(tensors[n]))
    launches = cuda.launches()
    assert len({launch.capture for launch in launches}) == 2
    assert len({launch.workspace for launch in launches}) == 2
    first.replay(streams[0])
    second.replay(streams[1])
    cuda.run()
    for tensors, found in zip(lists, readings, strict=True):
        for reading, of_launch in zip(found, tensors, strict=True):
            check(reading, of_launch)


@pytest.mark.parametrize("order", range(8))
@pytest.mark.parametrize("side_device", [0, 1])
def test_streams_that_fork_in_a_capture_do_not_share_a_workspace(
    cuda: FakeCuda, recorder: FakeRecorder, side_device: int, order: int
) -> None:
    """Those of two devices may even have the same id."""
    cuda.reset(order)
    main = Stream(0, 1)
    side = Stream(side_device, 2 if side_device == 0 else 1)
    tensors = [torch.arange(3000.0) + n for n in range(4)]
    with cuda.capturing(main) as graph:
        before = recorder.launch(tensors[:1])
        cuda.wait_for(side, main)
        with cuda.on(side):
            at_once = [recorder.launch(tensors[1:2], side_device)]
        at_once.append(recorder.launch(tensors[2:3]))
        cuda.wait_for(main, side)
        after = recorder.launch(tensors[3:])
    assert graph.error == 0
    for _ in range(3):
        graph.replay(main)
        cuda.run()
    for reading, tensor in zip((before, *at_once, after), tensors, strict=True):
        check(reading, [tensor])
        assert reading.replays() == (3, False, "")


def test_long_lists_in_a_graph_have_tables_that_nothing_else_writes_to(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream
) -> None:
    lists = [some(70), some(80, start=5)]
    with cuda.on(stream):
        recorder.launch(lists[0])  # the same list eagerly, before and after
    with cuda.capturing(stream) as graph:
        first = cuda.current_capture()
        readings = [recorder.launch(tensors) for tensors in lists]
    with cuda.on(stream):
        for start in (0, 9, 17):
            recorder.launch(some(90, start))
    with cuda.capturing(stream):
        for start in range(6):
            recorder.launch(some(75, start))
    launches = [launch for launch in cuda.launches() if launch.capture in (0, first)]
    captured, eager = ({x.table for x in launches if bool(x.capture) == inside} for inside in (True, False))
    assert len(captured) == 2 and not captured & eager
    for _ in range(2):
        graph.replay(stream)
        cuda.run()
        for reading, tensors in zip(readings, lists, strict=True):
            check(reading, tensors)
    assert graph.nodes() == ["kernel", "kernel"], "the tables were sent when the graph was captured, not in each replay"


def test_a_graph_may_be_replayed_after_its_readings_are_gone(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream
) -> None:
    with cuda.capturing(stream) as graph:
        readings = [recorder.launch(some(count)) for count in (3, 70, 5)]
    for reading in readings:
        reading.close()
    with cuda.capturing(stream) as other:  # what is free is used for this one
        mine = recorder.launch(some(4))
    for _ in range(2):
        graph.replay(stream)
        other.replay(stream)
        cuda.run()
    assert mine.replays() == (2, False, "")
    check(mine, some(4))


def test_rows_stay_with_those_who_read_them_when_the_graph_is_gone(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream
) -> None:
    tensors = some(5)
    with cuda.capturing(stream) as graph:
        reading = recorder.launch(tensors)
    graph.replay(stream)
    graph.destroy()
    with cuda.on(stream):
        assert reading.replays() == (1, False, "")  # it was on its way, and is waited for
        assert reading.replays() == (1, True, "")
    for n in range(3):
        with cuda.capturing(stream) as other:
            recorder.launch(some(6, start=n))
        other.replay(stream)
        cuda.run()
        other.destroy()
    check(reading, tensors)
    assert reading.replays() == (1, True, "")


def test_a_graph_that_is_gone_says_so_only_when_no_replay_is_left(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream
) -> None:
    cuda.turns_a_query(0)
    with cuda.on(stream):
        recorder.launch(some(3))
    cuda.run()
    cuda.turns_a_query(1)
    with cuda.capturing(stream) as graph:
        reading = recorder.launch(some(3))
    for _ in range(3):
        graph.replay(stream)
    graph.destroy()
    with cuda.on(cuda.new_stream()):
        assert reading.replays() == (0, False, "")
    cuda.run()
    assert reading.replays() == (3, True, "")


def test_memory_of_graphs_that_are_gone_is_used_again(cuda: FakeCuda, recorder: FakeRecorder, stream: Stream) -> None:
    sizes = []
    for n in range(100):
        tensors = some(10 + n % 3 * 40)
        with cuda.capturing(stream) as graph:
            readings = [recorder.launch(tensors) for _ in range(20)]
        with cuda.on(stream):
            assert readings[-1].replays() == (0, False, ""), "stamps of the graph before"
        if n % 10 == 0:
            graph.replay(stream)
            cuda.run()
            check(readings[-1], tensors)
        readings.clear()
        graph.destroy()
        sizes.append((cuda.bytes_of_pinned_memory(), cuda.bytes_of_device_memory()))
    for pinned, device in sizes[6:]:
        assert pinned == sizes[5][0] and device <= max(size for _, size in sizes[:6])


def test_frames_of_before_a_capture_are_waited_for_without_a_query(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream
) -> None:
    tensors = some(4)
    with cuda.on(stream):
        reading = recorder.launch(tensors)
    cuda.counts()
    with cuda.capturing(stream) as graph:
        timer = threading.Timer(0.1, cuda.run)
        timer.start()
        check(reading, tensors)
        timer.join()
    assert graph.error == 0 and cuda.counts()["cudaStreamQuery"] == 0


def test_replays_are_not_waited_for_inside_a_capture(cuda: FakeCuda, recorder: FakeRecorder, stream: Stream) -> None:
    with cuda.capturing(stream) as graph:
        reading = recorder.launch(some(3))
    graph.replay(stream)
    cuda.counts()
    with cuda.capturing(stream) as other:
        assert reading.replays(limit=2) == (0, False, "")
    assert other.error == 0 and cuda.counts()["cudaStreamQuery"] == 0
    with cuda.on(stream):
        assert reading.replays() == (1, False, "")


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL])
def test_a_capture_in_one_thread_survives_all_that_another_does(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream, mode: int
) -> None:
    """Memory is allocated, tables are sent, rings grow and rows are waited for, which in global mode no thread may."""

    def others() -> None:
        for count in (1, 70, 300, 90):
            tensors = some(count)
            check(recorder.launch(tensors), tensors)
            full = cuda.recorder(rows=count)
            for _ in range(3):
                check(full.launch(tensors), tensors)
        check(graph_reading, some(5))
        assert graph_reading.replays() == (1, False, "")
        done.append(True)

    done: list[bool] = []
    with cuda.capturing(stream) as first:
        graph_reading = recorder.launch(some(5))
    first.replay(stream)
    cuda.run()
    with cuda.capturing(stream, mode) as graph:
        recorder.launch(some(3))
        thread = threading.Thread(target=others)
        thread.start()
        thread.join()
        recorder.launch(some(75))
    assert done and graph.error == 0 and graph.nodes() == ["kernel", "kernel"]


def test_memory_of_a_graph_is_made_on_a_stream_that_is_not_captured(cuda: FakeCuda) -> None:
    """torch deals its streams out to everybody in turn: also those that are being captured."""
    recorder = cuda.recorder(limit=2)
    pool = [Stream(0, id) for id in range(33, 65)]
    captures = [cuda.capturing(stream) for stream in pool[:-1]]
    graphs = [capture.__enter__() for capture in captures]
    with cuda.on(pool[0]):
        for count in (3, 70):
            recorder.launch(some(count))
    for capture in reversed(captures):
        capture.__exit__(None, None, None)
    assert [graph.error for graph in graphs] == [0] * 31
    graphs[0].replay(pool[0])
    cuda.run()


def test_memory_of_a_graph_that_is_not_ready_in_time_is_an_error(cuda: FakeCuda, stream: Stream) -> None:
    cuda.turns_a_query(0)
    recorder = cuda.recorder(limit=0.1)
    with cuda.capturing(stream) as graph:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="preparing a launch: the device did not answer in time"):
            recorder.launch(some(3))
        assert 0.05 < time.monotonic() - start < 10
    assert graph.error == 0 and graph.nodes() == []


def test_asking_for_the_capture_is_one_question(cuda: FakeCuda, stream: Stream) -> None:
    with cuda.on(stream):
        cuda.counts()
        assert cuda.current_capture() == 0
    assert cuda.counts() == Counter({"cudaGetDevice": 1, "cudaStreamGetCaptureInfo": 1})


def test_captures_have_numbers_of_their_own(cuda: FakeCuda, stream: Stream) -> None:
    numbers = set()
    for _ in range(3):
        assert cuda.current_capture() == 0
        with cuda.capturing(stream):
            numbers.add(cuda.current_capture())
    assert len(numbers) == 3 and 0 not in numbers


def test_a_capture_that_has_failed_takes_no_launch(cuda: FakeCuda, recorder: FakeRecorder, stream: Stream) -> None:
    with cuda.capturing(stream) as graph:
        cuda.wait_for(stream, cuda.new_stream())  # on work outside of it, which is not allowed
        assert cuda.current_capture() == 0
        with pytest.raises(RuntimeError, match="stream is captured: cudaErrorStreamCaptureInvalidated"):
            recorder.launch(some(3))
    assert graph.error == INVALIDATED
    assert cuda.faults() == ["waiting for work outside of it ends a capture"]
    with cuda.on(stream):
        check(recorder.launch(some(3)), some(3))


def test_frames_of_before_a_capture_that_has_failed_are_waited_for(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream
) -> None:
    with cuda.on(stream):
        reading = recorder.launch(some(3))
    with cuda.capturing(stream):
        cuda.wait_for(stream, cuda.new_stream())
        timer = threading.Timer(0.1, cuda.run)
        timer.start()
        check(reading, some(3))
        timer.join()
    assert cuda.faults() == ["waiting for work outside of it ends a capture"]


def test_frames_on_the_default_stream_are_waited_for_while_a_stream_that_blocks_it_is_captured(
    cuda: FakeCuda, recorder: FakeRecorder
) -> None:
    tensors, blocking = some(4), cuda.new_blocking_stream()
    readings = [recorder.launch(tensors, device) for device in (0, 1)]
    cuda.turns_a_query(0)
    cuda.counts()
    with cuda.capturing(blocking) as graph, cuda.on(Stream(0, 0)):
        timer = threading.Timer(0.1, cuda.run)
        timer.start()
        check(readings[0], tensors)
        timer.join()
        assert cuda.counts()["cudaStreamQuery"] == 0
        with pytest.raises(RuntimeError, match="stream is captured: cudaErrorStreamCaptureImplicit"):
            recorder.launch(tensors)
        check(readings[1], tensors)
        elsewhere = recorder.launch(tensors, 1)  # the default stream of another device
    assert graph.error == 0 and graph.nodes() == []
    cuda.run()
    check(elsewhere, tensors)


# ---- errors


def test_a_refused_launch_says_so_and_the_next_one_works(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    tensors = [*some(4), STRIDED, STRIDED[:2]]
    recorder.launch(tensors)
    words = r"cudaErrorNoKernelImageForDevice \(no kernel image is available for execution on the device\)"
    for skip, what in ((0, "launching the pass"), (1, "launching the strided pass"), (2, "launching the strided pass")):
        cuda.fail_call("cudaLaunchKernelExC", NO_KERNEL_IMAGE, skip)
        with pytest.raises(RuntimeError, match=f"^CUDA error while {what}: {words}$"):
            recorder.launch(tensors)
        assert cuda.faults() == [], "the error is left to nobody else"
        check(recorder.launch(tensors), tensors)


def test_a_launch_that_is_refused_on_one_device_leaves_the_others_well(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    cuda.device = 1
    cuda.fail_call("cudaLaunchKernelExC", NO_KERNEL_IMAGE, skip=1)
    with pytest.raises(RuntimeError, match="launching the pass"):
        recorder.launch(some(2), [0, 2])
    assert cuda.device == 1
    check(recorder.launch(some(2), [0, 2]), some(2))


def test_a_refused_launch_in_a_capture_leaves_it_valid(cuda: FakeCuda, recorder: FakeRecorder, stream: Stream) -> None:
    with cuda.capturing(stream) as graph:
        cuda.fail_call("cudaLaunchKernelExC", NO_KERNEL_IMAGE)
        with pytest.raises(RuntimeError, match="no kernel image"):
            recorder.launch(some(2))
        reading = recorder.launch(some(2))
    assert graph.error == 0 and graph.nodes() == ["kernel"]
    graph.replay(stream)
    cuda.run()
    check(reading, some(2))


@pytest.mark.parametrize(
    "calls",
    [
        ["cudaUserObjectCreate"],
        ["cudaGraphRetainUserObject"],
        ["cudaGraphRetainUserObject", "cudaUserObjectRelease"],
    ],
    ids=" and ".join,
)
def test_a_capture_survives_that_its_graph_cannot_own_memory(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream, calls: list[str]
) -> None:
    words = r"cudaErrorMemoryAllocation \(out of memory\)"
    with cuda.capturing(stream) as graph:
        for call in calls:
            cuda.fail_call(call, OUT_OF_MEMORY)
        with pytest.raises(RuntimeError, match=f"^CUDA error while making memory a CUDA graph's own: {words}$"):
            recorder.launch(some(3))
        assert cuda.faults() == [], "the error is left to nobody else"
        reading = recorder.launch(some(3))
    assert graph.error == 0 and graph.nodes() == ["kernel"]
    graph.replay(stream)
    cuda.run()
    check(reading, some(3))


# A device is asked for its size only once for each kernel: device 3 is no other test's.
@pytest.mark.parametrize(
    ("call", "tensor", "device", "doing"),
    [
        ("cudaStreamGetCaptureInfo", torch.ones(3), 0, "asking whether a stream is captured"),
        ("cudaDeviceGetAttribute", torch.ones(3), 3, "launching the pass"),
        ("cudaOccupancyMaxActiveBlocksPerMultiprocessor", STRIDED, 3, "launching the strided pass"),
    ],
    ids=["capture", "size", "occupancy"],
)
def test_a_question_that_is_not_answered_refuses_the_launch_and_the_next_one_works(
    cuda: FakeCuda, recorder: FakeRecorder, call: str, tensor: Tensor, device: int, doing: str
) -> None:
    cuda.fail_call(call, OUT_OF_MEMORY)
    with pytest.raises(RuntimeError, match=f"^CUDA error while {doing}: cudaErrorMemoryAllocation "):
        recorder.launch([tensor], device)
    assert cuda.faults() == [], "the error is left to nobody else"
    check(recorder.launch([tensor], device), [tensor])


@pytest.mark.parametrize("call", ["cudaStreamGetCaptureInfo", "cudaStreamQuery"])
def test_a_wait_that_ends_with_an_error_says_so_and_leaves_it_to_nobody_else(
    cuda: FakeCuda, recorder: FakeRecorder, call: str
) -> None:
    cuda.turns_a_query(0)
    reading = recorder.launch([torch.ones(3)])
    cuda.fail_call(call, OUT_OF_MEMORY)
    assert reading.rows() == ["cudaErrorMemoryAllocation (out of memory)"]
    assert cuda.faults() == []


def test_a_ring_that_cannot_be_freed_leaves_no_error(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    recorder.launch([torch.ones(3)])
    cuda.run()
    cuda.fail_call("cudaFreeHost", OUT_OF_MEMORY)
    recorder.close()
    assert cuda.counts()["cudaFreeHost"] == 1 and cuda.faults() == []


@pytest.mark.parametrize(
    ("call", "skip", "text"),
    [
        ("cudaHostAlloc", 0, "no pinned memory for 4096 rows, 262144 bytes: cudaErrorMemoryAllocation (out of memory)"),
        (
            "cudaMalloc",
            0,
            "no device memory for the rows of 140 tensors, 6728 bytes: "
            "CUDA out of memory. Tried to allocate 6728 bytes.",
        ),
        (
            "cudaHostAlloc",
            1,
            "no pinned memory for a table of 70 tensors, 1680 bytes: CUDA error: out of memory",
        ),
        (
            "cudaMalloc",
            1,
            "no device memory for a table of 70 tensors, 1680 bytes: CUDA out of memory. Tried to allocate 1680 bytes.",
        ),
    ],
    ids=["ring", "workspace", "table's source", "table"],
)
def test_memory_that_is_not_there_is_named_and_the_next_attempt_works(
    cuda: FakeCuda, recorder: FakeRecorder, call: str, skip: int, text: str
) -> None:
    cuda.fail_call(call, OUT_OF_MEMORY, skip)
    with pytest.raises(RuntimeError) as raised:
        recorder.launch(some(70))
    assert str(raised.value) == text
    assert cuda.faults() == [], "the error is left to nobody else"
    for _ in range(2):
        check(recorder.launch(some(70)), some(70))


def test_a_table_that_there_is_no_memory_for_is_not_taken_for_the_old_one(
    cuda: FakeCuda, recorder: FakeRecorder
) -> None:
    lists = [some(70), some(70, start=1)]
    recorder.launch(lists[0])
    for tensors in (lists[1], lists[0], lists[1]):
        cuda.fail_call("cudaHostAlloc", OUT_OF_MEMORY)
        with pytest.raises(RuntimeError, match="no pinned memory for a table"):
            recorder.launch(tensors)
        check(recorder.launch(tensors), tensors)


@pytest.mark.parametrize(
    ("call", "skip", "text"),
    [
        ("cudaHostAlloc", 0, "no pinned memory for 100000 rows, 6400000 bytes"),
        ("cudaMalloc", 0, "no device memory for the rows of 200000 tensors, 9600008 bytes"),
        ("cudaMalloc", 1, "no device memory for a table of 100000 tensors, 2400000 bytes"),
    ],
    ids=["rows", "workspace", "table"],
)
def test_a_capture_survives_that_there_is_no_memory(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream, call: str, skip: int, text: str
) -> None:
    empty = [torch.empty(0)] * 100_000
    with cuda.capturing(stream) as graph:
        cuda.fail_call(call, OUT_OF_MEMORY, skip)
        with pytest.raises(RuntimeError, match=f"^{text}: "):
            recorder.launch(empty)
        reading = recorder.launch(some(3))
    assert graph.error == 0 and graph.nodes() == ["kernel"]
    graph.replay(stream)
    cuda.run()
    check(reading, some(3))
    if call == "cudaHostAlloc":
        cuda.fail_call(call, 0)  # it was not called where a slab of that size was free


def test_rows_of_before_a_device_side_assert_survive_it(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    recorder.launch(some(2))
    cuda.run()
    cuda.assert_after(kernels=3)
    frames = [some(2, start=n) for n in range(6)]
    readings = [recorder.launch(tensors) for tensors in frames]
    elsewhere = recorder.launch(some(4), 1)
    start = time.monotonic()
    for reading, tensors in zip(readings[:3], frames[:3], strict=True):
        check(reading, tensors)
    words = "cudaErrorAssert (device-side assert triggered)"
    for reading in readings[3:]:
        assert not reading.ready() and reading.rows() == [words] * 2
    assert time.monotonic() - start < 5
    assert cuda.current_capture() == 0
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        recorder.launch(some(1))
    cuda.device = 1
    check(elsewhere, some(4))
    check(recorder.launch(some(4), 1), some(4))


def test_a_frame_that_an_assert_breaks_off_has_the_rows_that_came(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    tensors = [*some(2), STRIDED, STRIDED[1:]]
    recorder.launch(tensors)
    cuda.run()
    cuda.assert_after(kernels=2)
    rows = recorder.launch(tensors).rows()
    for row, tensor in zip(rows[:3], tensors, strict=False):
        assert not isinstance(row, str) and same(row, expected_row(tensor))
    assert rows[3] == "cudaErrorAssert (device-side assert triggered)"


def test_a_full_ring_of_a_device_that_is_gone_is_no_reason_to_wait(cuda: FakeCuda) -> None:
    recorder = cuda.recorder(rows=8)
    recorder.launch(some(1))
    cuda.run()
    cuda.assert_after(kernels=1)
    readings = [recorder.launch(some(2)) for _ in range(2)]
    cuda.run()
    start = time.monotonic()
    for n in range(10):
        check(recorder.launch(some(3, start=n), 1), some(3, start=n))
    assert time.monotonic() - start < 5
    check(readings[0], some(2))
    assert readings[1].rows() == ["CUDA error: device-side assert triggered"] * 2


def test_a_replay_that_an_assert_breaks_off_is_not_counted(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream
) -> None:
    with cuda.capturing(stream) as graph:
        readings = [recorder.launch(some(2, start=n)) for n in range(4)]
    graph.replay(stream)
    cuda.run()
    cuda.assert_after(kernels=2)
    graph.replay(stream)
    cuda.run()
    with cuda.on(stream):
        found = [reading.replays() for reading in readings]
    words = "cudaErrorAssert (device-side assert triggered)"
    assert found == [(2, False, words), (2, False, words), (1, False, words), (1, False, words)]


@pytest.mark.parametrize("kernels", [1, 2])
def test_a_replay_is_counted_only_if_it_has_written_every_row_of_a_reading(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream, kernels: int
) -> None:
    """Dense tensors share a kernel, those with strides have one each: rows of one reading may stop anywhere."""
    with cuda.capturing(stream) as graph:
        reading = recorder.launch([STRIDED, *some(2), STRIDED[1:]])
    graph.replay(stream)
    cuda.run()
    cuda.assert_after(kernels)
    graph.replay(stream)
    cuda.run()
    with cuda.on(stream):
        assert reading.replays() == (1, False, "cudaErrorAssert (device-side assert triggered)")


def test_a_first_replay_that_is_broken_off_leaves_the_rows_that_came(
    cuda: FakeCuda, recorder: FakeRecorder, stream: Stream
) -> None:
    with cuda.capturing(stream) as graph:
        reading = recorder.launch([STRIDED, *some(2)])
    cuda.assert_after(kernels=1)
    graph.replay(stream)
    cuda.run()
    missing, *rows = reading.rows()
    assert missing == "the CUDA graph that reads it has not been replayed"
    for row, tensor in zip(rows, some(2), strict=True):
        assert not isinstance(row, str) and same(row, expected_row(tensor))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_replay_is_counted_only_if_every_device_in_it_has_written_its_rows(
    cuda: FakeCuda, recorder: FakeRecorder, failing: int
) -> None:
    main, side = Stream(1 - failing, 1), Stream(failing, 1)
    with cuda.capturing(main) as graph, cuda.on(side):
        cuda.wait_for(side, main)
        reading = recorder.launch(some(2), [0, 1])
        cuda.wait_for(main, side)
    assert graph.error == 0
    graph.replay(main)
    cuda.run()
    cuda.assert_after(kernels=1, device=failing)
    with cuda.on(Stream(failing, 2)):
        recorder.launch(some(1), failing)
    cuda.run()
    graph.replay(main)
    cuda.run()
    cuda.device = 3
    replays = reading.replays()
    assert replays is not None and (replays.completed, replays.over) == (1, False)
    assert "device-side assert triggered" in replays.failure


# ---- threads


def test_threads_launch_on_streams_and_devices_at_once(cuda: FakeCuda) -> None:
    recorder = cuda.recorder(rows=64)
    errors: list[BaseException] = []

    def work(device: int, start: int) -> None:
        try:
            with cuda.on(Stream(device, start + 1)):
                for n in range(12):
                    lists = [some(1 + (n + start) % 4, start=n), some(66, start=n % 2)]
                    readings = [recorder.launch(tensors, device) for tensors in lists]
                    for reading, tensors in zip(readings, lists, strict=True):
                        check(reading, tensors)
        except BaseException as error:
            errors.append(error)

    with cuda.running(workers=2):
        threads = [threading.Thread(target=work, args=(n % 2, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


# ---- detail


SMALL = torch.tensor([0.0, 1e-40, -3.0, 0.0, 1e-45, float("nan")])


def check_detail(reading: FakeReading, tensors: Sequence[Tensor]) -> None:
    for row, tensor in zip(reading.rows(), tensors, strict=True):
        assert not isinstance(row, str), row
        assert same(row, detailed_row(tensor)), (row, tensor)


@pytest.mark.parametrize("count", [1, 40, 65, 300])
def test_detail_comes_with_the_rows_of_as_many_launches(cuda: FakeCuda, recorder: FakeRecorder, count: int) -> None:
    """Beside launches without it, whose workspace, table and ring it shares."""
    tensors = [*some(count), SMALL, SMALL.expand(3, 6)[:, ::2], STRIDED]
    for detail in (True, False, True):
        recorder.launch(tensors, detail=detail)
        cuda.run()
    cuda.counts()
    readings = [recorder.launch(tensors, detail=detail) for detail in (True, False, True)]
    assert [launch.tensors for launch in cuda.launches()] == 3 * [count + 1, 0, 0]
    cuda.run()
    check_detail(readings[0], tensors)
    check(readings[1], tensors)
    check_detail(readings[2], tensors)


def test_detail_is_read_anew_in_each_replay(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    numbers, view = SMALL.clone(), torch.zeros(12)
    tensors = [numbers, view[::3]]
    recorder.launch(tensors, detail=True)
    cuda.run()
    stream = cuda.new_stream()
    with cuda.capturing(stream) as graph:
        reading = recorder.launch(tensors, detail=True)
    assert reading.rows() == ["the CUDA graph that reads it has not been replayed"] * 2
    for number in range(1, 4):
        numbers[number], view[3] = 0.0, 1e-40 * number
        graph.replay(stream)
        with cuda.on(stream):
            assert reading.replays() == (number, False, "")
        check_detail(reading, tensors)


def test_a_row_that_came_before_its_device_failed_has_its_detail(cuda: FakeCuda, recorder: FakeRecorder) -> None:
    recorder.launch([SMALL, STRIDED], detail=True)
    cuda.run()
    cuda.assert_after(1)
    reading = recorder.launch([SMALL, STRIDED], detail=True)
    cuda.run()
    first, second = reading.rows()
    assert not isinstance(first, str) and same(first, detailed_row(SMALL))
    assert isinstance(second, str) and "assert" in second.lower()

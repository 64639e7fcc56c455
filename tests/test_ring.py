"""csrc/ring.h alone, with a device that answers late, out of order, wrongly or never.

Where OVERFLOWSTAT_CSRC names a folder, the one in there is tested: test_cuda_host_mutants.py runs this file so.
"""

import ctypes
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from compile_once import compile_once
from device_on_cpu import CSRC, TESTS, compiler

RUNNING, FINISHED, FAILED = range(3)

pytestmark = pytest.mark.any_torch


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    cxx = compiler()
    if cxx is None:
        pytest.skip("no C++ compiler")
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    csrc, source = Path(os.environ.get("OVERFLOWSTAT_CSRC", CSRC)), TESTS / "ring" / "driver.cpp"
    command, sources = [cxx, *flags, "-I", str(csrc), str(source)], [*csrc.glob("*.h"), source]
    library = ctypes.CDLL(str(compile_once(command, "ring.so", sources, identity=[cxx, *flags])))
    library.device_new.restype = ctypes.c_void_p
    library.device_new.argtypes = [ctypes.c_long, ctypes.c_double]
    signatures: dict[str, list[type]] = {
        "device_delete": [],
        "device_set_progress": [ctypes.c_int],
        "device_polls": [],
        "device_waits": [],
        "frame_begin": [ctypes.c_long],
        "frame_first": [ctypes.c_long],
        "frame_drop": [ctypes.c_long],
        "frame_ready": [ctypes.c_long],
        "frame_write": [ctypes.c_long, ctypes.c_long, ctypes.c_ulong],
        "frame_result": [ctypes.c_long, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_long],
    }
    for name, arguments in signatures.items():
        getattr(library, name).argtypes = [ctypes.c_void_p, *arguments]
        if name in ("device_polls", "device_waits", "frame_begin", "frame_first"):
            getattr(library, name).restype = ctypes.c_long
    return library


class Device:
    """A ring of `capacity` rows and the device that writes them, when it is told to."""

    def __init__(self, library: ctypes.CDLL, capacity: int, limit: float) -> None:
        self.library = library
        self.handle = library.device_new(capacity, limit)
        self.sizes: dict[int, int] = {}
        self.waits_of_readers = 0

    def begin(self, count: int) -> int:
        frame: int = self.library.frame_begin(self.handle, count)
        self.sizes[frame] = count
        return frame

    def write(self, frame: int, row: int, value: int) -> None:
        self.library.frame_write(self.handle, frame, row, value)

    def write_all(self, frame: int, value: int) -> None:
        for row in range(self.sizes[frame]):
            self.write(frame, row, value + row)

    def ready(self, frame: int) -> bool:
        return bool(self.library.frame_ready(self.handle, frame))

    def first(self, frame: int) -> int:
        first: int = self.library.frame_first(self.handle, frame)
        return first

    def result(self, frame: int) -> tuple[list[int], str]:
        values = (ctypes.c_long * self.sizes[frame])()
        failure = ctypes.create_string_buffer(200)
        self.waits_of_readers += self.library.frame_result(self.handle, frame, values, failure, len(failure))
        return list(values), failure.value.decode()

    def set_progress(self, progress: int) -> None:
        self.library.device_set_progress(self.handle, progress)

    @property
    def polls(self) -> int:
        polls: int = self.library.device_polls(self.handle)
        return polls

    @property
    def waits(self) -> int:
        waits: int = self.library.device_waits(self.handle)
        return waits


@pytest.fixture
def devices(library: ctypes.CDLL) -> Iterator["list[Device]"]:
    made: list[Device] = []
    yield made
    for device in made:
        library.device_delete(device.handle)


@pytest.fixture
def device(library: ctypes.CDLL, devices: list[Device]) -> Device:
    devices.append(Device(library, 8, 20.0))
    return devices[-1]


def test_a_frame_is_ready_when_its_last_row_is_there_whatever_the_order(device: Device) -> None:
    frame = device.begin(3)
    for row in (2, 0):
        device.write(frame, row, 10 + row)
        assert not device.ready(frame)
    device.write(frame, 1, 11)
    assert device.ready(frame)
    assert device.result(frame) == ([10, 11, 12], "")
    assert device.polls == 0


def test_frames_finish_in_any_order(device: Device) -> None:
    """As on several streams or devices."""
    a, b = device.begin(2), device.begin(2)
    device.write_all(b, 20)
    assert device.ready(b) and not device.ready(a)
    device.write_all(a, 10)
    assert device.result(b) == ([20, 21], "") and device.result(a) == ([10, 11], "")


def test_rows_of_a_frame_before_never_pass_for_those_of_the_next(device: Device) -> None:
    for _ in range(50):
        old = device.begin(8)
        device.write_all(old, 1)
        new = device.begin(8)  # over the rows of the old one, whose stamps are still there
        assert not device.ready(new)
        device.write_all(new, 2)
        assert device.result(new)[0] == list(range(2, 10)) and device.result(old)[0] == list(range(1, 9))


def test_a_full_ring_waits_for_the_oldest_frame_and_drops_none(device: Device) -> None:
    old, young = device.begin(5), device.begin(3)
    writer = threading.Timer(0.1, device.write_all, (old, 100))
    writer.start()
    start = time.monotonic()
    third = device.begin(4)
    assert time.monotonic() - start > 0.05 and device.waits == 1
    device.write_all(third, 300)
    device.write_all(young, 200)
    assert [device.result(frame) for frame in (old, young, third)] == [
        ([100, 101, 102, 103, 104], ""),
        ([200, 201, 202], ""),
        ([300, 301, 302, 303], ""),
    ]


def test_a_full_ring_of_finished_frames_does_not_wait(device: Device) -> None:
    for value in range(100):
        device.write_all(device.begin(3), value)
    assert device.waits == 0 and device.polls == 0


def test_a_wait_is_counted_once_for_whoever_had_it(device: Device) -> None:
    device.set_progress(FINISHED)
    read_before = device.begin(8)
    device.result(read_before)
    assert (device.waits, device.waits_of_readers) == (0, 1)
    written_over = device.begin(8)
    assert (device.waits, device.waits_of_readers) == (0, 1)
    device.begin(8)
    assert (device.waits, device.waits_of_readers) == (1, 1)
    for frame in (read_before, written_over):
        device.result(frame)
    assert (device.waits, device.waits_of_readers) == (1, 1)


def test_a_frame_that_nobody_asks_for_is_written_over_only_when_it_is_done(device: Device) -> None:
    dropped = device.begin(8)
    device.library.frame_drop(device.handle, dropped)
    device.set_progress(FINISHED)
    frame = device.begin(8)
    assert device.polls == 1
    device.write_all(frame, 7)
    assert device.result(frame)[0] == list(range(7, 15))


@pytest.mark.parametrize("capacity", [1, 2, 7, 64])
def test_frames_keep_their_rows_apart_while_a_device_writes_them_late_and_in_any_order(
    library: ctypes.CDLL, devices: list[Device], capacity: int
) -> None:
    device, rng = Device(library, capacity, 20.0), random.Random(capacity)
    devices.append(device)
    launched: list[int] = []
    everything_is_launched = threading.Event()

    def write_them() -> None:
        while not everything_is_launched.is_set() or launched:
            if launched:
                frame = launched.pop(rng.randrange(len(launched)))
                device.write_all(frame, 1000 * frame)

    writer = threading.Thread(target=write_them)
    writer.start()
    frames = []
    for _ in range(500):
        frames.append(device.begin(rng.randint(1, capacity)))
        launched.append(frames[-1])
    everything_is_launched.set()
    writer.join()
    for frame in frames:
        assert device.result(frame) == (list(range(1000 * frame, 1000 * frame + device.sizes[frame])), "")


def test_a_frame_lies_side_by_side_also_at_the_end_of_the_ring(device: Device) -> None:
    device.write_all(device.begin(6), 0)
    frame = device.begin(4)
    assert device.first(frame) == 0
    device.write_all(frame, 40)
    assert device.result(frame)[0] == [40, 41, 42, 43]


def test_a_device_that_fails_ends_the_wait_with_the_rows_that_came(device: Device) -> None:
    frame = device.begin(3)
    device.write(frame, 1, 11)
    threading.Timer(0.05, device.set_progress, (FAILED,)).start()
    assert device.result(frame) == ([-1, 11, -1], "it is on fire")
    device.write(frame, 0, 10)
    assert device.result(frame) == ([-1, 11, -1], "it is on fire"), "the same result each time"


def test_whether_a_frame_is_ready_is_told_at_once_also_while_another_thread_waits_for_it(device: Device) -> None:
    frame = device.begin(1)
    waiting = threading.Thread(target=device.result, args=(frame,))
    waiting.start()
    time.sleep(0.05)
    start = time.monotonic()
    assert not device.ready(frame)
    assert time.monotonic() - start < 1.0
    device.write(frame, 0, 3)
    waiting.join()
    assert device.ready(frame) and device.result(frame) == ([3], "")


def test_a_device_that_finishes_without_its_rows_ends_the_wait(device: Device) -> None:
    frame = device.begin(2)
    device.write(frame, 0, 5)
    device.set_progress(FINISHED)
    assert device.result(frame) == ([5, -1], "the device finished without writing its rows")


def test_a_failed_device_does_not_lose_rows_that_are_there(device: Device) -> None:
    frame = device.begin(2)
    device.write_all(frame, 5)
    device.set_progress(FAILED)
    assert device.result(frame) == ([5, 6], "")


def test_a_device_that_never_answers_ends_the_wait_in_bounded_time(library: ctypes.CDLL, devices: list[Device]) -> None:
    device = Device(library, 4, 0.2)
    devices.append(device)
    frame = device.begin(4)
    start = time.monotonic()
    assert device.result(frame) == ([-1] * 4, "the device did not answer in time")
    assert 0.15 < time.monotonic() - start < 10


def test_rows_that_may_still_be_written_are_nobody_elses_and_a_ring_full_of_them_is_waited_for_once(
    library: ctypes.CDLL, devices: list[Device]
) -> None:
    device = Device(library, 8, 0.3)
    devices.append(device)
    stuck, other = device.begin(5), device.begin(3)
    start = time.monotonic()
    assert device.begin(2) == 0
    assert 0.25 < time.monotonic() - start < 10 and device.waits == 1
    polls = device.polls
    assert device.begin(2) == 0
    device.write_all(stuck, 50)  # late
    device.set_progress(FINISHED)
    assert device.begin(2) == 0 and device.polls == polls and device.waits == 1
    device.write_all(other, 30)
    assert device.result(other) == ([30, 31, 32], "")
    assert device.result(stuck) == ([-1] * 5, "the device did not answer in time"), "the same result each time"


@pytest.mark.parametrize("count", [0, 9])
def test_a_frame_that_cannot_fit_is_refused(device: Device, count: int) -> None:
    assert device.begin(count) == -1

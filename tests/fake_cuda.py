"""Runs the host side of csrc/cuda on the CPU: g++ compiles it as it is, with tests/cuda_host in place of the headers of
torch and CUDA. The devices behind it are fake ones that work only when they are told to; their kernels are the real
ones, as fibers (tests/cuda_on_cpu)."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from compile_once import KEPT, compile_once
from device_on_cpu import COMMON_FLAGS, CSRC, FORMATS, STANDIN, TESTS, Detail, Row, RowDecoder, compiler
from expected_rows import ExpectedRow

FOLDER = TESTS / "cuda_host"
UNDER_TEST = [f"cuda/{name}" for name in ("recorder.cpp", "graph.cpp", "memory.cpp", "stream.cpp", "reduce.cu")]
UNDER_TEST.append("reading.cpp")
MACHINE = ["machine.cpp", "torch.cpp"]

GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # cudaStreamCaptureMode
OUT_OF_MEMORY, NO_KERNEL_IMAGE, ASSERT, INVALIDATED = 2, 209, 710, 901  # cudaError_t


@dataclass(frozen=True)
class Build:
    flags: tuple[str, ...] = ("-O1",)
    driver: str = "driver.cpp"
    program: bool = False  # instead of a library for ctypes

    def compile(self, csrc: Path = CSRC, folder: Path = KEPT) -> Path:
        objects = [self._object(csrc / name, csrc) for name in UNDER_TEST]
        objects += [self._object(FOLDER / name, csrc) for name in (*MACHINE, self.driver)]
        kind = [] if self.program else ["-shared"]
        command = [compiler() or "", *kind, "-pthread", *self.flags, *map(str, objects)]
        return compile_once(command, "host" if self.program else "host.so", [], folder)

    def _object(self, source: Path, csrc: Path) -> Path:
        """One for all copies of a source that are alike and include the same."""
        includes = [FOLDER, STANDIN, csrc]
        # Small blocks and chunks: little data then has many of both.
        sizes = ["-DOVERFLOWSTAT_CUDA_THREADS=32", "-DOVERFLOWSTAT_CUDA_CHUNK_BYTES=1024"]
        options = [*COMMON_FLAGS, *self.flags, *sizes, "-DOVERFLOWSTAT_CUDA_LANE_BITS=32", "-fPIC"]
        search = [part for folder in includes for part in ("-I", str(folder))]
        command = [compiler() or "", *options, *search, "-c", "-x", "c++", str(source)]
        return compile_once(command, f"{source.stem}.o", included_by(source, includes), identity=options)


def included_by(source: Path, folders: Sequence[Path]) -> set[Path]:
    """The source and every file of ours that it includes."""
    found, waiting = set[Path](), [source]
    while waiting:
        path = waiting.pop().resolve()
        if path in found:
            continue
        found.add(path)
        for name in re.findall(r'#include ["<]([^">]+)[">]', path.read_text()):
            candidates = [folder / name for folder in (path.parent, *folders)]
            waiting += [candidate for candidate in candidates if candidate.exists()][:1]
    return found


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("format", ctypes.c_uint32),
        ("rank", ctypes.c_int64),
        ("sizes", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
    ]


class Stream(NamedTuple):
    device: int
    id: int  # 0: the default stream


class Launch(NamedTuple):
    """A launch of one of our kernels, addresses as numbers."""

    device: int
    stream: int
    capture: int  # 0 if it was not captured
    tensors: int  # of a list, 0 for a strided one
    table: int  # 0 if the list travels in the arguments
    workspace: int
    rows: int
    stamp: int


class Replays(NamedTuple):
    completed: int
    over: bool
    failure: str


class FakeCuda:
    """A machine with four devices, see cuda_host/machine.h, and the recorder of csrc/cuda on it."""

    def __init__(self, library: Path) -> None:
        self._decoder = RowDecoder(library)
        self.library = self._decoder.library
        pointer, long = ctypes.c_void_p, ctypes.c_long
        results: dict[type, list[str]] = {
            ctypes.c_char_p: ["get_text", "machine_counts", "machine_faults", "graph_nodes", "reading_rows"],
            long: ["machine_launches", "machine_bytes", "machine_waiting", "machine_run_turns", "reading_replays"],
            ctypes.c_uint64: ["current_capture"],
            pointer: ["recorder_new", "recorder_launch"],
        }
        results[long] += ["pooled_stream", "current_stream"]
        for result, names in results.items():
            for name in names:
                getattr(self.library, name).restype = result
        arguments: dict[str, list[type]] = {
            "machine_launch": [long, pointer],
            "machine_fail_call": [ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
            "machine_assert_after": [ctypes.c_int, long],
            "machine_waiting": [ctypes.c_int, long],
            "machine_run": [ctypes.c_int, long, long],
            "machine_run_turns": [long],
            "set_current_stream": [ctypes.c_int, long],
            "stream_wait_for": [ctypes.c_int, long, ctypes.c_int, long],
            "capture_begin": [ctypes.c_int, long, ctypes.c_int],
            "capture_end": [ctypes.c_int, long, pointer],
            "graph_replay": [ctypes.c_int, ctypes.c_int, long],
            "recorder_new": [long, ctypes.c_double],
            "recorder_launch": [pointer, pointer, long, ctypes.c_int],
            "recorder_delete": [pointer],
            "reading_delete": [pointer],
            "reading_ready": [pointer],
            "reading_rows": [pointer, ctypes.c_double, pointer, pointer, long, ctypes.c_int],
            "reading_replays": [pointer, ctypes.c_double, pointer],
        }
        for name, types in arguments.items():
            getattr(self.library, name).argtypes = types
        self._memory: list[object] = []  # what devices may still read
        self._blocking = 64  # streams up to this one are torch's, or have been given out

    def reset(self, order: int = 0) -> None:
        """All work done, graphs gone. `order` is the seed of the order in which streams take turns from now on."""
        self.library.machine_reset(order)
        self._memory.clear()

    # what was done

    def counts(self) -> Counter[str]:
        """Calls of the runtime, and allocations by torch, since this was called last."""
        lines = self.library.machine_counts().decode().splitlines()
        self.library.machine_clear_counts()
        return Counter({name: int(count) for count, name in (line.split(" ", 1) for line in lines)})

    def launches(self) -> list[Launch]:
        """Since counts() was called last."""
        fields = (ctypes.c_uint64 * len(Launch._fields))()
        found = []
        for i in range(self.library.machine_launches()):
            self.library.machine_launch(i, fields)
            found.append(Launch(*fields))
        return found

    def faults(self) -> list[str]:
        return list(self.library.machine_faults().decode().splitlines())

    def bytes_of_pinned_memory(self) -> int:
        return int(self.library.machine_bytes(-1))

    def bytes_of_device_memory(self, device: int = 0) -> int:
        return int(self.library.machine_bytes(device))

    # what goes wrong

    def fail_call(self, name: str, error: int, skip: int = 0) -> None:
        """The next call of this name, after so many others, returns an error."""
        self.library.machine_fail_call(name.encode(), skip, error)

    def assert_after(self, kernels: int, device: int = 0) -> None:
        self.library.machine_assert_after(device, kernels)

    # letting devices work

    def run(self, stream: Stream | None = None, most: int = 1 << 40) -> None:
        """The work of all streams, or of one, at most so many operations."""
        if stream is None:
            self.library.machine_run_turns(most)
        else:
            self.library.machine_run(*stream, most)

    def waiting(self, stream: Stream) -> int:
        return int(self.library.machine_waiting(*stream))

    def turns_a_query(self, turns: int) -> None:
        """How much devices do whenever a stream is queried; 1 if not set."""
        self.library.machine_turns_a_query(turns)

    @contextmanager
    def running(self, workers: int = 2) -> Iterator[None]:
        self.library.machine_start_workers(workers)
        try:
            yield
        finally:
            self.library.machine_stop_workers()

    # what a user of torch does

    @property
    def device(self) -> int:
        return int(self.library.get_device())

    @device.setter
    def device(self, device: int) -> None:
        self.library.set_device(device)

    def new_stream(self, device: int = 0) -> Stream:
        return Stream(device, self.library.pooled_stream(device))

    def new_blocking_stream(self, device: int = 0) -> Stream:
        """Not one of torch's: the default stream waits for it, and cannot be used while it is captured."""
        self._blocking += 1
        return Stream(device, self._blocking)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.library.current_stream(stream.device)
        self.library.set_current_stream(*stream)
        try:
            yield
        finally:
            self.library.set_current_stream(stream.device, before)

    def wait_for(self, waiter: Stream, other: Stream) -> None:
        """Events: what the first is given from now on comes after what the other has."""
        self.library.stream_wait_for(*waiter, *other)

    @contextmanager
    def capturing(self, stream: Stream, mode: int = GLOBAL) -> Iterator[Graph]:
        """Of the graph that there will be. The stream is current meanwhile."""
        graph = Graph(self)
        assert self.library.capture_begin(*stream, mode) == 0
        with self.on(stream):
            yield graph
        handle = ctypes.c_int()
        graph.error = self.library.capture_end(*stream, ctypes.byref(handle))
        graph.handle = handle.value

    def current_capture(self) -> int:
        return int(self.library.current_capture())

    def recorder(self, rows: int = 4096, limit: float = 20.0) -> FakeRecorder:
        """With a ring of so many rows, whose waits last so many seconds at most."""
        return FakeRecorder(self, self.library.recorder_new(rows, limit))


class Graph:
    def __init__(self, machine: FakeCuda) -> None:
        self._machine = machine
        self.handle = 0
        self.error = 0

    def replay(self, stream: Stream) -> None:
        assert self._machine.library.graph_replay(self.handle, *stream) == 0

    def nodes(self) -> list[str]:
        return list(self._machine.library.graph_nodes(self.handle).decode().splitlines())

    def destroy(self) -> None:
        self._machine.library.graph_destroy(self.handle)


class FakeRecorder:
    def __init__(self, machine: FakeCuda, handle: int) -> None:
        self._machine = machine
        self._handle = handle

    def launch(
        self, tensors: Sequence[torch.Tensor], devices: Sequence[int] | int = 0, detail: bool = False
    ) -> FakeReading:
        """Each as if it were on its device. Raises RuntimeError with the text of the C++ exception."""
        of_each = [devices] * len(tensors) if isinstance(devices, int) else devices
        described = (_Tensor * len(tensors))()
        for place, tensor, device in zip(described, tensors, of_each, strict=True):
            sizes = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
            strides = (ctypes.c_int64 * tensor.dim())(*tensor.stride())
            self._machine._memory += [tensor, sizes, strides]
            address = [ctypes.addressof(sizes), ctypes.addressof(strides)]
            data = tensor.data_ptr() if tensor.numel() else None
            place.data, place.device, place.format, place.rank = data, device, FORMATS[tensor.dtype], tensor.dim()
            place.sizes, place.strides = address
        handle = self._machine.library.recorder_launch(self._handle, described, len(tensors), detail)
        if not handle:
            raise RuntimeError(self._machine.library.get_text().decode())
        return FakeReading(self._machine, handle, list(tensors), detail)

    def close(self) -> None:
        self._machine.library.recorder_delete(self._handle)


class FakeReading:
    """A `Reading` of csrc/reading.h."""

    def __init__(self, machine: FakeCuda, handle: int, tensors: list[torch.Tensor], detail: bool) -> None:
        self._machine = machine
        self._detail = detail
        self._handle: int | None = handle
        self._tensors = tensors

    def ready(self) -> bool:
        return bool(self._machine.library.reading_ready(self._handle))

    def raw_rows(self, limit: float = 20.0, one_by_one: bool = False) -> tuple[list[Row], list[str]]:
        """The rows, and why each is missing, "" where it is not. Raises RuntimeError if the C++ code throws."""
        rows, _, missing = self._raw(limit, one_by_one)
        return rows, missing

    def _raw(self, limit: float, one_by_one: bool) -> tuple[list[Row], list[Detail], list[str]]:
        rows, details = (Row * len(self._tensors))(), (Detail * len(self._tensors))()
        missing = self._machine.library.reading_rows(self._handle, limit, rows, details, len(rows), one_by_one)
        if missing is None:
            raise RuntimeError(self._machine.library.get_text().decode())
        return list(rows), list(details), missing.decode().split("\n")[:-1]

    def rows(self, limit: float = 20.0, one_by_one: bool = False) -> list[ExpectedRow | str]:
        """What each tensor's row says, with its detail if that was launched, or why there is none."""
        values: list[ExpectedRow | str] = []
        for tensor, row, detail, reason in zip(self._tensors, *self._raw(limit, one_by_one), strict=True):
            repeat = tensor.numel() // row.numel if row.numel else 1
            found = self._machine._decoder.values(tensor, row, repeat, detail if self._detail else None)
            values.append(reason or found)
        return values

    def replays(self, limit: float = 20.0) -> Replays | None:
        over = ctypes.c_int()
        count = self._machine.library.reading_replays(self._handle, limit, ctypes.byref(over))
        failure = self._machine.library.get_text().decode()
        return None if count < 0 else Replays(count, bool(over), failure)

    def close(self) -> None:
        if self._handle is not None:
            self._machine.library.reading_delete(self._handle)
            self._handle = None

    __del__ = close


def changed(tree: Path, changes: Mapping[str, str]) -> Path:
    """A copy of csrc in `tree`, some of its files with another text."""
    for path in CSRC.rglob("*"):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            copy = tree / path.relative_to(CSRC)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(changes.get(str(path.relative_to(CSRC)), path.read_text()))
    return tree

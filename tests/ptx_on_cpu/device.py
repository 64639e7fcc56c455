"""Compiles csrc/cuda to PTX, and launches that by way of the launcher that a CUDA build has."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from compile_once import KEPT, compile_once
from device_on_cpu import CSRC, Build, Detail, DeviceOnCpu, Placed, Row
from expected_rows import ExpectedRow

from overflowstat.building.cuda_toolkit import find_cuda_toolkit
from ptx_on_cpu.machine import Machine, Module, Schedule, lockstep
from ptx_on_cpu.memory import Region

HERE = Path(__file__).parent

CUDA, PROBLEM = find_cuda_toolkit()
FAULT = 719  # cudaErrorLaunchFailure


@dataclass(frozen=True)
class PtxBuild:
    """What is compiled, for one architecture ("9.0"). Small blocks and chunks: little data then has many of both."""

    architecture: str
    threads: int = 64
    chunk_bytes: int = 1024
    flags: tuple[str, ...] = ("-fmad=false",)

    def ptx(self, csrc: Path = CSRC, folder: Path = KEPT) -> str:
        """The text; raises with the compiler's output."""
        assert CUDA is not None, PROBLEM
        command = [CUDA.nvcc, "-std=c++17", "-O3", "-ptx", *self.flags]
        command += [f"-arch=compute_{self.architecture.replace('.', '')}"]
        command += [f"-DOVERFLOWSTAT_CUDA_THREADS={self.threads}"]
        command += [f"-DOVERFLOWSTAT_CUDA_CHUNK_BYTES={self.chunk_bytes}", str(csrc / "cuda" / "reduce.cu")]
        return compile_once(command, "reduce.ptx", [*csrc.rglob("*.h"), *csrc.rglob("*.cu*")], folder).read_text()

    def launcher(self, csrc: Path = CSRC, folder: Path = KEPT) -> Path:
        """The host's side of the same sources, whose launches our cuda_runtime.h hands on."""
        header = hashlib.sha256((HERE / "cuda_runtime.h").read_bytes()).hexdigest()[:24]
        flags = ("-O0", "-I", str(HERE), f"-DPTX_ON_CPU_HEADER={header}")  # the header is one of the build's sources
        return Build(threads=self.threads, chunk_bytes=self.chunk_bytes, flags=flags).compile(csrc, folder)


class _Argument(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("size", ctypes.c_uint64)]


class _Region(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("size", ctypes.c_uint64), ("writable", ctypes.c_uint64)]


class _Launch(ctypes.Structure):
    """Launch of cuda_runtime.h."""

    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("blocks", ctypes.c_uint64),
        ("threads", ctypes.c_uint64),
        ("arguments", ctypes.POINTER(_Argument)),
        ("argument_count", ctypes.c_uint64),
        ("regions", ctypes.POINTER(_Region)),
        ("region_count", ctypes.c_uint64),
    ]


_RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Launch))


class DeviceFromPtx(DeviceOnCpu):
    """A device of `multiprocessors`, each of which runs one block of what nvcc compiled. Its faults are raised."""

    def __init__(self, launcher: Path, module: Module, schedule: Callable[[], Schedule] = lambda: lockstep) -> None:
        super().__init__(launcher)
        self.module = module
        self.schedule = schedule
        self.fault: Exception | None = None
        self._run = _RUN(self.run)  # lives as long as the library may call it
        self.library.set_run(self._run)

    def run(self, pointer: ctypes._Pointer[_Launch]) -> int:
        """Called by the launcher, which an exception cannot pass through."""
        try:
            launch = pointer.contents
            regions = [launch.regions[i] for i in range(launch.region_count)]
            arguments = [launch.arguments[i] for i in range(launch.argument_count)]
            memory = [Region(region.address, region.size, bool(region.writable)) for region in regions]
            machine = Machine(self.module, launch.blocks, launch.threads, memory)
            content = [ctypes.string_at(argument.address, argument.size) for argument in arguments]
            machine.launch(launch.kernel.decode(), content, self.schedule())
        except Exception as error:
            self.fault = error
            return FAULT
        return 0

    @contextmanager
    def raising(self) -> Iterator[None]:
        """The fault itself, in place of the error code that the launcher made of it."""
        self.library.set_run(self._run)  # another device may share the library
        self.fault = None
        try:
            yield
        except AssertionError:
            if self.fault is not None:
                raise self.fault from None
            raise

    def raw_rows(
        self, tensors: Sequence[torch.Tensor | Placed], details: ctypes.Array[Detail] | None = None
    ) -> ctypes.Array[Row]:
        with self.raising():
            return super().raw_rows(tensors, details)

    def strided_row(self, tensor: torch.Tensor, address: int | None = None, detail: bool = False) -> ExpectedRow:
        with self.raising():
            return super().strided_row(tensor, address, detail)

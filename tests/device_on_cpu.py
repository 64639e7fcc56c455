"""Runs csrc/cuda on the CPU: g++ compiles what nvcc compiles, with tests/cuda_on_cpu in place of CUDA's headers."""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from compile_once import KEPT, compile_once
from expected_rows import DetailedRow, ExpectedRow, coordinates

TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc"
STANDIN = TESTS / "cuda_on_cpu"

# In the order of `enum class Format` in number_format.h.
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex128,
    torch.complex64,
    torch.complex32,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]
FORMATS = {dtype: number for number, dtype in enumerate(DTYPES)}

COMMON_FLAGS = ["-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-pthread"]
# nvcc is told the same: a fused multiply-add would round a complex modulus otherwise than the CPU does.
COMMON_FLAGS += ["-ffp-contract=off"]


def compiler() -> str | None:
    return shutil.which("g++")


@dataclass(frozen=True)
class Build:
    """How the device code is compiled. Small blocks and chunks: little data then has many of both."""

    threads: int = 64
    chunk_bytes: int = 1024
    lane_bits: int = 32  # 16 as from compute capability 9.0 on
    flags: tuple[str, ...] = ("-O1",)
    program: bool = False  # the program replay instead of a library for ctypes

    def compile(self, csrc: Path = CSRC, folder: Path = KEPT) -> Path:
        cxx = compiler()
        assert cxx is not None, "no C++ compiler"
        source = STANDIN / ("replay.cpp" if self.program else "driver.cpp")
        command = [cxx, *COMMON_FLAGS, *self.flags]
        # Unique symbols would make libraries of different block sizes share one "shared memory" in this process.
        command += [] if self.program else ["-shared", "-fPIC", "-fno-gnu-unique"]
        command += [
            f"-DOVERFLOWSTAT_CUDA_THREADS={self.threads}",
            f"-DOVERFLOWSTAT_CUDA_CHUNK_BYTES={self.chunk_bytes}",
            f"-DOVERFLOWSTAT_CUDA_LANE_BITS={self.lane_bits}",
        ]
        command += ["-I", str(STANDIN), "-I", str(csrc), str(source)]
        sources = [*csrc.rglob("*.h"), *csrc.rglob("*.cu*"), *STANDIN.iterdir()]
        return compile_once(command, "replay" if self.program else "device.so", sources, folder)


class Row(ctypes.Structure):
    """StatsRow of csrc/stats_row.h."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("abs_min", "finite_abs_max", "nan_count", "posinf_count", "neginf_count", "first_bad", "numel")
    ]
    abs_min: int
    finite_abs_max: int
    nan_count: int
    posinf_count: int
    neginf_count: int
    first_bad: int
    numel: int


class Detail(ctypes.Structure):
    """Detail of csrc/stats_row.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("abs_min_nonzero", "zero_count", "subnormal_count")]
    abs_min_nonzero: int
    zero_count: int
    subnormal_count: int


@dataclass(frozen=True)
class Placed:
    """The elements of a tensor, contiguous in memory order, at an address of our choice."""

    tensor: torch.Tensor
    address: int
    keep: object


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in logical order, as they lie in a contiguous tensor."""
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def place(tensor: torch.Tensor, offset: int) -> Placed:
    """Copies a contiguous tensor to `offset` bytes past an address that is a multiple of 64."""
    assert tensor.is_contiguous()
    content = bytes_of(tensor)
    buffer = ctypes.create_string_buffer(len(content) + offset + 64)
    address = ctypes.addressof(buffer)
    address += -address % 64 + offset
    ctypes.memmove(address, content, len(content))
    return Placed(tensor, address, buffer)


class RowDecoder:
    """What the rows of a library are worth that has tests/cuda_on_cpu/decoding.h."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.key_value.restype = ctypes.c_double
        self.library.key_value.argtypes = [ctypes.c_uint32, ctypes.c_uint64]

    def values(self, tensor: torch.Tensor, row: Row, repeat: int = 1, detail: Detail | None = None) -> ExpectedRow:
        """What a row, and perhaps its detail, says of a tensor that shows each of its elements `repeat` times."""
        number = FORMATS[tensor.dtype]
        is_integer = not tensor.is_floating_point() and not tensor.is_complex()

        def magnitude(key: int) -> int | float:
            return key if is_integer else float(self.library.key_value(number, key))

        has_magnitude = self.library.row_has_magnitude(number, ctypes.byref(row))
        has_finite = self.library.row_has_finite(number, ctypes.byref(row))
        finite_abs_max = magnitude(row.finite_abs_max) if has_finite else math.nan
        found = ExpectedRow(
            abs_min=magnitude(row.abs_min) if has_magnitude else math.nan,
            abs_max=math.inf if row.posinf_count + row.neginf_count else finite_abs_max,
            finite_abs_max=finite_abs_max,
            nan_count=row.nan_count * repeat,
            posinf_count=row.posinf_count * repeat,
            neginf_count=row.neginf_count * repeat,
            first_bad=None if row.first_bad == 2**64 - 1 else coordinates(tensor, row.first_bad),
            numel=row.numel * repeat,
        )
        if detail is None:
            return found
        has_nonzero = self.library.row_has_nonzero(number, ctypes.byref(row), ctypes.byref(detail))
        return DetailedRow(
            **found,
            zero_count=detail.zero_count * repeat,
            subnormal_count=detail.subnormal_count * repeat,
            abs_min_nonzero=magnitude(detail.abs_min_nonzero) if has_nonzero else math.nan,
        )


class DeviceOnCpu(RowDecoder):
    """The launcher and kernels, on a device of `multiprocessors`, each of which runs one block."""

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self.library.bytes_per_element.restype = ctypes.c_int64
        self.library.count_chunks.restype = ctypes.c_uint64
        self.library.count_chunks.argtypes = [ctypes.c_uint32, ctypes.c_uint64]
        self.library.strided_offset.restype = ctypes.c_int64
        self.library.strided_offset.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_uint64]
        self.library.run_dense.argtypes = [ctypes.c_uint64, *[ctypes.c_void_p] * 5]
        self.library.run_strided.argtypes = [
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_int64,
            *[ctypes.c_void_p] * 5,
        ]
        self.set_machine()

    def set_machine(self, multiprocessors: int = 3, lane_order: int = 0, workers: int = 1) -> None:
        """lane_order: 0 rising, 1 falling, above that the seed of a shuffle. workers: blocks that run at once."""
        self.library.set_machine(multiprocessors - 1, lane_order, workers)

    def raw_rows(
        self, tensors: Sequence[torch.Tensor | Placed], details: ctypes.Array[Detail] | None = None
    ) -> ctypes.Array[Row]:
        """One dense launch, with detail if there is something to put that in; raises if it fails or the driver finds
        a Fault.

        That is a workspace other than all zero, a row without the launch's stamp or stamped before the host could see
        it, or a row written that is not the launch's.
        """
        count = len(tensors)
        data = (ctypes.c_void_p * count)()
        formats = (ctypes.c_uint32 * count)()
        numels = (ctypes.c_uint64 * count)()
        for i, tensor in enumerate(tensors):
            data[i] = tensor.address if isinstance(tensor, Placed) else tensor.data_ptr()
            plain = tensor.tensor if isinstance(tensor, Placed) else tensor
            formats[i], numels[i] = FORMATS[plain.dtype], plain.numel()
        rows = (Row * count)()
        error = self.library.run_dense(count, data, formats, numels, rows, details)
        assert error == 0, f"launch_dense: {error}"
        return rows

    def rows(self, tensors: Sequence[torch.Tensor | Placed]) -> list[ExpectedRow]:
        rows = self.raw_rows(tensors)
        plain = [tensor.tensor if isinstance(tensor, Placed) else tensor for tensor in tensors]
        return [self.values(tensor, row) for tensor, row in zip(plain, rows, strict=True)]

    def detailed_rows(self, tensors: Sequence[torch.Tensor | Placed]) -> list[ExpectedRow]:
        details = (Detail * len(tensors))()
        rows = self.raw_rows(tensors, details)
        plain = [tensor.tensor if isinstance(tensor, Placed) else tensor for tensor in tensors]
        return [self.values(tensor, row, 1, detail) for tensor, row, detail in zip(plain, rows, details, strict=True)]

    def strided_row(self, tensor: torch.Tensor, address: int | None = None, detail: bool = False) -> ExpectedRow:
        row = Row()
        found = Detail() if detail else None
        repeat = ctypes.c_int64()
        rank = tensor.dim()
        sizes = (ctypes.c_int64 * rank)(*tensor.shape)
        strides = (ctypes.c_int64 * rank)(*tensor.stride())
        error = self.library.run_strided(
            tensor.data_ptr() if address is None else address,
            FORMATS[tensor.dtype],
            rank,
            sizes,
            strides,
            ctypes.byref(row),
            None if found is None else ctypes.byref(found),
            ctypes.byref(repeat),
        )
        assert error == 0, f"launch_strided: {error}"
        return self.values(tensor, row, repeat.value, found)


def same(a: ExpectedRow, b: ExpectedRow) -> bool:
    """Equal in value and in kind (int or float), NaN as equal to NaN."""
    return repr(a) == repr(b)

"""What nvcc made of csrc/cuda, run on the CPU with every access checked, against rows computed by value.

Where g++ runs the source (test_cuda_on_cpu.py) an intrinsic means what our stand-in for CUDA's header says; here it
means what nvcc says.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from device_on_cpu import DTYPES, Placed, compiler, place, same
from expected_rows import expected_row
from ptx_on_cpu.device import CUDA, PROBLEM, DeviceFromPtx, PtxBuild
from ptx_on_cpu.fences import check_stamps_follow_fences
from ptx_on_cpu.machine import Module, RandomWarps
from special_tensors import NOT_FINITE, code_type, from_codes, part, strided_views, with_bad

pytestmark = [
    pytest.mark.skipif(CUDA is None, reason=f"nvcc is needed, and {PROBLEM}"),
    pytest.mark.skipif(compiler() is None, reason="the launcher needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

ALWAYS = ["8.0", "9.0"]
WHEN_SLOW = ["7.5", "8.6", "10.0", "12.0"]
ALL_ARCHITECTURES = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in WHEN_SLOW)]
VECTOR = 16  # bytes


@functools.cache
def compiled(build: PtxBuild) -> tuple[Path, Module]:
    return build.launcher(), Module(build.ptx())


def device_for(build: PtxBuild) -> DeviceFromPtx:
    assert CUDA is not None
    if build.architecture not in CUDA.architectures:
        pytest.skip(f"nvcc {CUDA.version} does not compile for {build.architecture}")
    return DeviceFromPtx(*compiled(build))


@pytest.fixture(params=ALL_ARCHITECTURES)
def device(request: pytest.FixtureRequest) -> DeviceFromPtx:
    return device_for(PtxBuild(request.param))


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check(device: DeviceFromPtx, tensors: Sequence[torch.Tensor | Placed]) -> None:
    for tensor, row in zip(tensors, device.rows(tensors), strict=True):
        plain = tensor.tensor if isinstance(tensor, Placed) else tensor
        where = f" at {tensor.address % 64}" if isinstance(tensor, Placed) else ""
        expected = expected_row(plain)
        assert same(row, expected), f"{plain.dtype} {tuple(plain.shape)}{where}: {row} instead of {expected}"


def check_strided(device: DeviceFromPtx, tensor: torch.Tensor) -> None:
    row, expected = device.strided_row(tensor), expected_row(tensor)
    assert same(row, expected), f"{tensor.dtype} {tensor.shape} {tensor.stride()}: {row} instead of {expected}"


# ---- every format


def lengths(dtype: torch.dtype) -> list[int]:
    """None, a few, around whole vectors, and around the edges of chunks of 1024 bytes."""
    chunk = 1024 // dtype.itemsize
    return [0, 1, 2, 7, 15, 16, 17, 31, 33, chunk - 1, chunk, chunk + 1, 2 * chunk + 3]


def hard_tensors(dtype: torch.dtype, rng: np.random.Generator) -> list[Placed]:
    """Every length at three alignments: of a vector, of an element but no vector, of neither. Not finite are, in turn,
    nothing, one element, the first and the last, and all."""
    tensors: list[Placed] = []
    for offset in (0, dtype.itemsize % VECTOR, 3):
        for count in lengths(dtype):
            bad = [[], [count // 2], [0, count - 1], list(range(count))][len(tensors) % 4]
            tensors.append(place(with_bad(dtype, count, bad, rng), offset))
    return tensors


def test_every_length_and_alignment_of_every_format(device: DeviceFromPtx) -> None:
    rng = np.random.default_rng(0)
    device.set_machine(multiprocessors=12)
    for dtype in DTYPES:
        check(device, hard_tensors(dtype, rng))


@functools.cache
def special_codes(dtype: torch.dtype) -> np.ndarray:
    """Zeros, subnormals, extremes, infinities and NaN, each with either sign; every code of formats of 8 bits."""
    bits = 8 * part(dtype).itemsize
    if bits == 8:
        return np.arange(256, dtype=np.uint8)
    sign = 1 << (bits - 1)
    codes = [0, 1, 2, 3, sign - 1, sign, sign + 1, sign + 2, 2 * sign - 1]
    for code in NOT_FINITE.get(part(dtype), []):
        codes += [code, code ^ sign, code - 1]
    return np.array(codes, dtype=code_type(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_special_values_alone_and_in_a_vector_among_others(device: DeviceFromPtx, dtype: torch.dtype) -> None:
    """Alone it is read as an element; among others, at each place in turn, as a part of a vector."""
    device.set_machine(multiprocessors=64)
    parts = dtype.itemsize // part(dtype).itemsize
    neutral = torch.tensor([3.0, 2.0]).repeat(16).to(part(dtype)).view(torch.uint8).numpy()[: 2 * VECTOR]
    tensors: list[Placed] = []
    for i, code in enumerate(special_codes(dtype)):
        vector = neutral.view(code_type(dtype)).copy()
        vector[i % len(vector)] = code
        tensors += [place(from_codes(codes, dtype), 0) for codes in (np.full(parts, code), vector)]
    check(device, tensors)


# ---- lists


def mixed_list(rng: np.random.Generator, count: int) -> list[Placed]:
    """Tensors of all formats in turn, half of them empty or tiny."""
    sizes = [0, 0, 1, 5, 40, 300]
    return [
        place(with_bad(DTYPES[i % len(DTYPES)], size, [size // 2], rng), int(rng.integers(VECTOR)))
        for i, size in enumerate(rng.choice(sizes, count))
    ]


@pytest.mark.parametrize("count", [0, 1, 33, 64, 65, 150])
def test_mixed_lists_in_the_arguments_and_in_a_table(device: DeviceFromPtx, count: int) -> None:
    """Up to 64 tensors travel in the arguments, more are a table in memory."""
    rng = np.random.default_rng(count)
    device.set_machine(multiprocessors=7)
    tensors: list[torch.Tensor | Placed] = [torch.empty(0), *mixed_list(rng, count)]
    check(device, tensors[:count])


@pytest.mark.parametrize("multiprocessors", [1, 16])
def test_counts_are_exact_whether_one_block_reads_a_tensor_or_many(device: DeviceFromPtx, multiprocessors: int) -> None:
    rng = np.random.default_rng(4)
    bad = [int(position) for position in rng.integers(0, 20_001, 300)]
    device.set_machine(multiprocessors)
    check(device, [with_bad(torch.float16, 20_001, bad, rng)])


# ---- strided tensors


def test_strided_tensors_of_every_format(device: DeviceFromPtx) -> None:
    device.set_machine(multiprocessors=5)
    for dtype in DTYPES:
        views = strided_views(dtype)
        for view in ("permuted and sliced", "expanded", "overlapping", "scalar", "empty"):
            check_strided(device, views[view])


# ---- any order of warps


def check_all_kinds(device: DeviceFromPtx) -> None:
    """Several tensors of a format in one list, for what a block leaves behind from one to the next."""
    rng = np.random.default_rng(7)
    device.set_machine(multiprocessors=3)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        chunk = 1024 // dtype.itemsize
        tensors = [with_bad(dtype, count, [0, count - 1], rng) for count in (2 * chunk + 5, chunk - 3, 3 * chunk + 77)]
        check(device, [place(tensor, dtype.itemsize) for tensor in tensors])
    check_strided(device, with_bad(torch.float16, 3000, [5, 2000], rng)[::3])
    check(device, mixed_list(rng, 12))


@pytest.mark.parametrize("seed", range(3))
def test_rows_do_not_depend_on_which_warp_runs_first(device: DeviceFromPtx, seed: int) -> None:
    device.schedule = lambda: RandomWarps(seed)
    check_all_kinds(device)


# ---- as it is shipped


SHIPPED = PtxBuild("9.0", threads=256, chunk_bytes=65536)


def test_blocks_and_chunks_as_a_cuda_build_has_them() -> None:
    device = device_for(SHIPPED)
    device.set_machine(multiprocessors=5)
    rng = np.random.default_rng(3)
    for dtype in DTYPES:
        chunk = 65536 // dtype.itemsize
        tensors = [with_bad(dtype, count, [0, chunk - 1, chunk, count - 1], rng) for count in (3, chunk + 5, 2 * chunk)]
        check(device, [place(tensor, dtype.itemsize % VECTOR) for tensor in tensors])
    check_strided(device, with_bad(torch.bfloat16, 9000, [0, 4500], rng).view(90, 100)[:, ::3])


# ---- what the host may see


ROW_BYTES = 7 * 8


def check_fences(of: Module) -> None:
    kernels = [function for function in of.program.functions.values() if function.is_kernel]
    for expected in ("dense_kernel", "strided_kernel"):
        assert any(expected in kernel.name for kernel in kernels), expected
    for kernel in kernels:
        rows, stamp = len(kernel.parameters) - 2, len(kernel.parameters) - 1
        row_bytes, stamps = check_stamps_follow_fences(of.program, kernel.name, rows, stamp)
        assert stamps > 0 and row_bytes == ROW_BYTES * stamps, f"{kernel.name}: {row_bytes} bytes, {stamps} stamps"


def test_a_fence_for_the_host_stands_between_a_row_and_its_stamp(device: DeviceFromPtx) -> None:
    check_fences(device.module)


def test_a_fence_for_the_host_stands_there_in_what_is_shipped() -> None:
    check_fences(device_for(SHIPPED).module)

"""What nvcc made of csrc/cuda, run on the CPU with every access checked, against rows computed by value.

Where g++ runs the source (test_cuda_on_cpu.py) an intrinsic means what our stand-in for CUDA's header says; here it
means what nvcc says.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from device_on_cpu import CSRC, DTYPES, Placed, compiler, place, same
from expected_rows import detailed_row, expected_row, without_detail
from ptx_on_cpu.device import CUDA, PROBLEM, DeviceFromPtx, PtxBuild
from ptx_on_cpu.fences import check_stamps_follow_fences
from ptx_on_cpu.machine import Module, RandomWarps
from ptx_on_cpu.program import PtxError
from special_tensors import NOT_FINITE, code_type, from_codes, part, strided_views, with_bad

pytestmark = [
    pytest.mark.any_torch,
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
    """Without detail and with it."""
    for tensor, row, detailed in zip(tensors, device.rows(tensors), device.detailed_rows(tensors), strict=True):
        plain = tensor.tensor if isinstance(tensor, Placed) else tensor
        where = f" at {tensor.address % 64}" if isinstance(tensor, Placed) else ""
        expected = detailed_row(plain)
        for found, wanted in ((detailed, expected), (row, without_detail(expected))):
            assert same(found, wanted), f"{plain.dtype} {tuple(plain.shape)}{where}: {found} instead of {wanted}"


def check_strided(device: DeviceFromPtx, tensor: torch.Tensor) -> None:
    expected = detailed_row(tensor)
    for detail, wanted in ((True, expected), (False, without_detail(expected))):
        found = device.strided_row(tensor, detail=detail)
        assert same(found, wanted), f"{tensor.dtype} {tensor.shape} {tensor.stride()}: {found} instead of {wanted}"


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


def test_a_strided_tensor_may_lie_at_any_address(device: DeviceFromPtx) -> None:
    rng = np.random.default_rng(6)
    for dtype in (torch.float64, torch.bfloat16, torch.complex128, torch.float8_e5m2):
        base = with_bad(dtype, 200, [40, 41, 160], rng)
        view = base.view(10, 20)[:, ::2]
        for offset in (1, 8):
            placed = place(base, offset)
            assert same(device.strided_row(view, placed.address), expected_row(view)), (dtype, offset)


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
    device.set_machine(multiprocessors=1)
    check(device, [with_bad(torch.float32, count, [count // 2], rng) for count in (70, 300, 5, 70, 128, 200, 90, 33)])
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
    for expected in ("dense_kernel", "strided_kernel", "dense_detail", "strided_detail"):
        assert any(expected in kernel.name for kernel in kernels), expected
    for kernel in kernels:
        slots = 2 if "_detail" in kernel.name else 1
        row_bytes, stamps = check_stamps_follow_fences(of.program, kernel.name, rows=len(kernel.parameters) - 2)
        # The next one and a given one.
        assert (stamps, row_bytes) == (2 * slots, ROW_BYTES * slots), (
            f"{kernel.name}: {row_bytes} bytes, {stamps} stamps"
        )


def test_a_fence_for_the_host_stands_between_a_row_and_its_stamp(device: DeviceFromPtx) -> None:
    check_fences(device.module)


def test_a_fence_for_the_host_stands_there_in_what_is_shipped() -> None:
    check_fences(device_for(SHIPPED).module)


# ---- broken versions of the source, each of which has to be caught


@dataclass(frozen=True)
class Mutant:
    what: str
    caught_by: str  # "text", "lockstep" or "random warps"
    seen: str  # what is said of it
    old: str
    new: str


# By a header that took the selector for PRMT's, the sign of the low byte, 4 times.
MISREADING = """
#ifdef __CUDA_ARCH__
      if constexpr (sizeof(Integer) == 1) {
        const uint32_t signs = __byte_perm(static_cast<uint32_t>(bits), 0, 0x8888);
        return static_cast<Key>((bits ^ signs) + (signs & 1));
      }
#endif
      return x < 0 ? static_cast<Key>(0u - bits) : bits;
"""

MUTANTS = [
    Mutant(
        "no barrier before the warps' parts are read",
        "random warps",
        "shared memory is read before it was written|instead of",
        "  __syncthreads();\n  if (threadIdx.x == 0) {\n    for",
        "  if (threadIdx.x == 0) {\n    for",
    ),
    Mutant(
        "no barrier before the next tensor",
        "random warps",
        "instead of",
        "  __syncthreads();  // of_warp is free for the next tensor\n",
        "",
    ),
    Mutant(
        "no barrier before the ticket is read",
        "random warps",
        "shared memory is read before it was written",
        "  __syncthreads();\n  return last;",
        "  return last;",
    ),
    Mutant(
        "a barrier that not all threads come to",
        "lockstep",
        "wait for others that never come",
        "  __syncthreads();\n  return last;",
        "  if (threadIdx.x < 40) __syncthreads();\n  return last;",
    ),
    Mutant(
        "a collective that not all lanes come to",
        "lockstep",
        "wait for others that never come",
        "__any_sync(kAllLanes, partial.not_first_bad != 0);",
        "threadIdx.x % kWarpSize == 3 || __any_sync(kAllLanes, partial.not_first_bad != 0);",
    ),
    Mutant(
        "loads past the last vector",
        "lockstep",
        "16 bytes outside of the memory",
        "kPastLast ? smaller(at, count - 1) : at",
        "at",
    ),
    Mutant(
        "one element beyond the tail",
        "lockstep",
        "outside of the memory",
        "head + (last - tail_index));",
        "head + (last - tail_index) + 1);",
    ),
    Mutant(
        "vectors from an unaligned start",
        "lockstep",
        "no multiple of 16",
        "(kVectorBytes - past_vector) % kVectorBytes;",
        "past_vector * 0;",
    ),
    Mutant(
        "elements at any address taken for aligned ones",
        "lockstep",
        "no multiple of",
        "% alignof(Element) == 0;",
        "% 1 == 0;",
    ),
    Mutant(
        "shared memory one warp short",
        "lockstep",
        "outside of every variable in shared memory",
        "P of_warp[kWarps];",
        "P of_warp[kWarps - 1];",
    ),
    Mutant(
        "a thread's counts that do not start at zero",
        "lockstep",
        "shared memory is read before it was written",
        " Accumulator() : rare(rare_partial()) { rare = Partial{}; }",
        " Accumulator() : rare(rare_partial()) {}",
    ),
    Mutant(
        "a workspace left as it is",
        "lockstep",
        "launch_dense: -1",
        "  *partial = Partial{};\n",
        "",
    ),
    Mutant(
        "a row taken through the cache of constants",
        "lockstep",
        "takes memory for constant which this launch writes",
        "row.nan_count = __ldcg(&partial->nan_count);",
        "row.nan_count = __ldg(&partial->nan_count);",
    ),
    Mutant(
        "a sign taken with __byte_perm, which has no way to ask for one",
        "lockstep",
        "int8.* instead of",
        "      return x < 0 ? static_cast<Key>(0u - bits) : bits;\n",
        MISREADING,
    ),
    Mutant(
        "no fence between a row and its stamp",
        "text",
        "a stamp where its row may be WRITTEN",
        "  __threadfence_system();\n",
        "",
    ),
    Mutant(
        "a fence that the host is no party to",
        "text",
        "a stamp where its row may be WRITTEN",
        "  __threadfence_system();\n",
        "  __threadfence();\n",
    ),
    Mutant(
        "a row written after the fence",
        "text",
        "a stamp where its row may be WRITTEN",
        "  slot->row = row;\n  __threadfence_system();\n",
        "  __threadfence_system();\n  slot->row = row;\n",
    ),
]


def find_fault(device: DeviceFromPtx) -> tuple[str, str] | None:
    """Which check finds something, and what it says."""

    def lockstep_checks() -> None:
        check_all_kinds(device)
        device.set_machine(multiprocessors=12)
        for dtype in (torch.float32, torch.complex64, torch.int8):
            check(device, hard_tensors(dtype, np.random.default_rng(0)))

    def random_checks() -> None:
        for seed in range(5):
            device.schedule = functools.partial(RandomWarps, seed)
            check_all_kinds(device)

    stages = {"text": lambda: check_fences(device.module), "lockstep": lockstep_checks, "random warps": random_checks}
    for stage, run in stages.items():
        try:
            run()
        except (PtxError, AssertionError) as error:
            return stage, str(error)
    return None


@pytest.mark.slow
def test_the_checks_for_broken_code_find_nothing_in_what_is_whole() -> None:
    assert find_fault(device_for(PtxBuild("9.0"))) is None


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_broken_device_code_is_caught(tmp_path: Path, mutant: Mutant) -> None:
    broken = tmp_path / "csrc"
    shutil.copytree(CSRC, broken)
    places = [path for path in broken.rglob("*.*h") for _ in range(path.read_text().count(mutant.old))]
    assert len(places) == 1, f"the code that this mutant breaks has changed: {places}"
    places[0].write_text(places[0].read_text().replace(mutant.old, mutant.new))
    build = PtxBuild("9.0")
    launcher, _ = compiled(build)  # what is broken is never in the host's side
    found = find_fault(DeviceFromPtx(launcher, Module(build.ptx(broken, tmp_path))))
    assert found is not None, f"{mutant.what}: not caught"
    assert found[0] == mutant.caught_by and re.search(mutant.seen, found[1]), found


@pytest.mark.slow
def test_products_and_sums_that_may_be_fused_are_refused(tmp_path: Path) -> None:
    """Fused, they round once in place of twice, and a complex modulus differs from the CPU's."""
    fused = PtxBuild("9.0", flags=("-fmad=true",)).ptx(folder=tmp_path)
    with pytest.raises(PtxError, match=r"none of \('rn',\)"):
        Module(fused)

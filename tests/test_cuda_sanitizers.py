"""The device code on the CPU under the sanitizers, and broken versions of it, each of which a check must catch.

ThreadSanitizer sees each CUDA thread as a thread that only barriers, fences and atomics order; AddressSanitizer and
UBSan see tensors as heap blocks of exactly their size.

The plain build compares rows, and the host looks at them at each fence that orders writes for it: a fence that is
missing or misplaced shows here; what kind of fence it becomes in the PTX does not (test_cuda_ptx.py).
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from device_on_cpu import CSRC, DTYPES, FORMATS, Build, DeviceOnCpu, Row, bytes_of, compiler, same
from expected_rows import expected_row
from special_tensors import strided_views, with_bad

pytestmark = [
    pytest.mark.slow,
    pytest.mark.any_torch,
    pytest.mark.skipif(compiler() is None, reason="running the device code on the CPU needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

# The stand-in tells ThreadSanitizer itself what a fence orders.
BUILDS = {
    "plain": Build(program=True, flags=("-O0",)),  # the rows are the same, and most of the time is g++'s
    "thread": Build(program=True, flags=("-O1", "-fsanitize=thread", "-Wno-tsan")),
    "address": Build(
        program=True,
        flags=("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    ),
}


@pytest.fixture(scope="module")
def decoder() -> DeviceOnCpu:
    """Only for what the keys of a row are worth."""
    return DeviceOnCpu(Build().compile())


@dataclass
class Launch:
    """Dense tensors, each with its offset from an aligned address, or one strided view of a dense tensor."""

    tensors: list[torch.Tensor]
    offsets: list[int] = field(default_factory=list)
    base: torch.Tensor | None = None

    def encode(self) -> bytes:
        words = struct.pack("<q", len(self.tensors))
        for i, tensor in enumerate(self.tensors):
            memory = bytes_of(tensor if self.base is None else self.base)
            start = 0 if self.base is None else tensor.storage_offset() * tensor.element_size()
            used = memory[start:]
            offset = self.offsets[i] if self.offsets else 0
            shape = [tensor.numel()] if self.base is None else [*tensor.shape, *tensor.stride()]
            rank = -1 if self.base is None else tensor.dim()
            words += struct.pack(f"<{4 + len(shape)}q", FORMATS[tensor.dtype], rank, offset, len(used), *shape)
            words += used + bytes(-len(used) % 8)
        return words


def workload() -> list[Launch]:
    """Two tensors of each dtype in one list (with one, a barrier lost between tensors could not show), edges, views."""
    rng = np.random.default_rng(0)
    launches = []
    long: list[torch.Tensor] = []
    for dtype in DTYPES:
        chunk = 1024 // dtype.itemsize
        for count in (2 * chunk + 5, 3 * chunk + 77):
            long.append(with_bad(dtype, count, [0, chunk - 1, chunk, count - 2, count - 1], rng))
    launches.append(Launch(long, [tensor.element_size() % 16 for tensor in long]))
    short = [with_bad(dtype, count, [count - 1], rng) for dtype in DTYPES for count in (0, 1, 7, 70)]
    for shift in (0, 1, 8):
        launches.append(Launch(short, [(tensor.element_size() + shift) % 16 for tensor in short]))
    for count in (64, 65):  # the most that travel in a launch's arguments, and the fewest that do not
        launches.append(Launch([with_bad(torch.float16, 3 + i, [i % 3], rng) for i in range(count)]))
    launches.append(Launch([with_bad(torch.bfloat16, 20_000, list(range(0, 20_000, 97)), rng)], [2]))
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.complex64):
        views = strided_views(dtype)
        for view in ("sliced", "transposed", "expanded", "overlapping", "every third"):
            tensor = views[view]
            base = torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            launches.append(Launch([tensor], base=base[: tensor.storage_offset() + last + 1]))
    return launches


def fault(program: Path, device: DeviceOnCpu, tmp_path: Path, lane_order: int = 0) -> str | None:
    """Runs the workload; what is wrong with it, or None."""
    launches = workload()
    machine = struct.pack("<3q", 3, lane_order, 2)
    (tmp_path / "cases").write_bytes(machine + b"".join(launch.encode() for launch in launches))
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    command = [str(program), str(tmp_path / "cases"), str(tmp_path / "rows")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    if done.returncode != 0:
        return f"exit {done.returncode}: {done.stderr[:2000]}"
    tensors = [tensor for launch in launches for tensor in launch.tensors]
    rows = (Row * len(tensors)).from_buffer_copy((tmp_path / "rows").read_bytes())
    for tensor, row in zip(tensors, rows, strict=True):
        repeat = tensor.numel() // row.numel if row.numel else 1
        if not same(device.values(tensor, row, repeat), expected_row(tensor)):
            return f"wrong row of {tensor.dtype} {tuple(tensor.shape)}"
    return None


@pytest.mark.parametrize("lane_order", [0, 1, 5])
@pytest.mark.parametrize("layer", BUILDS)
def test_device_code_has_no_fault_that_a_sanitizer_sees(
    decoder: DeviceOnCpu,
    tmp_path: Path,
    layer: str,
    lane_order: int,
) -> None:
    assert fault(BUILDS[layer].compile(), decoder, tmp_path, lane_order) is None


@dataclass(frozen=True)
class Mutant:
    what: str
    caught_by: str
    old: str
    new: str


STAMP = "  if (stamp == kNextStamp) {\n    *there = *there + 1;\n  } else {\n    *there = stamp;\n  }\n"

MUTANTS = [
    Mutant(
        "no barrier before the warps' parts are read",
        "thread",
        "  __syncthreads();\n  if (threadIdx.x == 0) {\n    for",
        "  if (threadIdx.x == 0) {\n    for",
    ),
    Mutant(
        "no barrier before the next tensor",
        "thread",
        "  __syncthreads();  // of_warp is free for the next tensor\n",
        "",
    ),
    Mutant("no barrier before the ticket is read", "thread", "  __syncthreads();\n  return last;", "  return last;"),
    Mutant(
        "a store in place of an atomic",
        "thread",
        "atomicMax(&total->not_abs_min, partial.not_abs_min);",
        "total->not_abs_min = larger(total->not_abs_min, partial.not_abs_min);",
    ),
    Mutant("no fence before the ticket", "thread", "    __threadfence();\n    last =", "    last ="),
    Mutant("no fence after the last ticket", "thread", "    __threadfence();\n  }", "  }"),
    Mutant(
        "a ticket reset by a store",
        "thread",
        "atomicExch(&workspace->blocks_done, 0ull);",
        "workspace->blocks_done = 0;",
    ),
    Mutant("loads past the last vector", "address", "kPastLast ? smaller(at, count - 1) : at", "at"),
    Mutant(
        "one element beyond the tail", "address", "head + (last - tail_index));", "head + (last - tail_index) + 1);"
    ),
    Mutant("shared memory one warp short", "address", "P of_warp[kWarps];", "P of_warp[kWarps - 1];"),
    Mutant(
        "repeated vectors counted again",
        "plain",
        "smaller<uint64_t>(count, i + Source::kInFlight * kThreads);",
        "smaller<uint64_t>(count + kThreads, i + Source::kInFlight * kThreads);",
    ),
    Mutant(
        "vectors from an unaligned start", "plain", "(kVectorBytes - past_vector) % kVectorBytes;", "past_vector * 0;"
    ),
    Mutant(
        "elements across vectors taken for whole ones",
        "plain",
        "until_vector % sizeof(Element) == 0;",
        "until_vector < kVectorBytes;",
    ),
    Mutant("a workspace left as it is", "plain", "  *partial = Partial{};\n", ""),
    Mutant("a chunk's tensor missed by one", "plain", ".first_chunk <= chunk;", ".first_chunk < chunk;"),
    Mutant("half of a warp left out", "plain", "distance = kWarpSize / 2;", "distance = kWarpSize / 4;"),
    Mutant(
        "counts combined as extrema",
        "plain",
        "into.nan_count += other.nan_count;",
        "into.nan_count = larger(into.nan_count, other.nan_count);",
    ),
    Mutant("no fence before the stamp", "plain", "  __threadfence_system();\n", ""),
    Mutant(
        "a stamp before its row",
        "plain",
        "  slot->row = row;\n  __threadfence_system();\n" + STAMP,
        STAMP + "  __threadfence_system();\n  slot->row = row;\n",
    ),
    Mutant(
        "a stamp before the fence",
        "plain",
        "  __threadfence_system();\n" + STAMP,
        STAMP + "  __threadfence_system();\n",
    ),
    Mutant(
        "a row after the fence",
        "plain",
        "  slot->row = row;\n  __threadfence_system();\n",
        "  __threadfence_system();\n  slot->row = row;\n",
    ),
    Mutant("half a stamp", "plain", "*there = stamp;", "*there = static_cast<uint32_t>(stamp);"),
    Mutant("a replay that is not counted", "plain", "*there = *there + 1;", "*there = *there;"),
    Mutant("a launch that is counted and was given a stamp", "plain", "*there = stamp;", "*there = *there + 1;"),
    Mutant(
        "the table and the arguments mixed up",
        "plain",
        "list.count <= kInlineTensors ? list.inlined : list.table",
        "list.count <= kInlineTensors ? list.table : list.inlined",
    ),
    Mutant("64 tensors taken for a table", "plain", "list.count <= kInlineTensors", "list.count < kInlineTensors"),
    Mutant(
        "65 tensors taken for arguments", "plain", "list.count <= kInlineTensors", "list.count <= kInlineTensors + 1"
    ),
    Mutant("a row more than the list has", "plain", "t < list.count; t += kThreads", "t <= list.count; t += kThreads"),
    Mutant("every other key of a word left out", "plain", "shift += kKeyBits", "shift += 2 * kKeyBits"),
    Mutant("a word's keys carry into each other", "plain", "(word & ~kSigns) + ~kSigns;", "word + ~kSigns;"),
    Mutant("one key in a word of zeros", "plain", "key_of<F>(value) * kOnes<F>", "key_of<F>(value)"),
    Mutant(
        "a remainder without its last batch",
        "plain",
        "if (i < count) read_batch<true>",
        "if (i < full_until) read_batch<true>",
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_broken_device_code_is_caught(
    decoder: DeviceOnCpu,
    tmp_path: Path,
    mutant: Mutant,
) -> None:
    broken = tmp_path / "csrc"
    shutil.copytree(CSRC, broken)
    sources = [broken / "cuda" / name for name in ("reduce.cuh", "packed.cuh")]
    (source,) = (path for path in sources if mutant.old in path.read_text())
    assert source.read_text().count(mutant.old) == 1, "the code that this mutant breaks has changed"
    source.write_text(source.read_text().replace(mutant.old, mutant.new))
    program = BUILDS[mutant.caught_by].compile(broken, tmp_path)
    found = fault(program, decoder, tmp_path)
    assert found is not None, f"{mutant.what}: not caught"
    if mutant.caught_by == "thread":
        assert "ThreadSanitizer: data race" in found, found
    if mutant.caught_by == "address":
        assert "AddressSanitizer" in found or "runtime error" in found, found

"""What is bad in the tensors of checkpoints, and what would become of their numbers in narrower formats."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .checkpoint import Stored, files_of, stored_tensors
from .stats import TensorStats, tensor_stats, why_unreadable

__all__ = ["FORMATS", "Narrowed", "ScanResult", "ScannedTensor", "narrowed", "scan"]

FORMATS: Mapping[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
SLICE = 1 << 15  # elements: they and their magnitudes stay in L2, so that only the first pass goes to memory


class Narrowed(NamedTuple):
    """What a plain cast to a narrower format would do to finite elements."""

    overflows: int
    """How many round to more than its largest number: to inf, or where it has none to NaN or to that number."""
    flushed: int
    """How many that are not zero would be."""


@dataclass(frozen=True, slots=True)
class ScannedTensor:
    file: str
    name: str
    stats: TensorStats
    narrowed: Mapping[str, Narrowed]
    """By the names of `FORMATS`; none of integers."""

    @property
    def found(self) -> dict[str, int]:
        """How many elements are "nan", "inf", or would be "fp16-overflow", "bf16-flush", ...; only what there is."""
        counts = {"nan": self.stats.nan_count, "inf": self.stats.inf_count}
        for name, narrow in self.narrowed.items():
            counts[f"{name}-overflow"] = narrow.overflows
            counts[f"{name}-flush"] = narrow.flushed
        return {slug: count for slug, count in counts.items() if count}


@dataclass(slots=True)
class ScanResult:
    tensors: list[ScannedTensor] = field(default_factory=list)
    unread: list[tuple[str, str, str]] = field(default_factory=list)
    """(file, name, why): what has no elements to read, as a float4 or a quantized one. They are not judged."""
    bytes: int = 0
    """That were read."""

    @property
    def elements(self) -> int:
        return sum(tensor.stats.numel for tensor in self.tensors)

    def total(self, slug: str) -> tuple[int, int]:
        """How many tensors have that, and how many elements in all."""
        counts = [count for tensor in self.tensors if (count := tensor.found.get(slug))]
        return len(counts), sum(counts)


def scan(
    paths: Sequence[str | os.PathLike[str]],
    formats: Sequence[str] = tuple(FORMATS),
    progress: Callable[[int, int], object] | None = None,
) -> ScanResult:
    """Read all tensors of checkpoints, one at a time.

    Args:
        paths: files or folders, see `checkpoint.files_of`; one that several name is read once.
        formats: of `FORMATS`, what to judge.
        progress: called with the bytes that were read and those of all files.

    Cost: one pass over each tensor and, while it is in cache, one more for each format in which some of it might be
    lost. Memory for one tensor; none where the file can be mapped.

    Raises:
        CheckpointError: a file cannot be read, or is not what it should be. Nothing is judged then.
    """
    files = list(dict.fromkeys(file for path in paths for file in files_of(path)))
    sizes = [file.stat().st_size for file in files]
    result, done = ScanResult(), 0
    for file, size in zip(files, sizes, strict=True):
        before = result.bytes
        for stored in stored_tensors(file):
            _scan_one(stored, formats, result)
            if progress is not None:
                progress(done + min(size, result.bytes - before), sum(sizes))
        done += size
    return result


def _scan_one(stored: Stored, formats: Sequence[str], result: ScanResult) -> None:
    tensor = stored.load()
    if reason := why_unreadable(tensor):
        result.unread.append((str(stored.file), stored.name, reason))
        return
    stats = tensor_stats(tensor)
    result.bytes += tensor.numel() * tensor.element_size()
    kinds = narrowed(tensor, stats, [FORMATS[name] for name in formats]) if _is_float(tensor.dtype) else ()
    named = dict(zip(formats, kinds, strict=False))
    result.tensors.append(ScannedTensor(str(stored.file), stored.name, stats, named))


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def narrowed(tensor: Tensor, stats: TensorStats, dtypes: Sequence[torch.dtype]) -> list[Narrowed]:
    """What each of several formats would do to a tensor of floating point; of complex numbers both parts are counted.

    Args:
        stats: of the tensor.
    """
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    formats = [_Format(real.dtype, dtype, stats) for dtype in dtypes]
    if not any(each.may_overflow or each.may_flush for each in formats):
        return [Narrowed(0, 0)] * len(formats)

    def count(piece: Tensor) -> list[tuple[int, int]]:
        # Of one byte each in float32, since torch computes in nothing narrower.
        magnitude = (piece.to(torch.float32) if piece.element_size() == 1 else piece).abs()
        zeros = magnitude.numel() - int(torch.count_nonzero(magnitude))
        return [each.count(magnitude, zeros) for each in formats]

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # a slice is too small for torch's own
        found = list(threads.map(count, torch.split(real.reshape(-1), SLICE)))
    return [Narrowed(*map(sum, zip(*counts, strict=True))) for counts in zip(*found, strict=True)]


class _Format:
    """How one format rounds the numbers of a tensor to the nearest of its own, a tie to the even one.

    Half a step beyond its largest number is such a tie: it goes up, and overflows, if that number is odd, as where its
    bits are all ones; the largest of float8_e4m3fn is even.
    """

    def __init__(self, of: torch.dtype, dtype: torch.dtype, stats: TensorStats) -> None:
        have, want = torch.finfo(of), torch.finfo(dtype)
        step = math.ldexp(want.eps, math.frexp(want.max)[1] - 1)
        self._is_even = want.max / step % 2 == 0
        self._limit = want.max + step / 2
        self._flushed = want.smallest_normal * want.eps / 2
        self.may_overflow = have.max > want.max and stats.finite_abs_max > want.max
        self.may_flush = have.smallest_normal * have.eps <= self._flushed

    def count(self, magnitude: Tensor, zeros: int) -> tuple[int, int]:
        """(that overflow, that are flushed to zero), of some magnitudes with so many zeros."""
        overflows = flushed = 0
        if self.may_overflow:
            beyond = magnitude > self._limit if self._is_even else magnitude >= self._limit
            overflows = int(torch.count_nonzero(beyond & magnitude.isfinite()))
        if self.may_flush:
            flushed = int(torch.count_nonzero(magnitude <= self._flushed)) - zeros
        return overflows, flushed

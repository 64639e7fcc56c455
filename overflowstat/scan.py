"""What is bad in the tensors of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .checkpoint import Stored, files_of, stored_tensors
from .errors import CheckpointError
from .narrowing import FORMATS, Narrowed, narrowed
from .stats import TensorStats, tensor_stats, why_unreadable

__all__ = ["ScanResult", "ScannedTensor", "scan"]


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

    Cost: one pass over each tensor, and one more if some of it might be lost in a format. Memory for one tensor; none
    where the file can be mapped.

    Raises:
        CheckpointError: a file cannot be read, or is not what it should be, or there is no tensor. Nothing is judged
            then.
    """
    files: dict[Path, frozenset[str]] = {}
    for path in paths:
        for file, expected in files_of(path):
            files[file] = files.get(file, frozenset()) | expected
    sizes = [file.stat().st_size for file in files]
    result, done = ScanResult(), 0
    for (file, expected), size in zip(files.items(), sizes, strict=True):
        before = result.bytes
        for stored in stored_tensors(file, expected):
            _scan_one(stored, formats, result)
            if progress is not None:
                progress(done + min(size, result.bytes - before), sum(sizes))
        done += size
    if not result.tensors and not result.unread:
        where = ", ".join(map(str, paths))
        raise CheckpointError(f"{where}: no tensor is in {'it' if len(paths) == 1 else 'them'}, so nothing was judged")
    return result


def _scan_one(stored: Stored, formats: Sequence[str], result: ScanResult) -> None:
    tensor = stored.load()
    if reason := why_unreadable(tensor):
        result.unread.append((str(stored.file), stored.name, reason))
        return
    stats = tensor_stats(tensor)
    result.bytes += tensor.numel() * tensor.element_size()
    is_real = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    kinds = narrowed(tensor, stats, [FORMATS[name] for name in formats]) if is_real else ()
    named = dict(zip(formats, kinds, strict=False))
    result.tensors.append(ScannedTensor(str(stored.file), stored.name, stats, named))

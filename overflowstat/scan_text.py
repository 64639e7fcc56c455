"""What `overflowstat scan` prints."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from .report import bad_numbers
from .scan import ScannedTensor, ScanResult
from .stats import TensorStats
from .terminal import on_one_line
from .wording import short_name

__all__ = ["scan_json", "scan_text"]


def scan_text(result: ScanResult, formats: Collection[str], fail_on: Collection[str], top: int | None) -> str:
    """The totals, then the tensors that hold NaN or inf, would overflow, or have what `fail_on` names.

    Args:
        formats: those that were judged.
        top: how many tensors to list at most; None for all that were read.
    """
    files = {tensor.file for tensor in result.tensors} | {file for file, *_ in result.unread}
    dtypes = sorted({short_name(tensor.stats.dtype) for tensor in result.tensors})
    lines = [
        f"{_counted(len(result.tensors), 'tensor')} of {_counted(len(files), 'file')}, "
        f"{_counted(result.elements, 'number')}, {_size(result.bytes)}: {', '.join(dtypes) or 'nothing to read'}",
        "",
    ]
    lines += [f"{slug:18} {_total(result, slug)}" for slug in ("nan", "inf")]
    for name in formats:
        lines += [f"{f'{name}-{what}':18} {_total(result, f'{name}-{what}')}" for what in ("overflow", "flush")]
    listed = [tensor for tensor in result.tensors if top is None or _is_listed(tensor, fail_on)]
    if listed:
        lines += ["", *(_row(tensor, len(files) > 1) for tensor in listed[:top])]
    if top is not None and len(listed) > top:
        lines.append(f"and {len(listed) - top} more; --all lists all tensors")
    if result.unread:
        lines += ["", "not read: " + ", ".join(f"{on_one_line(name)} ({why})" for _, name, why in result.unread)]
    return "\n".join(lines)


def _is_listed(tensor: ScannedTensor, fail_on: Collection[str]) -> bool:
    return any(slug in fail_on or not slug.endswith("-flush") for slug in tensor.found)


def _total(result: ScanResult, slug: str) -> str:
    tensors, elements = result.total(slug)
    if not tensors:
        return "none"
    share = f", {elements / result.elements:.2g} of all" if slug.endswith("-flush") else ""
    return f"{_counted(tensors, 'tensor')}, {_counted(elements, 'number')}{share}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _row(tensor: ScannedTensor, with_file: bool) -> str:
    stats = tensor.stats
    where = f"{tensor.file}: {tensor.name}" if with_file else tensor.name
    said = [bad_numbers(stats) if stats.is_bad else f"{short_name(stats.dtype)}, shape {list(stats.shape)}"]
    if stats.finite_abs_max == stats.finite_abs_max:
        said.append(f"abs max {stats.finite_abs_max:.4g}")
    said += [f"{slug} {count}" for slug, count in tensor.found.items() if slug not in ("nan", "inf")]
    return f"{on_one_line(where)}: {'; '.join(said)}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # which three digits make 1000
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def scan_json(result: ScanResult, formats: Collection[str], found: Collection[str]) -> dict[str, Any]:
    """The same for programs. A magnitude that there is none of is null."""
    slugs = ["nan", "inf", *(f"{name}-{what}" for name in formats for what in ("overflow", "flush"))]
    return {
        "bytes": result.bytes,
        "elements": result.elements,
        "total": {slug: dict(zip(("tensors", "elements"), result.total(slug), strict=True)) for slug in slugs},
        "failed_on": sorted(found),
        "tensors": [dict(_json_row(tensor)) for tensor in result.tensors],
        "unread": [{"file": file, "name": name, "why": why} for file, name, why in result.unread],
    }


def _json_row(tensor: ScannedTensor) -> Iterator[tuple[str, object]]:
    stats: TensorStats = tensor.stats
    yield "file", tensor.file
    yield "name", tensor.name
    yield "dtype", short_name(stats.dtype)
    yield "shape", stats.shape
    for name in ("abs_min", "finite_abs_max"):
        value = getattr(stats, name)
        yield name, value if value == value and abs(value) != float("inf") else None
    for name in ("nan_count", "posinf_count", "neginf_count", "first_bad"):
        yield name, getattr(stats, name)
    for name, narrow in tensor.narrowed.items():
        yield name, narrow._asdict()

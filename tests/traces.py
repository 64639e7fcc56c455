"""Frames and trace files made by hand, for tests of what reads and writes them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from overflowstat import TensorStats, TraceFile
from overflowstat.frames import Frame, Line
from overflowstat.row import NOTHING, NonFinite

__all__ = ["frame", "lines_of", "numbers", "opened", "write"]

INF, NAN = float("inf"), float("nan")


def numbers(
    low: float,
    high: float,
    *,
    dtype: torch.dtype = torch.float32,
    nan: int = 0,
    posinf: int = 0,
    neginf: int = 0,
    finite: float | None = None,
) -> TensorStats:
    """Of a tensor of shape [2, 8] whose finite magnitudes end at `high`, or at `finite`."""
    is_bad = nan + posinf + neginf > 0
    abs_max = INF if posinf or neginf else high
    first_bad = (1, 3) if is_bad else None
    return TensorStats(
        low, abs_max, high if finite is None else finite, nan, posinf, neginf, first_bad, 16, dtype, (2, 8)
    )


def frame(
    batch: int,
    module: str,
    lines: dict[str, TensorStats | str] | Sequence[Line],
    *,
    class_name: str = "Linear",
    starts_batch: bool = False,
    is_recompute: bool = False,
) -> Frame:
    made = (
        [Line(label, content, True, NOTHING) for label, content in lines.items()] if isinstance(lines, dict) else lines
    )
    return Frame(batch, module, class_name, tuple(made), starts_batch, is_recompute)


ALLOWED = NonFinite.NAN | NonFinite.NEGINF


def write(path: Path, frames: Sequence[Frame], root: str | None = "Model") -> Path:
    file = TraceFile(path)
    file.begin(root)
    for each in frames:
        file.frame(each, traced=False)
    file.close()
    return Path(file.path)


def opened(path: Path) -> bytes:
    """Its text, as far as it can be had, by zlib alone."""
    data = path.read_bytes()
    return zlib.decompressobj(31).decompress(data) if path.suffix == ".gz" else data


def lines_of(path: Path) -> list[dict[str, Any]]:
    """By Python's own reader, which is told to take no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in opened(path).splitlines()]

"""Traces written by hand, line by line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["HEADER", "frame", "layers", "numbers", "report", "write_trace"]

HEADER = {
    "type": "header",
    "format": "overflowstat-trace",
    "version": 1,
    "overflowstat": "0.1.0",
    "torch": "2.13.0",
    "started": "2026-11-30T10:00:00.000+00:00",
    "rank": 0,
    "world_size": 1,
    "root": "Net",
}


def numbers(label: str, low: float | str, high: float | str, dtype: str = "float16", **more: Any) -> dict[str, Any]:
    """A line; with counts of what is not finite, more has `finite_abs_max` and `first_bad`, too."""
    return {"label": label, "dtype": dtype, "shape": [2, 4], "abs_min": low, "abs_max": high, **more}


def frame(batch: int, module: str, *lines: dict[str, Any], cls: str = "Linear", **more: Any) -> dict[str, Any]:
    return {"type": "frame", "batch": batch, "module": module, "class": cls, "lines": list(lines), **more}


def report(batch: int, module: str, label: str, text: str) -> dict[str, Any]:
    return {
        "type": "report",
        "batch": batch,
        "module": module,
        "class": "Linear",
        "label": label,
        "wholly_bad_rows": None,
        "text": text,
        "verdict": None,
    }


def write_trace(path: Path, *lines: dict[str, Any], ends: bool = True, **header: Any) -> Path:
    all_lines: Iterable[dict[str, Any]] = [HEADER | header, *lines, *([{"type": "end"}] if ends else [])]
    path.write_text("".join(json.dumps(line) + "\n" for line in all_lines))
    return path


def layers(path: Path, count: int, batches: int = 1, bad_from: int | None = None) -> Path:
    """`count` calls in each batch, layer i up to 2**(i % 20); in the last batch NaN from `bad_from` on."""
    lines = []
    for batch in range(batches):
        for i in range(count):
            name = f"model.layers.{i // 10}.part{i % 10}"
            if batch == batches - 1 and bad_from is not None and i >= bad_from:
                bad: dict[str, Any] = {"nan_count": 8, "finite_abs_max": "nan", "first_bad": [0, 0]}
                lines.append(frame(batch, name, numbers("output", "nan", "nan", **bad)))
            else:
                lines.append(
                    frame(batch, name, numbers("input[0]", 0.5, 1.0), numbers("output", 0.01, 2.0 ** (i % 20)))
                )
    return write_trace(path, *lines)

"""The lines of a trace file: frames and reports as JSON, and back. docs/trace-format.md explains each key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, TypeVar

import torch

from .frames import Frame, Line
from .policy import KINDS
from .report import OwnStyle, Report
from .row import NOTHING
from .stats import READABLE_DTYPES, TensorStats
from .wording import short_name

__all__ = [
    "END_LINE",
    "FORMAT",
    "VERSION",
    "TraceHeader",
    "TraceReport",
    "frame_line",
    "header_line",
    "header_of",
    "parsed",
    "read_batch",
    "read_frame",
    "read_report",
    "report_line",
]

_Value = TypeVar("_Value")

FORMAT = "overflowstat-trace"
VERSION = 1
"""Raised when a reader of the one before would misread the file. New keys and types of lines do not raise it."""

END_LINE = '{"type":"end"}\n'
COUNTS = ("nan_count", "posinf_count", "neginf_count")
DETAILS = ("zero_count", "subnormal_count", "abs_min_nonzero")
"""None where they were not asked for."""


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The first line of a trace."""

    version: int
    """Of the format."""
    overflowstat: str
    torch: str
    started: str
    """In UTC, as ISO 8601 has it."""
    rank: int
    world_size: int
    root_class: str | None
    """Of the model; None where no monitor told it."""


@dataclass(frozen=True, slots=True)
class TraceReport:
    """A detection."""

    batch_number: int
    module: str
    class_name: str
    label: str
    """The first bad line."""
    wholly_bad_rows: tuple[int, int] | None
    """See `Report`."""
    text: str
    """In a few lines."""
    verdict: dict[str, Any] | None
    """What `Verdict.to_json` gave; None if it was not asked for."""


# Writing. A frame is put together by hand, since json.dumps of as many dicts takes three times as long.


def header_line(header: TraceHeader) -> str:
    return _dumped(
        {
            "type": "header",
            "format": FORMAT,
            "version": header.version,
            "overflowstat": header.overflowstat,
            "torch": header.torch,
            "started": header.started,
            "rank": header.rank,
            "world_size": header.world_size,
            "root": header.root_class,
        }
    )


def frame_line(frame: Frame) -> str:
    lines = ",".join([_line(line) for line in frame.lines])
    starts_batch = ',"starts_batch":true' if frame.starts_batch else ""
    is_recompute = ',"recompute":true' if frame.is_recompute else ""
    calls = f',"calls":{frame.calls}' if frame.calls > 1 else ""
    return (
        f'{{"type":"frame","batch":{frame.batch_number},"module":{quoted(frame.module)},'
        f'"class":{quoted(frame.class_name)}{starts_batch}{is_recompute}{calls},"lines":[{lines}]}}\n'
    )


def _line(line: Line) -> str:
    content = line.content
    marks = ""
    if not line.is_judged:
        marks = ',"judged":false'
    if line.allowed is not NOTHING and line.allowed:
        marks += f',"allowed":{json.dumps([name for name, kind in KINDS.items() if kind & line.allowed])}'
    if isinstance(content, str):
        return f'{{"label":{quoted(line.label)},"content":{quoted(content)}{marks}}}'
    if content.first_bad is None and content.numel:  # nearly always, and then both numbers are finite
        numbers = f'"abs_min":{content.abs_min},"abs_max":{content.abs_max}'
    else:
        numbers = f'"abs_min":{_number(content.abs_min)},"abs_max":{_number(content.abs_max)}'
        if content.first_bad is not None:
            counts = "".join(f',"{name}":{n}' for name in COUNTS if (n := getattr(content, name)))
            numbers += f',"finite_abs_max":{_number(content.finite_abs_max)}{counts}'
            numbers += f',"first_bad":{[*content.first_bad]}'
            numbers += "" if content.is_counted else ',"counted":false'
    for name in DETAILS:
        if (value := getattr(content, name)) is not None:
            numbers += f',"{name}":{_number(value)}'
    return (
        f'{{"label":{quoted(line.label)},"dtype":"{_DTYPE_NAMES[content.dtype]}","shape":{[*content.shape]},'
        f"{numbers}{marks}}}"
    )


class _DtypeNames(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        self[dtype] = short_name(dtype)
        return self[dtype]


_DTYPE_NAMES = _DtypeNames()


def _number(value: float | int) -> str:
    return f"{value}" if value - value == 0 else f'"{value}"'  # which is so of all but infinities and nan


def report_line(report: Report) -> str:
    bad, verdict = report.bad, report.verdict
    return _dumped(
        {
            "type": "report",
            "batch": report.batch_number,
            "module": bad.module,
            "class": bad.class_name,
            "label": bad.bad_lines[0].label,
            "wholly_bad_rows": report.wholly_bad_rows,
            "text": OwnStyle().detected(report),
            "verdict": None if verdict is None else verdict.to_json(),
        }
    )


def _dumped(value: Mapping[str, object]) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n"


# Reading. What is not as it should be raises KeyError, TypeError or ValueError.


def parsed(line: bytes) -> dict[str, Any]:
    """An object of JSON, which knows no NaN."""
    found = json.loads(line.decode("utf-8"), parse_constant=_refuse)
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def header_of(line: Mapping[str, Any]) -> TraceHeader:
    root = line["root"]
    return TraceHeader(
        line["version"],
        _of(str, line["overflowstat"]),
        _of(str, line["torch"]),
        _of(str, line["started"]),
        _of(int, line["rank"]),
        _of(int, line["world_size"]),
        None if root is None else _of(str, root),
    )


def read_batch(line: Mapping[str, Any]) -> int:
    """The number of the batch of a frame or report."""
    number: int = _of(int, line["batch"])
    return number


def read_frame(frame: Mapping[str, Any]) -> Frame:
    return Frame(
        _of(int, frame["batch"]),
        _of(str, frame["module"]),
        _of(str, frame["class"]),
        tuple([_read_line(line) for line in frame["lines"]]),
        frame.get("starts_batch", False),
        frame.get("recompute", False),
        _of(int, frame.get("calls", 1)),
    )


def _read_line(line: Mapping[str, Any]) -> Line:
    content = _of(str, line["content"]) if "content" in line else _read_stats(line)
    allowed = NOTHING
    for name in line.get("allowed", ()):
        allowed |= _named(KINDS, name)
    return Line(_of(str, line["label"]), content, line.get("judged", True), allowed)


def _read_stats(line: Mapping[str, Any]) -> TensorStats:
    shape = tuple([_of(int, size) for size in line["shape"]])
    numel = 1
    for size in shape:
        numel *= size
    abs_max = _read_number(line["abs_max"])
    nan_count, posinf_count, neginf_count = (_of(int, line.get(name, 0)) for name in COUNTS)
    first_bad = line.get("first_bad")
    return TensorStats(
        _read_number(line["abs_min"]),
        abs_max,
        _read_number(line["finite_abs_max"]) if "finite_abs_max" in line else abs_max,
        nan_count,
        posinf_count,
        neginf_count,
        None if first_bad is None else tuple([_of(int, i) for i in first_bad]),
        numel,
        _named(_DTYPES, line["dtype"]),
        shape,
        zero_count=_of(int, line["zero_count"]) if "zero_count" in line else None,
        subnormal_count=_of(int, line["subnormal_count"]) if "subnormal_count" in line else None,
        abs_min_nonzero=_read_number(line["abs_min_nonzero"]) if "abs_min_nonzero" in line else None,
        is_counted=_of(bool, line.get("counted", True)),
    )


def _read_number(value: object) -> float | int:
    if isinstance(value, str):
        return _named(_NOT_FINITE, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return value


_DTYPES = {short_name(dtype): dtype for dtype in READABLE_DTYPES}
_NOT_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def read_report(report: Mapping[str, Any]) -> TraceReport:
    rows = report["wholly_bad_rows"]
    return TraceReport(
        _of(int, report["batch"]),
        _of(str, report["module"]),
        _of(str, report["class"]),
        _of(str, report["label"]),
        None if rows is None else (_of(int, rows[0]), _of(int, rows[1])),
        _of(str, report["text"]),
        report["verdict"],
    )


def _named(table: Mapping[str, _Value], name: Any) -> _Value:
    if name not in table:
        raise ValueError(f"{name!r} is none of {', '.join(map(repr, table))}")
    return table[name]


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value

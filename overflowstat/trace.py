"""Read what a TraceFile has written."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

from .errors import TraceError, warn_user
from .frames import Frame, Line
from .policy import KINDS
from .stats import TensorStats
from .trace_format import (
    FORMAT,
    VERSION,
    TraceHeader,
    TraceReport,
    header_of,
    parsed,
    read_batch,
    read_frame,
    read_report,
)
from .wording import short_name

if TYPE_CHECKING:
    import pandas

__all__ = ["CallKind", "Trace", "TraceRow", "call_kind", "load_trace"]

CallKind = Literal["forward", "recompute", "backward"]
"""Of a frame: a forward, one that activation checkpointing runs once more, or gradients."""

CHUNK = 1 << 18
LONGEST_HEADER = 1 << 16
GZIP_MAGIC = b"\x1f\x8b"


def call_kind(frame: Frame) -> CallKind:
    if frame.is_recompute:
        return "recompute"
    return "backward" if frame.is_backward else "forward"


class TraceRow(NamedTuple):
    """One line of a frame: a tensor that a module call touched, or what stood in its place."""

    batch: int
    call: int
    """How many calls of this module, of this kind, the batch had before this one."""
    kind: CallKind
    module: str
    """Qualified name; "" for the root."""
    class_name: str
    label: str
    """As "weight", "input[0]", "output", "grad output"."""
    content: str | None
    """What stands in place of numbers, of which there are none then."""
    dtype: str | None
    shape: tuple[int, ...] | None
    numel: int | None
    abs_min: float | int | None
    """This and the following are explained in `TensorStats`."""
    abs_max: float | int | None
    finite_abs_max: float | int | None
    nan_count: int | None
    posinf_count: int | None
    neginf_count: int | None
    first_bad: tuple[int, ...] | None
    zero_count: int | None
    """This and the next two are None where the monitor was not asked for them."""
    subnormal_count: int | None
    abs_min_nonzero: float | int | None
    is_judged: bool
    """Whether it makes its frame bad."""
    allowed: tuple[str, ...]
    """What it may hold: "nan", "inf", "-inf"."""
    is_bad: bool
    """Whether it holds what it may not."""


class Trace:
    """What a trace file holds.

    Attributes:
        path: the file.
        header: its first line.
        batches: numbers of all batches in the file, ascending: also of those that were not to be read.
        frames: module calls, in the order in which they were judged, which is that in which they ran.
        reports: detections, likewise.
        is_complete: whether the writer ended it. If not, its process was killed, or is still running.
        recovered: whether its end was cut off in the middle of a line. All before that is here.
    """

    def __init__(
        self,
        path: str,
        header: TraceHeader,
        batches: list[int],
        frames: list[Frame],
        reports: list[TraceReport],
        is_complete: bool,
        recovered: bool,
    ) -> None:
        self.path = path
        self.header = header
        self.batches = batches
        self.frames = frames
        self.reports = reports
        self.is_complete = is_complete
        self.recovered = recovered

    def __repr__(self) -> str:
        return f"<Trace {self.path!r}: {len(self.frames)} frames, {len(self.reports)} reports>"

    @cached_property
    def calls(self) -> list[int]:
        """Of each frame, how many calls of its module, of the same kind, its batch had before it."""
        met: Counter[tuple[int, str, str]] = Counter()
        found = []
        for frame in self.frames:
            key = frame.batch_number, frame.module, call_kind(frame)
            found.append(met[key])
            met[key] += 1
        return found

    @cached_property
    def rows(self) -> list[TraceRow]:
        """Every line of every frame."""
        found = []
        for frame, call in zip(self.frames, self.calls, strict=True):
            found += [_row(frame, call, line) for line in frame.lines]
        return found

    def to_pandas(self) -> pandas.DataFrame:
        """`rows` as a table, with the fields of `TraceRow` as columns.

        Magnitudes are float64, unless some are integers that it cannot hold: then that column has Python's numbers.

        Raises:
            ImportError: pandas is not there.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ImportError("Trace.to_pandas() needs pandas: pip install pandas", name="pandas") from error
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(TraceRow._fields)
        table = {
            name: pandas.Series(list(values), dtype=_column_dtype(name, values))
            for name, values in zip(TraceRow._fields, columns, strict=True)
        }
        return pandas.DataFrame(table)


MAGNITUDES = ("abs_min", "abs_max", "finite_abs_max", "abs_min_nonzero")
COUNTS = ("numel", "nan_count", "posinf_count", "neginf_count", "zero_count", "subnormal_count")
LARGEST_EXACT = 2**53


def _column_dtype(name: str, values: Collection[Any]) -> str:
    if name in MAGNITUDES:
        return "object" if any(isinstance(v, int) and v > LARGEST_EXACT for v in values) else "float64"
    if name in COUNTS:
        return "Int64"  # which has a value for what is missing
    return {"batch": "int64", "call": "int64", "is_judged": "bool", "is_bad": "bool"}.get(name, "object")


def _row(frame: Frame, call: int, line: Line) -> TraceRow:
    found = line.content
    stats = found if isinstance(found, TensorStats) else None
    numbers: dict[str, Any] = {name: getattr(stats, name, None) for name in STATISTICS}
    return TraceRow(
        batch=frame.batch_number,
        call=call,
        kind=call_kind(frame),
        module=frame.module,
        class_name=frame.class_name,
        label=line.label,
        content=found if isinstance(found, str) else None,
        dtype=None if stats is None else short_name(stats.dtype),
        **numbers,
        is_judged=line.is_judged,
        allowed=tuple(name for name, kind in KINDS.items() if kind & line.allowed),
        is_bad=line.is_bad,
    )


STATISTICS = TraceRow._fields[TraceRow._fields.index("shape") : TraceRow._fields.index("is_judged")]


def load_trace(
    path: str | os.PathLike[str],
    *,
    batches: Collection[int] | None = None,
    progress: Callable[[int], object] = lambda position: None,
) -> Trace:
    """Read a file that `TraceFile` has written, compressed or not.

    Where the process that wrote it was killed, its last line may be cut: all before that is read, and a warning says
    so.

    Args:
        path: the file.
        batches: only those of these numbers; None for all.
        progress: called now and then with how much of the file has been read, in bytes.

    Raises:
        TraceError: it cannot be read, is no trace, is damaged, or was written by a version that is too new.

    Cost: all that is read is kept in memory, about 500 bytes a line of a frame.
    """
    name = os.fspath(path)
    wanted = None if batches is None else set(batches)
    met: set[int] = set()
    frames: list[Frame] = []
    reports: list[TraceReport] = []
    is_complete = recovered = False
    try:
        with open(name, "rb") as file:
            lines = _lines(name, file, progress)
            header = _header(name, *next(lines, (b"", True)))
            for number, (text, is_whole) in enumerate(lines, 2):
                try:
                    line = parsed(text)
                except UNREADABLE as error:
                    if is_whole:
                        raise _damaged(name, number, error) from error
                    recovered = True
                    break
                try:
                    if line["type"] == "end":
                        is_complete = True
                    elif line["type"] == "header":
                        raise ValueError("a second trace begins there")
                    elif line["type"] in ("frame", "report"):
                        met.add(read_batch(line))
                        if wanted is not None and line["batch"] not in wanted:
                            continue
                        if line["type"] == "frame":
                            frames.append(read_frame(line))
                        else:
                            reports.append(read_report(line))
                except UNREADABLE as error:
                    raise _damaged(name, number, error) from error
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{name!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if recovered:
        warn_user(f"{name!r} is cut in its last line: the {len(frames)} frames before that are read")
    return Trace(name, header, sorted(met), frames, reports, is_complete, recovered)


UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a line that is damaged may raise."""


def _header(name: str, text: bytes, is_whole: bool) -> TraceHeader:
    if not text:
        raise TraceError(f"{name!r} is empty: the process that wrote it was killed before it began, or still runs")
    try:
        line = parsed(text)
    except UNREADABLE:
        line = {}
    if line.get("format") != FORMAT or line.get("type") != "header":
        if not is_whole and text.startswith(HEADER_BEGINS[: len(text)]):
            raise TraceError(f"{name!r} is cut in its first line: there is nothing to read")
        raise TraceError(f"{name!r} is no trace of overflowstat, which Monitor(model, trace_file=...) writes")
    version = line.get("version")
    if type(version) is int and version > VERSION:
        raise TraceError(
            f"{name!r} is a trace of version {version}, and this overflowstat reads up to {VERSION}: use the one that "
            f"wrote it, {line.get('overflowstat')!s:.40}, or a newer one"
        )
    try:
        return header_of(line)
    except UNREADABLE as error:
        raise _damaged(name, 1, error) from error


HEADER_BEGINS = b'{"type":"header","format":"' + FORMAT.encode()


def _damaged(name: str, number: int, error: Exception) -> TraceError:
    what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
    return TraceError(f"{name!r} is damaged in line {number}: {what:.200}")


def _lines(name: str, file: IO[bytes], progress: Callable[[int], object]) -> Iterator[tuple[bytes, bool]]:
    """Each without its end, and whether that was there."""
    rest, is_first = b"", True
    for chunk in _chunks(name, file):
        progress(file.tell())
        first, *others = chunk.split(b"\n")
        rest += first
        for next_one in others:
            is_first = False
            yield rest, True
            rest = next_one
        if is_first and len(rest) > LONGEST_HEADER:  # something else, perhaps without any line
            break
    if rest:
        yield rest, False


def _chunks(name: str, file: IO[bytes]) -> Iterator[bytes]:
    """Of the text. What is compressed is read as far as it goes."""
    chunk = file.read(CHUNK)
    if not chunk.startswith(GZIP_MAGIC):
        while chunk:
            yield chunk
            chunk = file.read(CHUNK)
        return
    decompressor = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        while chunk and not decompressor.eof:
            yield decompressor.decompress(chunk, CHUNK)
            chunk = decompressor.unconsumed_tail or file.read(CHUNK)
        yield decompressor.flush()
    except zlib.error as error:
        raise TraceError(f"{name!r} is damaged: what is compressed in it makes no sense ({error})") from error
    if decompressor.unused_data:
        raise TraceError(f"{name!r} is damaged: something follows its end")

"""The text of frames and reports: in the reference's format, byte for byte, and in ours."""

from dataclasses import dataclass, replace
from typing import Protocol

from .frames import Frame
from .ranks import Process
from .stats import TensorStats
from .terminal import on_one_line, printable
from .verdict import Verdict
from .wording import module_text, short_name

__all__ = ["OwnStyle", "ReferenceStyle", "Report", "Style", "bad_numbers", "detail_text", "notices", "stats_line"]

# Two numbers of 8 columns and the blank between them.
NUMBERS_WIDTH = 17
COLUMN_HEADER = f"{'abs min':8} {'abs max':8} metadata"


@dataclass(frozen=True, slots=True)
class Report:
    """A detection: the frame that is bad, and the last frames up to it in execution order (it included, if any is)."""

    batch_number: int
    frames: tuple[Frame, ...]
    bad: Frame
    wholly_bad_rows: tuple[int, int] | None = None
    """Of the first bad line: rows along the last dimension without a finite element, and rows; if it could be told."""
    verdict: Verdict | None = None
    """None if it was not asked for."""
    process: Process | None = None
    """Where it happened; None where no monitor has told it."""


class Style(Protocol):
    """How things are worded: what is printed, and what exceptions say."""

    def notices(self, frame: Frame) -> list[str]:
        """Lines printed at once when a frame is bad, traced or not."""
        ...

    def frame(self, frame: Frame) -> str: ...

    def report(self, report: Report) -> str: ...

    def detected(self, report: Report) -> str:
        """The text of the exception that a detection raises."""
        ...

    def aborted(self, batches: int, limit: int) -> str:
        """The text of the exception that ends a run after `batches` batches, the last one being number `limit`."""
        ...


class ReferenceStyle:
    """The words of transformers.debug_utils."""

    def notices(self, frame: Frame) -> list[str]:
        return [notice for line in frame.bad_lines for notice in notices(line.content, line.label)]

    def frame(self, frame: Frame) -> str:
        blank = " " * NUMBERS_WIDTH
        lines = [f"{blank} {self.heading(frame)}"]
        lines += [self.line(line.content, line.label) for line in frame.lines]
        if frame.starts_batch:
            lines[:0] = [f"\n\n{blank} *** Starting batch number={frame.batch_number} ***", COLUMN_HEADER]
        return "\n".join(lines)

    def heading(self, frame: Frame) -> str:
        return f"{frame.module} {frame.class_name}" + (f" ({frame.calls} calls)" if frame.calls > 1 else "")

    def line(self, content: TensorStats | str, label: str) -> str:
        return stats_line(content, label)

    def report(self, report: Report) -> str:
        return "\n".join(
            [
                f"\nDetected inf/nan during batch_number={report.batch_number}",
                f"Last {len(report.frames)} {'backward' if report.bad.is_backward else 'forward'} frames:",
                COLUMN_HEADER,
                "\n".join(self.frame(frame) for frame in report.frames),
                *([] if report.verdict is None else [f"\n{report.verdict.text}"]),
                "\n\n",
            ]
        )

    def detected(self, report: Report) -> str:
        return (
            "DebugUnderflowOverflow: inf/nan detected, aborting as there is no point running further. "
            "Please scroll up above this traceback to see the activation values prior to this event."
        )

    def aborted(self, batches: int, limit: int) -> str:
        return f"DebugUnderflowOverflow: aborting after {batches} batches due to `abort_after_batch_num={limit}` arg"


class OwnStyle(ReferenceStyle):
    """The reference's frames, which people know how to read, under them one line that says what is bad where.

    Names that the user gave, and lines of source, have escapes for what a terminal would obey.
    """

    def notices(self, frame: Frame) -> list[str]:
        return []

    def frame(self, frame: Frame) -> str:
        return printable(super().frame(frame))

    def heading(self, frame: Frame) -> str:
        return on_one_line(super().heading(frame)) + " (recomputed)" * frame.is_recompute

    def line(self, content: TensorStats | str, label: str) -> str:
        return super().line(content, label) + detail_text(content)

    def report(self, report: Report) -> str:
        frames = super().report(replace(report, verdict=None)).rstrip("\n")
        return f"{frames}\n\n{self.detected(report)}\n"

    def detected(self, report: Report) -> str:
        bad = report.bad
        line = bad.bad_lines[0]
        assert isinstance(line.content, TensorStats)
        where = module_text(bad.module, bad.class_name)
        kinds = " and ".join(k for k, there in (("nan", line.content.has_nan), ("inf", line.content.has_inf)) if there)
        finding = f"{line.label}: {bad_numbers(line.content, report.wholly_bad_rows)}"
        process = report.process
        rank = f"{process.name}: " if process is not None and process.world_size > 1 else ""
        found = f"overflowstat: {rank}{kinds} in batch {report.batch_number}, first in {where}, {finding}"
        return printable(found if report.verdict is None else f"{found}\n{report.verdict.text}")

    def aborted(self, batches: int, limit: int) -> str:
        return f"overflowstat: stopped after {batches} batches, as abort_after_batch_num={limit} asks"


def stats_line(content: TensorStats | str, label: str) -> str:
    """A line of a frame. Both numbers are nan where the tensor holds one, as torch's min and max have it."""
    if isinstance(content, TensorStats) and content.numel == 0:
        content = "empty"
    if isinstance(content, str):
        return f"{content:>{NUMBERS_WIDTH}} {label}"
    low, high = (float("nan"),) * 2 if content.has_nan else (content.abs_min, content.abs_max)
    return f"{low:8.2e} {high:8.2e} {label}"


def detail_text(content: TensorStats | str) -> str:
    """As " (50 % zero, 12 % subnormal, smallest 5.96e-08)"; nothing where there is neither, or nobody asked."""
    if isinstance(content, str) or not (content.zero_count or content.subnormal_count):
        return ""
    counts = [(content.zero_count, "zero"), (content.subnormal_count, "subnormal")]
    parts = [f"{100 * count / content.numel:.3g} % {what}" for count, what in counts if count]
    smallest = content.abs_min_nonzero
    if content.zero_count and smallest is not None and smallest > 0:  # or else abs min is it, or there is none
        parts.append(f"smallest {smallest:.2e}")
    return f" ({', '.join(parts)})"


def notices(content: TensorStats | str, label: str) -> list[str]:
    if isinstance(content, str):
        return []
    return [f"{label} has {what}" for what, there in (("nans", content.has_nan), ("infs", content.has_inf)) if there]


def bad_numbers(stats: TensorStats, wholly_bad_rows: tuple[int, int] | None = None) -> str:
    """As "512 of 4096 are nan, first at [0, 17, 0], 8 of 64 rows wholly; float16, shape [1, 64, 64]"."""
    numel = stats.numel
    found = [f"{count} of {numel} {'is' if count == '1' else 'are'} {kind}" for count, kind in stats.bad_counts]
    where = f", first at {list(stats.first_bad)}" if stats.first_bad else ""
    bad, rows = wholly_bad_rows or (0, 0)
    wholly = f", {bad} of {rows} rows wholly" if bad else ""
    return f"{', '.join(found)}{where}{wholly}; {short_name(stats.dtype)}, shape {list(stats.shape)}"

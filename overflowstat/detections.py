"""What was detected: as it is found, and so far, each place once."""

from collections.abc import Sequence
from dataclasses import dataclass

from .frames import Frame
from .report import Report
from .wording import module_text

__all__ = ["Detection", "Detections", "Found"]


@dataclass(frozen=True, slots=True)
class Found:
    """A frame to detect, with what is known of it when it is judged."""

    bad: Frame
    before: Sequence[Frame]
    """The kept frames before it, in execution order."""
    wholly_bad_rows: tuple[int, int] | None
    is_last: bool
    """No module has been called since."""
    last_bad_batch: int | None
    """The one before this in which anything was bad."""


@dataclass(slots=True)
class Detection:
    """A module's lines that were the first bad ones of a batch, or of several."""

    report: Report
    """Of the first of these batches."""
    batches: int = 1
    last_batch: int = 0

    @property
    def text(self) -> str:
        """Where, and how often."""
        bad = self.report.bad
        where = f"{module_text(bad.module, bad.class_name)}, {bad.bad_lines[0].label}"
        if self.batches == 1:
            return f"{where}: in batch {self.last_batch}"
        return f"{where}: in {self.batches} batches, from {self.report.batch_number} to {self.last_batch}"


class Detections:
    """In the order in which the places were first met."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[str, str], Detection] = {}

    def add(self, report: Report) -> bool:
        """Whether the place is a new one."""
        known = self._by_place.get(_place(report.bad))
        if known is None:
            self._by_place[_place(report.bad)] = Detection(report, last_batch=report.batch_number)
            return True
        known.batches += 1
        known.last_batch = report.batch_number
        return False

    def has(self, bad: Frame) -> bool:
        """Whether its place is among them."""
        return _place(bad) in self._by_place

    def all(self) -> list[Detection]:
        return list(self._by_place.values())


def _place(bad: Frame) -> tuple[str, str]:
    return bad.module, bad.bad_lines[0].label

"""Where frames and reports go."""

from typing import Protocol

from .frames import Frame
from .report import Report, Style

__all__ = ["Printer", "Sink"]


class Sink(Protocol):
    """Anything with these two methods. What they raise reaches the model's caller."""

    def frame(self, frame: Frame, traced: bool) -> None:
        """A frame that is bad, or `traced`: of a batch that was asked for.

        A sink whose attribute `every_frame` is true gets every frame.
        """
        ...

    def report(self, report: Report) -> None:
        """A detection, before its exception is raised."""
        ...


class Printer:
    """Prints to stdout: traced frames, and a report where something bad is detected."""

    def __init__(self, style: Style) -> None:
        self._style = style

    def frame(self, frame: Frame, traced: bool) -> None:
        texts = self._style.notices(frame)
        if traced:
            texts.append(self._style.frame(frame))
        if texts:
            print("\n".join(texts))

    def report(self, report: Report) -> None:
        print(self._style.report(report))

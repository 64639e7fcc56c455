"""Where frames and reports go."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from .frames import Frame
from .report import OwnStyle, Report, Style

__all__ = ["CallableSink", "LoggingSink", "Printer", "Sink"]


class Sink(Protocol):
    """Anything with these two methods. What they raise reaches the model's caller.

    It may have two more, without arguments: `flush`, called when all frames of a batch have been told, and `close`,
    called when the monitor is removed.
    """

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

    def __init__(self, style: Style | None = None) -> None:
        self._style = style or OwnStyle()

    def frame(self, frame: Frame, traced: bool) -> None:
        texts = self._style.notices(frame)
        if traced:
            texts.append(self._style.frame(frame))
        if texts:
            _print("\n".join(texts))

    def report(self, report: Report) -> None:
        _print(self._style.report(report))


def _print(text: str) -> None:
    """With escapes where stdout has no letters for a name or a line of source."""
    try:
        print(text)
    except UnicodeEncodeError as error:
        print(text.encode(error.encoding, "backslashreplace").decode(error.encoding))


class LoggingSink:
    """Logs traced frames as INFO, and reports as ERROR; with `every_frame` the other frames, too, as DEBUG.

    Args:
        logger: where to; its name will do. By default "overflowstat".
        every_frame: also frames of batches that are not traced.
        style: how things are worded.
    """

    def __init__(
        self,
        logger: logging.Logger | logging.LoggerAdapter[Any] | str = "overflowstat",
        *,
        every_frame: bool = False,
        style: Style | None = None,
    ) -> None:
        if not isinstance(logger, (logging.Logger, logging.LoggerAdapter, str)):
            raise TypeError(f"logger={logger!r}: must be a logger or its name, not {type(logger).__name__}")
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self.every_frame = every_frame
        self._style = style or OwnStyle()

    def frame(self, frame: Frame, traced: bool) -> None:
        level = logging.INFO if traced else logging.DEBUG
        if (traced or self.every_frame) and self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", self._style.frame(frame))

    def report(self, report: Report) -> None:
        self._logger.error("%s", self._style.report(report))


class CallableSink:
    """Calls a function with each `Frame` and each `Report`.

    Args:
        function: what it returns is not used.
        every_frame: with all frames, not only those that are traced or bad.
    """

    def __init__(self, function: Callable[[Frame | Report], object], *, every_frame: bool = False) -> None:
        if not callable(function):
            raise TypeError(f"function={function!r}: must be callable, and {type(function).__name__} is not")
        self._function = function
        self.every_frame = every_frame

    def frame(self, frame: Frame, traced: bool) -> None:
        self._function(frame)

    def report(self, report: Report) -> None:
        self._function(report)

"""Who is told of frames and detections: sinks, the user's own code, and whoever catches the exception."""

from collections.abc import Callable, Sequence
from typing import Literal

from .detections import Detections
from .errors import NonFiniteError, warn_user
from .frames import Frame
from .report import Report, Style
from .sinks import Sink
from .trace_file import TraceFile

__all__ = ["ON_DETECT", "OnDetect", "Reporter"]

OnDetect = Literal["raise", "warn"] | Callable[[Report], object]
ON_DETECT = ("raise", "warn")


class Reporter:
    """Tells each place once, but for exceptions, of which each detection has one.

    Args:
        style: how exceptions and warnings are worded.
        sinks: get frames, and at most `max_reports` reports.
        on_detect: "raise", "warn", or what is called with a report.
    """

    def __init__(self, style: Style, sinks: Sequence[Sink], on_detect: OnDetect, max_reports: int | None) -> None:
        self._style = style
        self._sinks = list(sinks)
        self._on_detect = on_detect
        self._max_reports = max_reports
        self._reports = 0
        self.detections = Detections()

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)

    @property
    def tells_all(self) -> bool:
        """Whether a sink gets every frame."""
        return any(getattr(sink, "every_frame", False) for sink in self._sinks)

    def begin(self, root_class: str) -> None:
        for sink in self._sinks:
            if isinstance(sink, TraceFile):
                sink.begin(root_class)

    def flush(self) -> None:
        """A batch has been told of."""
        self._call("flush")

    def close(self) -> None:
        """Nothing follows."""
        self._call("close")

    def _call(self, method: str) -> None:
        for sink in self._sinks:
            if hasattr(sink, method):  # which it need not have
                getattr(sink, method)()

    @property
    def raises(self) -> bool:
        return self._on_detect == "raise"

    @property
    def warns(self) -> bool:
        return self._on_detect == "warn"

    def frame(self, frame: Frame, traced: bool) -> None:
        for sink in self._sinks:
            if traced or getattr(sink, "every_frame", False) or frame.bad_lines:
                sink.frame(frame, traced)

    def would_tell(self, bad: Frame) -> bool:
        """Whether a detection of this frame would be told of, and not only counted."""
        return self.raises or not self.detections.has(bad)

    def report(self, report: Report, may_raise: bool = True) -> NonFiniteError | None:
        """Gives what is to be raised, if so."""
        is_new = self.detections.add(report)
        raises = self.raises and may_raise
        if (is_new or raises) and (self._max_reports is None or self._reports < self._max_reports):
            self._reports += 1
            for sink in self._sinks:
                sink.report(report)
        if raises:
            text = self._style.detected(report)
            return NonFiniteError(text, report.batch_number, report.frames, report.verdict, report.process)
        if is_new and callable(self._on_detect):
            self._on_detect(report)
        elif is_new and self.warns:
            warn_user(self._style.detected(report))
        return None

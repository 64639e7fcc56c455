"""A sink that keeps what it is told, for tests that ask what was shown."""

from overflowstat.frames import Frame
from overflowstat.report import Report

__all__ = ["Keeps"]


class Keeps:
    """Every frame, and the reports."""

    every_frame = True

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.reports: list[Report] = []

    def frame(self, frame: Frame, traced: bool) -> None:
        self.frames.append(frame)

    def report(self, report: Report) -> None:
        self.reports.append(report)

    def take(self) -> list[Frame]:
        """The frames since this was last called."""
        frames, self.frames = self.frames, []
        return frames

    def modules(self) -> list[str]:
        """Those of the frames since this was last called."""
        return [frame.module for frame in self.take()]

    def labels(self, module: str) -> list[str]:
        """Of the last frame of this module."""
        return [line.label for line in next(f for f in reversed(self.frames) if f.module == module).lines]

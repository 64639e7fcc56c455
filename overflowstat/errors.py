"""What a monitor raises, and how it warns."""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import TYPE_CHECKING

from .terminal import printable

if TYPE_CHECKING:
    from .frames import Frame
    from .verdict import Verdict

__all__ = ["BatchLimitReached", "CheckpointError", "MonitorWarning", "NonFiniteError", "TraceError", "warn_user"]


class NonFiniteError(ValueError):
    """A watched module met a NaN or an infinity.

    Attributes:
        batch_number: the batch it happened in, the first one being 0.
        frames: the last module calls up to the bad one, in execution order.
        verdict: what made it, and why; None if it was not asked for.
    """

    def __init__(
        self, message: str, batch_number: int, frames: tuple[Frame, ...], verdict: Verdict | None = None
    ) -> None:
        super().__init__(message)
        self.batch_number = batch_number
        self.frames = frames
        self.verdict = verdict

    def __reduce__(self) -> tuple[type, tuple[str, int, tuple[Frame, ...], Verdict | None]]:
        return type(self), (str(self), self.batch_number, self.frames, self.verdict)


class BatchLimitReached(ValueError):
    """The batch named by `abort_after_batch_num` has finished."""


class TraceError(ValueError):
    """A trace file cannot be read or written, or is not what it should be."""


class CheckpointError(ValueError):
    """A checkpoint on disk cannot be read, or is not what it should be."""


class MonitorWarning(UserWarning):
    """A monitor was used in a way that is hardly meant."""


def warn_user(message: str) -> None:
    """Warn at the line of the user's code that called into this package, be it by torch, which calls hooks."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__package__")).split(".")[0] in (__package__, "torch"):
        depth, frame = depth + 1, frame.f_back
    with contextlib.suppress(ValueError):  # of Python, which writes to stderr even if that is closed
        warnings.warn(printable(message), MonitorWarning, stacklevel=depth)

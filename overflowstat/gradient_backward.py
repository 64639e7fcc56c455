"""A backward in progress, and who judges what comes in it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from .frames import Frame
from .gradient_births import GradientBirth, GradientBirths
from .gradient_graph import Tap
from .pending import PendingFrame
from .verdict import Verdict

__all__ = ["Backward", "GradientJudge"]


@dataclass(eq=False)
class Backward:
    """One that is running. Those that a reentrant checkpoint runs inside of it are part of it."""

    batch_number: int
    seems_scaled: bool
    queue: deque[tuple[PendingFrame, list[tuple[Tap, int]]]] = field(default_factory=deque)
    """Frames in the order in which their gradients came; with the tensors that these are of, and their lines."""
    read: dict[Tap, tuple[PendingFrame, int]] = field(default_factory=dict)
    """With the line of the frame."""
    births: GradientBirths | None = None
    """In anomaly mode."""
    born: dict[Tap, GradientBirth] = field(default_factory=dict)
    were_bad: set[int] = field(default_factory=set)
    """Weights, by their ids, whose gradients were bad before."""
    has_ended: bool = False
    is_over: bool = False
    """Something was detected: what follows worked on bad numbers."""


class GradientJudge(Protocol):
    """Who knows of batches, and what to do with frames: a monitor, whose users these are not for."""

    def _gradient_batch(self, has_run: bool) -> int | None:
        """The batch that runs now, or that `has_run`, as in a backward it has; None if it is not watched."""
        ...

    def _waits_for_gradients(self, batch_number: int, at_end: bool) -> bool:
        """Whether the numbers of a batch are judged now, or at the end of its backward; else when they are there."""
        ...

    def _tells_all_gradients(self, batch_number: int) -> bool:
        """Whether frames of a batch are told of that are good."""
        ...

    def _judge_gradient(self, frame: Frame) -> bool:
        """Tell of a frame. Whether it is one to detect."""
        ...

    def _detect_gradient(
        self, bad: Frame, before: list[Frame], tensor: Tensor | None, verdict: Verdict, is_skipped: bool
    ) -> None:
        """May raise, but where `is_skipped`: a GradScaler will not use these gradients."""
        ...

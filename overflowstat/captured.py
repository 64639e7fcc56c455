"""Module calls inside a CUDA graph: the hooks see them once, when it is captured; they run whenever it is replayed."""

from collections.abc import Iterator
from dataclasses import replace

from .errors import warn_user
from .frames import Frame
from .pending import PendingFrame

__all__ = ["CapturedBatch"]


class CapturedBatch:
    """The calls of one forward that is in a graph, or of some modules of one, in execution order.

    `graph` is the number that `Recorder.capture` gives it.
    """

    def __init__(self, graph: int) -> None:
        self.graph = graph
        self.calls: list[PendingFrame] = []
        self.is_complete = False
        """Nothing will be added."""
        self.has_root = False
        """It is a whole forward of the root."""
        self.is_over = False
        """The graph is gone: what was judged is all there will be."""
        self._judged = 0

    def new_replays(self) -> int:
        """How many there have been since this was last called. Waits for the current stream."""
        replays = [found for call in self.calls if (found := call.replays()) is not None]
        if not replays:
            return 0
        latest = max(found.completed for found in replays)
        failure = next((f": {found.failure}" for found in replays if found.failure), "")
        if failure or any(found.completed < latest for found in replays):
            warn_user(f"a replay of a CUDA graph did not come to its end, and is judged as far as it came{failure}")
        new, self._judged = latest - self._judged, latest
        self.is_over = any(found.over for found in replays)
        return new

    def frames(self, batch_number: int) -> Iterator[Frame]:
        """The frames of the last replay, as far as it came."""
        for call in self.calls:
            replays = call.replays()
            if replays is None or replays.completed >= self._judged:
                yield replace(call, batch_number=batch_number).frame()

"""Module calls inside a CUDA graph: the hooks see them once, when it is captured; they run whenever it is replayed."""

from collections.abc import Sequence

from .errors import warn_user
from .frame_log import CapturedCall
from .recorder import Replays

__all__ = ["CapturedBatch"]


class CapturedBatch:
    """The calls of one forward that is in a graph, or of some modules of one, in execution order.

    `graph` is the number that `Recorder.capture` gives it.
    """

    def __init__(self, graph: int) -> None:
        self.graph = graph
        self.calls: list[CapturedCall] = []
        self.is_complete = False
        """Nothing will be added."""
        self.has_root = False
        """It is a whole forward of the root."""
        self.is_over = False
        """The graph is gone: what was judged is all there will be."""
        self._judged = 0

    def new_replays(self) -> tuple[int, Sequence[CapturedCall]]:
        """How many there have been since this was last asked, and the calls that the last one came to.

        Waits for the current stream.
        """
        replays = [None if (found := call.replays()) is None else Replays._make(found) for call in self.calls]
        known = [found for found in replays if found is not None]
        if not known:  # nothing in it could be read, so that there is nothing to wait for
            self.is_over = self.is_complete
            return 0, []
        latest = max(found.completed for found in known)
        failure = next((f": {found.failure}" for found in known if found.failure), "")
        if failure or any(found.completed < latest for found in known):
            warn_user(f"a replay of a CUDA graph did not come to its end, and is judged as far as it came{failure}")
        new, self._judged = latest - self._judged, latest
        self.is_over = any(found.over for found in known)
        came_to = [call for call, found in zip(self.calls, replays, strict=True) if not found or found[0] == latest]
        return new, came_to

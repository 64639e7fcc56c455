"""Which threads are in a call of the model itself, and what each of them was told there."""

import sys
import threading

from torch import nn

from .calls import calls_in_progress

__all__ = ["ThreadsInRoot"]


class ThreadsInRoot:
    """Of one model, by what hooks before and after its forward tell. Whoever calls this holds a lock."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._of: dict[int, list[BaseException | None]] = {}
        """Of each thread that is in any: the exceptions that were being handled when they began."""
        self._told: set[int] = set()
        """Threads of whose calls a detection was told."""

    @property
    def are_any(self) -> bool:
        """Whether any thread is in one."""
        return bool(self._of)

    @property
    def is_in_one(self) -> bool:
        """Whether this thread is."""
        return threading.get_ident() in self._of

    def drop_left(self) -> bool:
        """Whether there were any of this thread that were left without the hook after them, as by a KeyboardInterrupt.

        To be asked by the hook before another one, which is on the stack already.
        """
        calls = self._of.get(threading.get_ident(), [])
        if not calls:
            return False
        running = sum(call.module is self._root for call in calls_in_progress()) - 1  # where a root calls itself
        if running >= len(calls):
            return False
        self._cut(running)
        return True

    def begin(self) -> None:
        self._of.setdefault(threading.get_ident(), []).append(sys.exc_info()[1])

    def end(self) -> None:
        """The last one of this thread, if there is any: none where the hooks came during it."""
        self._cut(len(self._of.get(threading.get_ident(), [])) - 1)

    def _cut(self, length: int) -> None:
        calls = self._of.get(threading.get_ident(), [])
        del calls[max(0, length) :]
        if not calls:
            self._of.pop(threading.get_ident(), None)

    def was_raised_in_one(self, exception: BaseException) -> bool:
        """Whether an exception that is handled in the hook after the forward has ended that.

        Not if it was being handled before the forward began: then the hook is called as any other.
        """
        calls = self._of.get(threading.get_ident())
        return exception is not (calls[-1] if calls else None)

    def will_look(self, thread: int) -> bool:
        """Whether that is another one in a call, whose hook will see what is left to it."""
        if thread == threading.get_ident() or thread not in self._of:
            return False
        return any(other.ident == thread for other in threading.enumerate())  # or it has died in there

    def tell(self, thread: int | None) -> None:
        if thread in self._of:
            self._told.add(thread)

    def was_told(self, thread: int | None) -> bool:
        return thread in self._told

    def forget_told(self) -> None:
        """Of this thread, whose next call begins, or of whose last one all is judged."""
        self._told.discard(threading.get_ident())

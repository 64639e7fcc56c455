"""Where ranks wait for each other and hear what one of them has to tell: by a key-value store, without a collective."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable

import torch.distributed as dist

from .presence import Progress, connect_again

__all__ = ["Meetings"]

POLLING = 0.05  # seconds between two looks, at most
TELLER = 1 << 32  # what a rank that has something to tell adds to the count of those that have come

_made: Counter[str] = Counter()
"""Of this process, by the name of the group: they are made in the same order on all ranks."""


class Meetings:
    """Of the ranks of a group, one after another.

    Cost of one where nobody has anything to tell: four requests to the store, or five, and the wait for the last rank.

    Args:
        group: of which this process is one.
        timeout: seconds that one waits for the last rank.
        choose: which of several messages all ranks are to hear.

    Raises:
        RuntimeError: the store cannot be reached. So do all methods.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float, choose: Callable[[list[bytes]], bytes]) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._timeout = timeout
        self._choose = choose
        self._number = 0
        name = group.group_name
        self._store = connect_again(f"overflowstat/meetings/{name}/{_made[name]}", timeout)
        _made[name] += 1
        self._progress = Progress(self._store, self._rank, socket.gethostname(), self._size)

    def meet(self, message: bytes | None) -> bytes | None:
        """Come, and give the chosen message when all have come; None if there was none.

        Raises:
            TimeoutError: not all have come in time; the text names them.
        """
        number, chosen = self.come(message)
        if chosen is not None:
            return chosen or None
        end = f"{number}/end"
        begin = time.monotonic()
        while not self._store.check([end]):  # not by the store's own wait, in which Python sees no signal
            waited = time.monotonic() - begin
            if waited > self._timeout:
                missing = self._progress.names(self._progress.behind(number)) or "the last of them"
                raise TimeoutError(f"{missing} did not come within {self._timeout:g} s")
            time.sleep(min(waited / 10, POLLING))
        return self._store.get(end) or None

    def come(self, message: bytes | None) -> tuple[int, bytes | None]:
        """To the next meeting, without a wait for its end.

        Gives its number, and if this rank is the last one what is chosen, empty where nobody has told anything.
        """
        number, self._number = self._number, self._number + 1
        if message is not None:
            self._store.set(f"{number}/message/{self._rank}", message)  # type: ignore[arg-type]  # bytes are taken
        self._progress.reach(number)
        come = self._store.add(f"{number}/come", 1 if message is None else 1 + TELLER)
        if come % TELLER < self._size:
            return number, None
        chosen = self._choose(self._messages(number)) if come >= TELLER else b""
        self._store.set(f"{number}/end", chosen)  # type: ignore[arg-type]
        for key in ("come", "end"):
            self._store.delete_key(f"{number - 1}/{key}")  # which all have left
        return number, chosen

    def _messages(self, number: int) -> list[bytes]:
        keys = [f"{number}/message/{rank}" for rank in range(self._size)]
        return [self._store.get(key) for key in keys if self._store.check([key])]

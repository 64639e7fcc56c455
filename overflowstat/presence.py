"""Who of a group of processes is there, how far each has come, and which of them have fallen silent.

All by a key-value store, which works where collectives hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["SILENCE", "Member", "Presence", "Progress", "Store", "connect", "connect_again"]

BEAT = 0.5  # seconds between two signs of life
SILENCE = 5 * BEAT  # without one: stopped, dead, or cut off


class Member(NamedTuple):
    rank: int
    host: str
    local_rank: int

    @property
    def name(self) -> str:
        return f"{self.host}-{self.local_rank}"


class Progress:
    """How far each process has come, of one of them.

    Args:
        store: what all processes of the run reach.
        rank: of this process.
        name: of the same, for the others.
        size: how many there are.
    """

    def __init__(self, store: Store, rank: int, name: str, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        store.set(f"member/{rank}", name)

    def reach(self, stage: int) -> None:
        """Tell that this process has come so far."""
        self._store.set(f"stage/{self._rank}", str(stage))

    def behind(self, stage: int) -> list[int]:
        """Ranks that have not."""
        return [rank for rank in range(self._size) if int(self._get(f"stage/{rank}", "-1")) < stage]

    def names(self, ranks: Iterable[int]) -> str:
        """As "rank 3 [host-1], rank 4, which never started"."""
        return ", ".join(f"rank {rank}{self._where(rank)}" for rank in ranks)

    def _where(self, rank: int) -> str:
        found = self._get(f"member/{rank}", "")
        return f" [{found}]" if found else ", which never started"

    def _get(self, key: str, default: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else default


class Presence(Progress):
    """Of one process, which gives signs of life from a thread of its own until `close`.

    Args:
        store: what all processes of the run reach.
        second: the same by another connection, since one that waits answers nothing else.
        me: this process.
        size: how many there are.
    """

    def __init__(self, store: Store, second: Store, me: Member, size: int) -> None:
        super().__init__(second, me.rank, me.name, size)
        self.store = store
        self.me = me
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        while not self._closed.wait(BEAT):
            try:
                self._store.add(f"beat/{self.me.rank}", 1)
            except RuntimeError:
                return  # the store is gone, which whoever asks it will find

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def wait_for_all(self, stage: int, timeout: float) -> list[int]:
        """Until all have come so far, or for so many seconds. Gives those that have not."""
        end = time.monotonic() + timeout
        while (missing := self.behind(stage)) and time.monotonic() < end:
            time.sleep(BEAT / 10)
        return missing

    def silent(self) -> list[int]:
        """Ranks that give no sign of life, those that were never there among them. Takes some seconds."""
        before = self._beats()
        time.sleep(SILENCE)
        return [rank for rank, beats in enumerate(self._beats()) if beats == before[rank] and rank != self.me.rank]

    def _beats(self) -> list[int]:
        return [int(self._get(f"beat/{rank}", "0")) for rank in range(self._size)]


def connect_again(prefix: str, timeout: float) -> Store:
    """To the store by which the default group was formed: a connection of its own, since torch's threads use that."""
    default: Any = dist.distributed_c10d._get_default_store()
    store = PrefixStore(prefix, default.clone())
    store.set_timeout(timedelta(seconds=timeout))
    return store


def connect(host: str, port: int, prefix: str, timeout: float, is_host: bool) -> Store:
    """One more connection to a store at an address. Raises RuntimeError where nobody answers in so many seconds."""
    store = TCPStore(host, port, is_master=is_host, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    return PrefixStore(prefix, store)

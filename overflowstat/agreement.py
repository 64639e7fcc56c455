"""That all ranks raise at the same batch: what one of them has found, the others are told where it ends."""

from __future__ import annotations

import contextlib
import pickle
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from .errors import AgreementError, NonFiniteError
from .ranks import Process, rank_and_world_size

if TYPE_CHECKING:
    from .meetings import Meetings

__all__ = ["Agreement", "Position", "make_agreement"]

TIMEOUT = 600.0  # seconds: as long as NCCL waits

Position = tuple[int, bool, int, int]
"""Batch, whether in its backward, frame, and line of it: weights are before what was computed with them."""


@dataclass(frozen=True, slots=True)
class _Told:
    position: Position
    process: Process
    error: NonFiniteError | None
    """Without its frames. None where the rank has left the batch by something else."""
    left_by: str = ""

    @property
    def order(self) -> tuple[bool, Position, int]:
        return self.error is None, self.position, self.process.rank


def _first(messages: list[bytes]) -> bytes:
    # Unpickled is what the ranks of this run have written, as by torch's own object collectives.
    return min(messages, key=lambda message: pickle.loads(message).order)


class Agreement:
    """Of one monitor with those of the other ranks.

    Args:
        model: that of this rank.
        group: the ranks that end together, of which this process is one; None for all.
        timeout: seconds that a meeting waits for the last rank.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._model = model
        self._group = group
        self._timeout = timeout
        self._meetings: Meetings | None = None
        self._formed: weakref.ref[dist.ProcessGroup] | None = None
        """The default group by which they are, whose threads and connections end when nobody keeps it."""
        self._found: tuple[Position, NonFiniteError] | None = None
        self._gradients_follow = False

    def keep(self, position: Position, error: NonFiniteError) -> None:
        """To be raised at the next meeting, unless something has been kept for it before."""
        if self._found is None:
            self._found = position, error

    def take(self) -> NonFiniteError | None:
        """What is kept, and is not any more."""
        kept, self._found = self._found, None
        return None if kept is None else kept[1]

    def end_batch(self, gradients_follow: bool) -> None:
        """Wait until all ranks have come here. See `meet`."""
        self._gradients_follow = gradients_follow
        self.meet()

    def begin_batch(self) -> None:
        """The same for what gradients have come since, if any could."""
        if self._gradients_follow:
            self._gradients_follow = False
            self.meet()

    def meet(self) -> None:
        """Wait until all ranks have come here.

        Raises:
            NonFiniteError: what was found first in the order of execution, on all ranks.
            AgreementError: a rank does not come in time, or has left by an exception; or the store does not answer.
        """
        told, found = self._told(), self.take()
        try:
            meetings = self._connected()
            if meetings is None:
                first = told
            else:
                message = meetings.meet(None if told is None else pickle.dumps(told))
                first = None if message is None else pickle.loads(message)
        except (RuntimeError, OSError) as failure:  # TimeoutError among them
            error = _agreement_error(failure, self._timeout)
            if found is None:
                raise error from failure
            raise found from error
        if first is None:
            return
        if first.error is None:
            raise AgreementError(f"{first.process.name} has left batch {first.position[0]} by {first.left_by}")
        if found is not None and told is not None and first.process == told.process:
            raise found
        also = "" if found is None else f"\nand on this rank: {found}"
        frames = () if found is None else found.frames
        raise NonFiniteError(
            f"{first.error}{also}", first.error.batch_number, frames, first.error.verdict, first.process
        )

    def leave(self, batch_number: int, by: str) -> NonFiniteError | None:
        """Tell the others that this rank is not to be waited for, and why, or what it had found; and give that."""
        told, found = self._told(), self.take()
        if told is None:
            told = _Told((batch_number, False, 0, 0), Process.of(self._model), None, by)
        with contextlib.suppress(RuntimeError, OSError):  # what it leaves by is what matters
            meetings = self._connected()
            if meetings is not None:
                meetings.come(pickle.dumps(told))
        return found

    def _told(self) -> _Told | None:
        if self._found is None:
            return None
        position, found = self._found
        process = Process.of(self._model)
        return _Told(position, process, NonFiniteError(str(found), found.batch_number, (), found.verdict, process))

    def _connected(self) -> Meetings | None:
        """None where this process is alone."""
        if not dist.is_available() or not dist.is_initialized():
            if self._meetings is not None:
                raise AgreementError("the process group was destroyed, which agree=True needs until monitor.remove()")
            if rank_and_world_size()[1] > 1:
                raise AgreementError("agree=True needs a process group: call init_process_group() before the model")
            return None
        formed = dist.group.WORLD
        assert formed is not None
        if self._formed is None or self._formed() is not formed:  # formed anew, maybe by another store
            try:
                self._meetings = self._connect(self._group or formed)
            except ValueError as error:  # of torch, which does not know the group any more
                raise AgreementError("the process group of `group=` was destroyed: make a new monitor") from error
            self._formed = weakref.ref(formed)
        return self._meetings

    def _connect(self, group: dist.ProcessGroup) -> Meetings | None:
        if dist.get_world_size(group) == 1:
            return None
        from .meetings import Meetings  # there are builds of torch without its stores

        return Meetings(group, self._timeout, _first)


def make_agreement(model: nn.Module, agree: object, group: object) -> Agreement | None:
    """As arguments of a monitor of this model ask for; raises TypeError or ValueError where they are none."""
    if group is not None and (not dist.is_available() or not isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"group={group!r}: must be a group of torch.distributed that this process is in")
    if agree is False:
        return None
    if not isinstance(agree, (bool, int, float)):
        raise TypeError(f"agree={agree!r}: must be True, False or seconds, not {type(agree).__name__}")
    if not 0 < agree < float("inf"):
        raise ValueError(f"agree={agree!r}: must be True, False or seconds, above 0")
    return Agreement(model, group, TIMEOUT if agree is True else float(agree))


def _agreement_error(failure: Exception, timeout: float) -> AgreementError:
    if isinstance(failure, AgreementError):
        return failure
    if isinstance(failure, TimeoutError):
        return AgreementError(
            f"the ranks did not end the batch together: {failure}. A rank has died, hangs, or runs fewer batches; "
            f"where one is only slow, agree={10 * timeout:g} waits as many seconds"
        )
    return AgreementError(f"the store of all ranks, which rank 0 or its launcher keeps, does not answer: {failure}")

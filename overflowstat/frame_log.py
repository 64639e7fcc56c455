"""The module calls of a run, kept as numbers: those that are not judged yet, and the last ones that were.

There are two logs, which do the same: `PlainFrameLog` with any recorder, and `NativeFrameLog`, where one call of
csrc/frame_log.cpp does all that a hook has to do.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from .frames import Frame
from .measurement import Measurement
from .policy import Policy, Rule
from .row import NOTHING

__all__ = ["SHOWN", "CapturedCall", "Counters", "FrameLog", "rules_of"]

SHOWN = Rule(True, NOTHING)


class Counters(NamedTuple):
    """What watching has cost so far."""

    frames: int
    """Module calls."""
    tensors: int
    """That were read; one that is met again unchanged is not."""
    bytes_read: int
    bytes_reused: int
    """Of tensors that were shown again without being read."""
    launches: int
    """Of kernels on GPUs; 0 where plain torch reads, which launches many."""
    syncs: int
    """Waits for numbers that were still on their way from a GPU when they were asked for."""


class CapturedCall(Protocol):
    """A module call inside a CUDA graph."""

    def replays(self) -> tuple[int, bool, str] | None:
        """`Replays` of the graph; None if nothing of this call was read there. May wait."""
        ...


class FrameLog(Protocol):
    def add_module(self, number: int, name: str, module: nn.Module) -> None:
        """The next one, by its number."""
        ...

    def drop_module(self, number: int) -> None:
        """It is no part of the model any more."""
        ...

    def set_children(self, number: int, children: Sequence[tuple[str, int]]) -> None:
        """The own children of a module, by name and number.

        As long as one of them has not been called, its weights are shown in the calls of the module: as a rule that
        uses them itself, as nn.MultiheadAttention does with those of its out_proj.
        """
        ...

    def start_batch(self, number: int, keep_weights: bool) -> None:
        """What follows belongs to the batch of this number, but for recomputes, which belong to the last one.

        With `keep_weights` a weight that has not changed since it was read in an earlier one is not read again.
        """
        ...

    def configure(self, is_watching: bool, is_told: bool, always_look: bool, reuse: bool) -> None:
        """How the calls that follow are treated.

        Args:
            is_watching: without it `call` does nothing.
            is_told: `next` gives all of their frames, not only the bad ones.
            always_look: `call` is true wherever it has not judged a call itself.
            reuse: a tensor that is met again in the batch unchanged is not read again.
        """
        ...

    def forget_weights(self) -> None:
        """All of them may have changed."""
        ...

    def call(self, number: int, module: nn.Module, args: object, kwargs: Mapping[str, object], output: object) -> bool:
        """Keep a call of the module of this number, and read now what it shows.

        True if there is something to look at: `next` has a frame, or `take_captured` a call.
        """
        ...

    def add(self, number: int, module: nn.Module, labels: Sequence[str], read: Measurement, calls: int) -> bool:
        """Keep calls of the module of this number, so many in one, of which all but the weights was read elsewhere.

        Args:
            labels: of its lines, in UTF-8, whose contents `read` has.

        True as `call` is.
        """
        ...

    def hook(self, number: int, module: nn.Module, look: Callable[[], None]) -> Callable[..., None]:
        """A forward hook for a module, with its keyword inputs, that does `call`, and then look() if that is true."""
        ...

    def next(self, wait: bool) -> Frame | None:
        """Judge calls in the order in which they ran up to one that is bad, notable or to be told, which is given.

        None if there is none among those whose numbers are there or, with `wait`, among all. Waits anyway where the
        last call is known to be bad, since only what ran before it is then still to be judged.
        """
        ...

    def tensor(self, line: int) -> Tensor | None:
        """That of a line of the frame that `next` gave last, if it is still there and was not written to since."""
        ...

    def thread(self) -> int | None:
        """On which the call ran of the frame that was given last, as `threading.get_ident` has it.

        None of one in a CUDA graph, which runs on none.
        """
        ...

    def take_captured(self) -> tuple[int, CapturedCall] | None:
        """The next call that was captured into a CUDA graph and has not been taken, with the graph's number."""
        ...

    def drop_batch(self, number: int) -> None:
        """Forget calls of this batch that are not judged yet."""
        ...

    def kept(self) -> list[Frame]:
        """The last ones that were judged."""
        ...

    def judge_captured(self, call: Any, batch_number: int, starts_batch: bool) -> Frame:
        """Keep and give what the last replay of the graph left of a `CapturedCall` of this log."""
        ...

    def clear_kept(self) -> None: ...

    @property
    def pending(self) -> int:
        """How many calls are not judged yet."""
        ...

    @property
    def is_begun(self) -> bool:
        """Whether a module was called in this batch, watched or not."""
        ...

    @property
    def calls(self) -> int: ...

    def counters(self) -> Counters: ...


def rules_of(policy: Policy | None, name: str, module: nn.Module) -> Callable[[str], Rule] | None:
    """label -> rule, for the lines of a module. Does not keep it."""
    if policy is None:
        return None
    reference = weakref.ref(module)

    def find(label: str) -> Rule:
        module = reference()
        return SHOWN if module is None else policy.rule(name, module, label)

    return find

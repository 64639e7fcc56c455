"""Which tensors have been read already, and have not been written to since. Does what csrc/unchanged.h does."""

from typing import NamedTuple, TypeGuard

from torch import Tensor

from .measurement import Place
from .tensor_state import TensorState

__all__ = ["Known", "Unchanged", "can_know"]

FEWEST = 1024


class Known(NamedTuple):
    state: TensorState
    place: Place
    size: int
    """Bytes of memory that were read."""


class Unchanged:
    """Tensors and where what was read of them is. Keeps no tensor. Not seen is what TensorState does not see."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._sweep_at = FEWEST

    def find(self, tensor: Tensor) -> Known | None:
        """None if the tensor is not known, or was written to since."""
        known = self._known.get(id(tensor))
        return known if known and known.state.tensor() is tensor else None

    def last(self, tensor: Tensor) -> Known | None:
        """What was read of it last, though it may have been written to since."""
        known = self._known.get(id(tensor))
        return known if known and known.state.reference() is tensor else None

    def insert(self, tensor: Tensor, place: Place, size: int) -> None:
        """Nothing happens with those that could be written to unseen: inference tensors, wrappers without storage."""
        state = place.measurement.state(place.position)
        if _tells_of_writes(state):
            if len(self._known) >= self._sweep_at:
                self._sweep()
            self._known[id(tensor)] = Known(state, place, size)

    def clear(self) -> None:
        self._known.clear()

    def _sweep(self) -> None:
        """A batch may have any number of calls, if nobody ends it; what is gone is of no use."""
        self._known = {key: known for key, known in self._known.items() if known.state.reference() is not None}
        self._sweep_at = max(FEWEST, 2 * len(self._known))


def can_know(tensor: Tensor) -> bool:
    return _tells_of_writes(TensorState.of(tensor))


def _tells_of_writes(state: TensorState | None) -> TypeGuard[TensorState]:
    return state is not None and state.version is not None

"""Which tensors have been read already, and have not been written to since. Does what csrc/unchanged.h does."""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .measurement import Place
from .stats import shape_of

__all__ = ["Known", "Unchanged", "can_know"]


FEWEST = 1024


class _State(NamedTuple):
    """What differs after a write or a swap of `.data`, also for another view of the same memory.

    An address would not do, since freed memory is soon used again; the weak reference keeps the storage's identity, and
    not its memory. The address is there for storage that is freed and comes back as it was.
    """

    version: int
    storage: StorageWeakRef
    address: int
    offset: int
    shape: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Known(NamedTuple):
    tensor: "weakref.ref[Tensor]"
    state: _State
    place: Place
    size: int
    """Bytes of memory that were read."""


class Unchanged:
    """Tensors and where what was read of them is. Keeps no tensor.

    Not seen are writes that change none of these, as into what `.data` gives, through NumPy or by a raw kernel.
    """

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._sweep_at = FEWEST

    def find(self, tensor: Tensor) -> Known | None:
        """None if the tensor is not known, or was written to since."""
        known = self._known.get(id(tensor))
        return known if known and known.tensor() is tensor and known.state == _state(tensor) else None

    def insert(self, tensor: Tensor, place: Place, size: int) -> None:
        """Nothing happens with those that could be written to unseen: inference tensors, wrappers without storage."""
        if (state := _state(tensor)) is not None:
            if len(self._known) >= self._sweep_at:
                self._sweep()
            self._known[id(tensor)] = Known(weakref.ref(tensor), state, place, size)

    def clear(self) -> None:
        self._known.clear()

    def _sweep(self) -> None:
        """A batch may have any number of calls, if nobody ends it; what is gone is of no use."""
        self._known = {key: known for key, known in self._known.items() if known.tensor() is not None}
        self._sweep_at = max(FEWEST, 2 * len(self._known))


def can_know(tensor: Tensor) -> bool:
    return _state(tensor) is not None


def _state(tensor: Tensor) -> _State | None:
    try:
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.is_inference():  # also one that has got the `.data` of such, and has a version that stays
                return None
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            address, offset = storage.data_ptr(), int(tensor.storage_offset())
            return _State(tensor._version, reference, address, offset, shape_of(tensor))
    except Exception:
        return None

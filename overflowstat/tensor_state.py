"""A tensor, and what of it differs after a write. Does what csrc/tensor_state.h does."""

import weakref
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .stats import shape_of

__all__ = ["TensorState"]


class TensorState(NamedTuple):
    """What differs after a write to a tensor or a swap of its `.data`, also for another view of the same memory.

    Keeps no tensor. An address would not do, since freed memory is soon used again; the weak reference keeps the
    storage's identity, and not its memory. The address is there for storage that is freed and comes back as it was.
    Not seen are writes that change none of these, as into what `.data` gives, through NumPy or by a raw kernel.
    """

    reference: "weakref.ref[Tensor]"
    version: int | None
    """None in inference mode, where no write is seen."""
    storage: StorageWeakRef
    address: int
    offset: int
    shape: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]

    @classmethod
    def of(cls, tensor: Tensor) -> Optional["TensorState"]:
        """None for a tensor that has no storage of its own."""
        try:
            with torch._C.DisableTorchFunction():
                storage = tensor.untyped_storage()
                return cls(
                    weakref.ref(tensor),
                    None if tensor.is_inference() else tensor._version,
                    StorageWeakRef(storage),  # type: ignore[no-untyped-call]
                    # Of the storage it would be asked in order to write, which copies what is lazily cloned.
                    torch._C._data_address(tensor),  # type: ignore[attr-defined]
                    int(tensor.storage_offset()),
                    shape_of(tensor),
                )
        except Exception:  # of a subclass's own making
            return None

    def tensor(self) -> Tensor | None:
        """None if it is gone, or was written to since."""
        tensor = self.reference()
        now = None if tensor is None else TensorState.of(tensor)
        # Not the references, which would compare the elements.
        return tensor if now is not None and now[1:] == self[1:] else None

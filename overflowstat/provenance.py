"""Of each element of a tensor that is not finite, which operation it comes from, by the number of that operation."""

import torch
from torch import Tensor

__all__ = ["UNMET", "Provenance", "is_whole", "not_finite", "storage_of"]

UNMET = 0
"""Of what was there before, and has not been met yet."""


class Provenance:
    """Kept for memory, not for tensors, so that a view tells what was written to what it is a view of.

    Where all that is bad in a storage has one number, that number is kept; else one of each element, four bytes each.
    What it says of an element that is finite means nothing.
    """

    def __init__(self) -> None:
        self._of: dict[int, int | Tensor] = {}  # by storage
        self._itemsize: dict[int, int] = {}

    def of(self, tensor: Tensor) -> int | Tensor:
        """One number for all of its elements, or one for each, of its shape."""
        storage = storage_of(tensor)
        known = self._of.get(storage, UNMET)
        if isinstance(known, int):
            return known
        if self._itemsize[storage] != tensor.itemsize:  # seen as another dtype
            return _earliest(known)
        return known.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def numbers(self, tensor: Tensor, which: Tensor | None) -> set[int]:
        """Of those of its elements that `which` tells."""
        found = self.of(tensor)
        if isinstance(found, int):
            return {found}
        return set((found if which is None else found[which]).flatten().tolist())

    def put(self, tensor: Tensor, number: int | Tensor) -> None:
        """That it was written, by one operation or by one for each element."""
        storage = storage_of(tensor)
        known = self._of.get(storage, UNMET)
        if isinstance(number, int) and (is_whole(tensor) or (isinstance(known, int) and number == known)):
            self._of[storage] = number
            return
        try:
            if isinstance(known, int):
                count = tensor.untyped_storage().nbytes() // tensor.itemsize
                known = torch.full((count,), known, dtype=torch.int32, device=tensor.device)
            elif self._itemsize[storage] != tensor.itemsize:
                raise ValueError("seen as another dtype")
            written = known.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            written.copy_(number) if isinstance(number, Tensor) else written.fill_(number)
        except (RuntimeError, ValueError, NotImplementedError):  # of one that has no strides, or overlaps itself
            self._of[storage] = number if isinstance(number, int) else _earliest(number)
            return
        self._of[storage], self._itemsize[storage] = known, tensor.itemsize

    def meet(self, tensor: Tensor, number: int) -> None:
        """That what of its storage is `UNMET` was there before."""
        known = self._of.get(storage_of(tensor), UNMET)
        if isinstance(known, Tensor):
            known[known == UNMET] = number
        elif known == UNMET:
            self._of[storage_of(tensor)] = number

    def forget(self, tensor: Tensor) -> None:
        """That all of its storage is finite, or new: it may have the place of one that was freed."""
        self._of.pop(storage_of(tensor), None)


def _earliest(numbers: Tensor) -> int:
    known = numbers[numbers != UNMET]
    return int(known.min()) if len(known) else UNMET


def not_finite(tensor: Tensor) -> Tensor | None:
    """Which elements; None where torch cannot tell."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    try:
        return ~torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor)
    except (RuntimeError, NotImplementedError):
        return None


def is_whole(tensor: Tensor) -> bool:
    """Whether it is all that is in its storage."""
    try:
        return tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes()
    except Exception:  # of a subclass's own making
        return True


def storage_of(tensor: Tensor) -> int:
    try:
        with torch._C.DisableTorchFunction():
            return int(tensor.untyped_storage()._cdata)
    except Exception:  # of one that has none
        return id(tensor)

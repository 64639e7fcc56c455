"""What reads tensors: the native extension where it can, plain torch elsewhere.

A recorder takes any number of tensors and gives a `Row` for each. The two are interchangeable: same rows, other cost.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from . import native
from .row import Row
from .torch_recorder import TorchRecorder

__all__ = ["NativeRecorder", "Recorder", "RecorderName", "make_recorder"]

RecorderName = Literal["auto", "native", "torch"]


class Recorder(Protocol):
    name: str

    def read(self, tensors: Sequence[Tensor]) -> Sequence[Row]:
        """The rows of strided tensors of any of `overflowstat.stats.READABLE_DTYPES`, in order."""
        ...


class NativeRecorder:
    """Reads with `overflowstat._C`: one pass over each tensor, all of a list in one launch a device.

    Tensors on devices that the extension was not built for, and those inside torch.func's transforms, are passed on to
    plain torch.
    """

    name = "native"

    def __init__(self, extension: Any) -> None:
        self._extension = extension
        self._devices = {"cpu", "cuda"} if extension.has_cuda else {"cpu"}
        self._elsewhere = TorchRecorder()

    def read(self, tensors: Sequence[Tensor]) -> list[Row]:
        here = [self._can_read(t) for t in tensors]
        rows = map(Row._make, self._extension.read([t for t, can in zip(tensors, here, strict=True) if can]))
        if all(here):
            return list(rows)
        others = iter(self._elsewhere.read([t for t, can in zip(tensors, here, strict=True) if not can]))
        return [next(rows if can else others) for can in here]

    def _can_read(self, tensor: Tensor) -> bool:
        """Not what torch.func wraps, either: it has no memory of its own."""
        return tensor.device.type in self._devices and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def make_recorder(name: RecorderName = "auto") -> Recorder:
    """The recorder of that name; "auto" is the native one if it is there, else plain torch.

    Raises ValueError for another name, and RuntimeError with the reason if "native" is not usable.
    """
    if name not in ("auto", "native", "torch"):
        raise ValueError(f'recorder={name!r}: must be "auto", "native" or "torch"')
    extension = None if name == "torch" else native.load()
    if extension is not None:
        return NativeRecorder(extension)
    if name == "native":
        raise RuntimeError(f'recorder="native" is not usable: {native.reason()}')
    return TorchRecorder()

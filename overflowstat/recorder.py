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

__all__ = ["NativeRecorder", "Reading", "Recorder", "RecorderName", "make_recorder"]

RecorderName = Literal["auto", "native", "torch"]


class Reading(Protocol):
    """Rows on their way."""

    def ready(self) -> bool:
        """Whether `rows` would not wait. Never waits itself."""
        ...

    def rows(self) -> Sequence[Row | str]:
        """A row for each tensor, in order; where none will ever come, because a device failed, the reason.

        Waits, for a bounded time, until that is known.
        """
        ...


class Recorder(Protocol):
    name: str

    def record(self, tensors: Sequence[Tensor]) -> Reading:
        """Begin to read strided tensors of any of `overflowstat.stats.READABLE_DTYPES`, as they are now.

        Never waits for a device; tensors in host memory are read before this returns. They may be written to or freed
        afterwards, on the stream that is current now.
        """
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

    def record(self, tensors: Sequence[Tensor]) -> Reading:
        here = [self._can_read(t) for t in tensors]
        reading = _NativeReading(self._extension.record([t for t, can in zip(tensors, here, strict=True) if can]))
        if all(here):
            return reading
        others = self._elsewhere.record([t for t, can in zip(tensors, here, strict=True) if not can])
        return _MixedReading(here, reading, others)

    def _can_read(self, tensor: Tensor) -> bool:
        """Not what torch.func wraps, either: it has no memory of its own."""
        return tensor.device.type in self._devices and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


class _NativeReading:
    def __init__(self, reading: Any) -> None:
        self._reading = reading

    def ready(self) -> bool:
        return bool(self._reading.ready())

    def rows(self) -> list[Row | str]:
        return [row if isinstance(row, str) else Row._make(row) for row in self._reading.rows()]


class _MixedReading:
    """The rows of two readings, `here` telling which of them each one comes from."""

    def __init__(self, here: list[bool], native: Reading, elsewhere: Reading) -> None:
        self._here = here
        self._native = native
        self._elsewhere = elsewhere

    def ready(self) -> bool:
        return self._native.ready() and self._elsewhere.ready()

    def rows(self) -> list[Row | str]:
        native, elsewhere = iter(self._native.rows()), iter(self._elsewhere.rows())
        return [next(native if is_here else elsewhere) for is_here in self._here]


def make_recorder(name: RecorderName | Recorder = "auto") -> Recorder:
    """The recorder of that name; "auto" is the native one if it is there, else plain torch. A recorder is itself.

    Raises ValueError for another name, and RuntimeError with the reason if "native" is not usable.
    """
    if not isinstance(name, str):
        return name
    if name not in ("auto", "native", "torch"):
        raise ValueError(f'recorder={name!r}: must be "auto", "native" or "torch"')
    extension = None if name == "torch" else native.load()
    if extension is not None:
        return NativeRecorder(extension)
    if name == "native":
        raise RuntimeError(f'recorder="native" is not usable: {native.reason()}')
    return TorchRecorder()

"""What a call of the whole model began with."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .capture import is_tensor
from .run_state import RunState

__all__ = ["RootCall"]

MAX_DEPTH = 4


@dataclass(frozen=True)
class RootCall:
    """Keeps no tensor of the model's."""

    batch_number: int
    state: RunState
    inputs: tuple[tuple["weakref.ref[Tensor]", int | None], ...]
    """The tensors that it was given, also in lists, tuples and dicts, and their versions then; None for one without."""

    @classmethod
    def begins(cls, batch_number: int, args: Sequence[object], kwargs: Mapping[str, object]) -> "RootCall":
        """Cost: some microseconds."""
        tensors = _tensors([*args, *kwargs.values()], depth=0)
        return cls(batch_number, RunState.now(), tuple((weakref.ref(t), _version(t)) for t in tensors))

    def is_as_it_was(self, tensor: Tensor) -> bool:
        """Whether a tensor is one that it was given, and has not been written to; False where that would not show."""
        return any(
            known() is tensor and version == _version(tensor) for known, version in self.inputs if version is not None
        )

    def has_changed(self, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
        """Whether what it was given has been written to since, as far as that shows, or holds other tensors."""
        now = list(_tensors([*args, *kwargs.values()], depth=0))
        if len(now) != len(self.inputs):
            return True
        pairs = zip(self.inputs, now, strict=True)
        return any(known() is not tensor or _version(tensor) != version for (known, version), tensor in pairs)


def _tensors(values: Iterable[object], depth: int) -> Iterator[Tensor]:
    for value in values:
        kind = type(value)  # an object may say of its class what it likes; and none of a subclass's own code is run
        if is_tensor(value):
            yield value
        elif depth < MAX_DEPTH and issubclass(kind, list):
            yield from _tensors(list.__iter__(cast("list[object]", value)), depth + 1)
        elif depth < MAX_DEPTH and issubclass(kind, tuple):
            yield from _tensors(tuple.__iter__(cast("tuple[object]", value)), depth + 1)
        elif depth < MAX_DEPTH and issubclass(kind, dict):
            yield from _tensors(dict.values(cast("dict[object, object]", value)), depth + 1)


def _version(tensor: Tensor) -> int | None:
    with torch._C.DisableTorchFunction():
        return None if is_lazy(tensor) or tensor.is_inference() else tensor._version

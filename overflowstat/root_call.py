"""What a call of the whole model began with."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .capture import is_tensor
from .run_state import RunState

__all__ = ["RootCall"]


@dataclass(frozen=True)
class RootCall:
    """Keeps no tensor of the model's."""

    batch_number: int
    state: RunState
    inputs: tuple[tuple["weakref.ref[Tensor]", int], ...]
    """The tensors that it was given, and their versions then. Not those that lie deeper."""

    @classmethod
    def begins(cls, batch_number: int, args: Sequence[object], kwargs: Mapping[str, object]) -> "RootCall":
        """Cost: some microseconds."""
        tensors = [value for value in (*args, *kwargs.values()) if is_tensor(value)]
        return cls(batch_number, RunState.now(), tuple((weakref.ref(t), _version(t)) for t in tensors))

    def has_written_to_inputs(self) -> bool:
        return any((tensor := known()) is not None and _version(tensor) != version for known, version in self.inputs)


def _version(tensor: Tensor) -> int:
    """0 where none is kept."""
    with torch._C.DisableTorchFunction():
        return 0 if is_lazy(tensor) or tensor.is_inference() else tensor._version

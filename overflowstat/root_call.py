"""What a call of the whole model began with."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
    def begins(
        cls, batch_number: int, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> "RootCall":
        """Cost: some microseconds."""
        device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        inputs = tuple((weakref.ref(tensor), tensor._version) for tensor in tensors if not tensor.is_inference())
        return cls(batch_number, RunState.now([device]), inputs)

    def has_written_to_inputs(self) -> bool:
        return any((tensor := known()) is not None and tensor._version != version for known, version in self.inputs)

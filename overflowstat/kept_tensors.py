"""Tensors that are put back as they were, whatever is written to them meanwhile."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

__all__ = ["KeptTensors"]


class KeptTensors:
    """Their numbers and their versions, so that autograd takes them for what it has saved. Holds a copy of each."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor, AbstractContextManager[None]]] = []

    def keep(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            memory = _memory(tensor.detach())
            as_it_was = nullcontext() if tensor.is_inference() else _unsafe_preserve_version_counter(tensor)
            self._kept.append((memory, memory.clone(), as_it_was))

    def put_back(self) -> None:
        """The first copy of one that was kept several times is the one that stays."""
        for tensor, copy, as_it_was in reversed(self._kept):
            with torch.no_grad(), torch.inference_mode(tensor.is_inference()), as_it_was:
                tensor.copy_(copy)
        self._kept.clear()


def _memory(tensor: Tensor) -> Tensor:
    """All of it in a row, with what lies between: elements that share memory cannot be written to as they are."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.numel() == 0:
        return tensor
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,))

"""What the backwards in progress began with, as told by the stack."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = ["Edge", "backward_roots"]

Edge = tuple[Any, int]
"""An output of a node of autograd's."""

_BACKWARDS = {torch.autograd.backward.__code__: "tensors", torch.autograd.grad.__code__: "outputs"}


def backward_roots(all_threads: bool = False) -> list[Edge]:
    """Those of the tensors that were given to torch's own functions, which have a node. Empty if none is to be found.

    These functions are on the stack of this thread or, where autograd runs a device in another one, of some other.
    Those of a backward inside of another one, as reentrant checkpoints run it, are among them.

    Args:
        all_threads: give those of other threads, too, if there are some on this one.
    """
    found = list(_on(sys._getframe(1)))
    if all_threads or not found:
        for frame in sys._current_frames().values():
            found += _on(frame)
    return found


def _on(frame: FrameType | None) -> Iterator[Edge]:
    while frame is not None:
        if frame.f_code in _BACKWARDS:
            given: Any = frame.f_locals.get(_BACKWARDS[frame.f_code]) or ()
            for root in [given] if isinstance(given, Tensor) or hasattr(given, "node") else given:
                node = getattr(root, "grad_fn", None) or getattr(root, "node", None)  # of a tensor, or a GradientEdge
                if node is not None:
                    yield node, root.output_nr
        frame = frame.f_back

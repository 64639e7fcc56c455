"""Whether a backward is that of a loss which a GradScaler has multiplied.

Its infinities are then no fault: the scaler looks for them, skips the optimizer's step and lowers its scale.
"""

import gc
import sys
from types import FrameType
from typing import Any

import torch
from torch.amp import GradScaler

__all__ = ["scaler_in_use", "seems_scaled"]

_BACKWARDS = {torch.autograd.backward.__code__: "tensors", torch.autograd.grad.__code__: "outputs"}


def seems_scaled() -> bool:
    """Whether that of the backward in progress may be, by its last operation: a product with what needs no gradient.

    To be asked in the backward. True where it cannot be told. The tensors are arguments of torch's own function, which
    is on the stack of this thread or, where autograd runs a device in another one, of some other.
    """
    here = sys._getframe(1)
    tensors = _tensors_of_backward(here)
    if tensors is None:
        frames = sys._current_frames().values()
        tensors = next((found for frame in frames if (found := _tensors_of_backward(frame)) is not None), None)
    if tensors is None:
        return True
    return any(_is_product(tensor) for tensor in ([tensors] if isinstance(tensors, torch.Tensor) else tensors))


def _tensors_of_backward(frame: FrameType | None) -> Any:
    while frame is not None:
        if frame.f_code in _BACKWARDS:
            return frame.f_locals.get(_BACKWARDS[frame.f_code])
        frame = frame.f_back
    return None


def _is_product(tensor: Any) -> bool:
    node = getattr(tensor, "grad_fn", None)
    return node is not None and node.name() == "MulBackward0" and node.next_functions[1][0] is None


def scaler_in_use() -> GradScaler | None:
    """One that has multiplied a loss already. Looks through all objects of the process: for a detection, not for hooks.

    A scaler leaves no other trace: what it multiplies keeps the scale only until the backward has passed there, and
    its `step` does not call an optimizer whose step it skips. To wrap its methods would be to change torch for all.
    """
    for value in gc.get_objects():
        if issubclass(type(value), GradScaler) and value.is_enabled() and value._scale is not None:
            return value  # type: ignore[no-any-return]
    return None

"""Which tensors of a structure hold numbers that are not finite."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import capture
from .measurement import measure
from .recorder import Recorder
from .row import NOTHING, NonFinite

__all__ = ["first_bad_tensor", "kinds_in", "tensors_in"]


def tensors_in(values: object) -> Iterator[Tensor]:
    """As a monitor finds them in what a module gives."""
    return (value for _, value in capture.outputs(values, nested=True) if capture.is_tensor(value))


def first_bad_tensor(recorder: Recorder, values: object) -> Tensor | None:
    # Without modes: reading is no operation of the forward that is watched.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return next((tensor for tensor in tensors_in(values) if kinds_in(recorder, tensor)), None)


def kinds_in(recorder: Recorder, tensor: Tensor) -> NonFinite:
    """What a tensor holds, or its parts do. May wait."""
    opened = [part for _, part in capture.opened("", tensor) if capture.is_tensor(part)]
    # Zeros that have no memory cannot be read below the layer of torch that stands in for it, where a mode runs.
    parts = [part for part in opened if not part._is_zerotensor()]
    measurement = measure(recorder, parts)
    kinds = NOTHING
    for i in range(len(parts)):
        kinds |= measurement.non_finite(i)
    return kinds

"""How many rows of a tensor hold nothing that is finite: what tells a padded or masked row from a few bad numbers."""

import math

import torch
from torch import Tensor

from .stats import apart_from_the_run

__all__ = ["wholly_bad_rows"]

ELEMENTS_AT_ONCE = 1 << 20


def wholly_bad_rows(tensor: Tensor) -> tuple[int, int] | None:
    """(rows without a finite element, rows); a row goes along the last dimension. None where there is no second one.

    None, too, where it cannot be told. Cost: some passes over parts of ELEMENTS_AT_ONCE, and a sync of its device.
    """
    try:
        with apart_from_the_run(), torch.no_grad():
            if tensor.dim() < 2 or tensor.numel() == 0:
                return None
            leading = tensor.shape[:-1]
            longest = leading.index(max(leading))
            size = max(1, ELEMENTS_AT_ONCE * leading[longest] // tensor.numel())
            parts = torch.split(tensor.detach(), size, longest)
            bad = sum(int((~_is_finite(part)).all(-1).sum()) for part in parts)
            return bad, math.prod(leading)
    except RuntimeError:  # of a dtype that torch does not compute with, or a device that has failed
        return None


def _is_finite(part: Tensor) -> Tensor:
    return torch.isfinite(part.float() if part.is_floating_point() and part.itemsize == 1 else part)

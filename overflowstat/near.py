"""Which numbers are near the limit of their dtype. csrc/near.h does the same."""

import torch

from .stats import TensorStats

__all__ = ["is_near", "limit_of"]


def limit_of(dtype: torch.dtype) -> float:
    """The largest number of a floating-point dtype; of a complex one that of its parts."""
    return float(torch.finfo(dtype).max)


def is_near(found: TensorStats | str, warn_at: float) -> bool:
    """Whether the largest finite magnitude is this share of the limit or more. Not for integers and bool."""
    if not isinstance(found, TensorStats) or not (found.dtype.is_floating_point or found.dtype.is_complex):
        return False
    return found.finite_abs_max >= warn_at * limit_of(found.dtype)

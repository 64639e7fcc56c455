"""Which numbers are near the limit of their dtype. csrc/near.h does the same."""

from .stats import TensorStats
from .wording import limit_of

__all__ = ["is_near"]


def is_near(found: TensorStats | str, warn_at: float) -> bool:
    """Whether the largest finite magnitude is this share of the limit or more. Not for integers and bool."""
    if not isinstance(found, TensorStats) or not (found.dtype.is_floating_point or found.dtype.is_complex):
        return False
    return found.finite_abs_max >= warn_at * limit_of(found.dtype)

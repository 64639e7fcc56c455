"""Tensors whose numbers are mostly subnormal: they underflow as a whole. csrc/subnormal.h finds the same ones."""

from .errors import warn_user
from .frames import Frame
from .stats import TensorStats
from .wording import module_text, short_name

__all__ = ["FEWEST_NUMBERS", "LARGE_SHARE", "Subnormals", "is_mostly_subnormal"]

# From a half on the median of what is not zero is subnormal: most of what the tensor tells has fewer bits than its
# dtype promises, and what was smaller still has been rounded to zero. A normal distribution is there where its standard
# deviation is 1.48 times the smallest normal number, 9.05e-5 in float16, and the tails of healthy ones are far from it:
# of weights with 0.02 not one in 400 is subnormal in float16. Zeros are not asked, of which ReLU, dropout and masks
# make any number.
LARGE_SHARE = 0.5
# Fewer numbers than these have no share to speak of: a scalar loss or eps, what a ReLU has left over.
FEWEST_NUMBERS = 8


def is_mostly_subnormal(found: TensorStats | str) -> bool:
    """Whether of FEWEST_NUMBERS elements or more that are neither 0 nor NaN a LARGE_SHARE is subnormal."""
    if not isinstance(found, TensorStats) or not found.subnormal_count or found.zero_count is None:
        return False
    numbers = _numbers(found)
    return numbers >= FEWEST_NUMBERS and found.subnormal_count >= LARGE_SHARE * numbers


class Subnormals:
    """Warns of each place once."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def warn(self, frame: Frame) -> None:
        for line in frame.lines:
            place = (frame.module, line.label)
            if place in self._told or not line.is_judged or line.allowed or not is_mostly_subnormal(line.content):
                continue
            self._told.add(place)
            assert isinstance(line.content, TensorStats) and line.content.subnormal_count is not None
            share = line.content.subnormal_count / _numbers(line.content)
            warn_user(
                f"{module_text(frame.module, frame.class_name)}, {line.label}: {100 * share:.0f} % of what is not zero "
                f"is subnormal in {short_name(line.content.dtype)}, down to {line.content.abs_min_nonzero:.2e}, "
                f"in batch {frame.batch_number}"
            )


def _numbers(found: TensorStats) -> int:
    return found.numel - (found.zero_count or 0) - found.nan_count

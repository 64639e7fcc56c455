"""What a recorder gives for one tensor."""

import enum
from typing import NamedTuple

__all__ = ["NOTHING", "NonFinite", "Row", "is_new"]


class NonFinite(enum.Flag):
    """The kinds of numbers that are not finite; csrc/stats_row.h has the same."""

    NAN = 1
    POSINF = 2
    NEGINF = 4

    @classmethod
    def of(cls, nan_count: int, posinf_count: int, neginf_count: int) -> "NonFinite":
        """Those of which there are any."""
        found = NOTHING
        for kind, count in ((cls.NAN, nan_count), (cls.POSINF, posinf_count), (cls.NEGINF, neginf_count)):
            if count:
                found |= kind
        return found


NOTHING = NonFinite(0)


def is_new(kinds: NonFinite, before: NonFinite) -> bool:
    """Whether what bears `kinds` bears more than what it was made of. An infinity may have been negated."""
    infinite = NonFinite.POSINF | NonFinite.NEGINF
    return bool(kinds & NonFinite.NAN & ~before) or (bool(kinds & infinite) and not before & infinite)


class Row(NamedTuple):
    """The statistics of one tensor as a recorder gives them; `TensorStats` explains the fields.

    `first_bad` is an index in memory order (layout.py). The last three are None where nobody asked for detail.
    """

    abs_min: float | int
    abs_max: float | int
    finite_abs_max: float | int
    nan_count: int
    posinf_count: int
    neginf_count: int
    first_bad: int | None
    zero_count: int | None = None
    subnormal_count: int | None = None
    abs_min_nonzero: float | int | None = None

    @property
    def non_finite(self) -> NonFinite:
        if self.first_bad is None:  # nearly always; flags are slow
            return NOTHING
        return NonFinite.of(self.nan_count, self.posinf_count, self.neginf_count)

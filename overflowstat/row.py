"""What a recorder gives for one tensor."""

from typing import NamedTuple

__all__ = ["Row"]


class Row(NamedTuple):
    """The statistics of one tensor as a recorder gives them; `TensorStats` explains the fields.

    `first_bad` is an index in memory order (layout.py).
    """

    abs_min: float | int
    abs_max: float | int
    finite_abs_max: float | int
    nan_count: int
    posinf_count: int
    neginf_count: int
    first_bad: int | None

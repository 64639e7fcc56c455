"""What a graph leaves of the calls of a module: rows of float64, and how they are read.

    [0] calls since it was emptied; [1] the site of the last one; [2] when that was, by the clock of the extension's
    operations, or 0; [3 ...] sizes that are not fixed in the graph;
    [FIRST_TENSOR + 3 i ...] of tensor i the largest number, the negated smallest, the negated smallest magnitude

A module has a few of them, so that calls which give it other things, or things of other dtypes, are not merged.

In place of the first two stands the largest magnitude of the finite ones where only magnitudes are known of those: the
larger of the two is the largest magnitude all the same, and infinities are where they would be.

All but the first few are maxima, so that calls are merged by one operation. A NaN in a tensor makes each of them NaN.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..row import NOTHING, NonFinite
from ..stats import TensorStats

__all__ = [
    "FIRST_SIZE",
    "FIRST_TENSOR",
    "MAXIMA",
    "MOST_SIZES",
    "MOST_TENSORS",
    "ROWS",
    "ROW_LENGTH",
    "ReadTensor",
    "empty_rows",
    "is_bad",
    "of_any_tensor",
]

MAXIMA = 3
MOST_TENSORS = 16
"""Of a module call. The last of them stands for all that follow, too."""
MOST_SIZES = 6
"""That differ and are not fixed, of all its tensors. Those that follow are fixed."""
FIRST_SIZE = 3
FIRST_TENSOR = FIRST_SIZE + MOST_SIZES
ROW_LENGTH = FIRST_TENSOR + MAXIMA * MOST_TENSORS


ROWS = 4
"""Of a module."""


def empty_rows(device: torch.device | str = "cpu") -> Tensor:
    """Of shape `[ROWS, ROW_LENGTH]`."""
    with torch.inference_mode(False):  # which has tensors of its own, that nothing writes to outside of it
        rows = torch.full((ROWS, ROW_LENGTH), -math.inf, dtype=torch.float64, device=device)
        rows[:, 0] = 0
        return rows


def is_bad(rows: Tensor) -> Tensor:
    """Which of rows of shape `[..., ROW_LENGTH]` are of something that is not finite: where that is infinite, one of
    its numbers is +inf, of whatever sign it is itself."""
    numbers = rows[..., FIRST_TENSOR:]
    return (numbers.isnan() | (numbers == math.inf)).any(-1)


@dataclass(frozen=True, slots=True)
class ReadTensor:
    """A tensor as it was when the graph was made."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """A size that the graph does not fix is ~i, where i is its place among the sizes of the row; -1 where that has none
    after all."""

    @property
    def is_read(self) -> bool:
        """One without elements has nothing to read."""
        return 0 not in self.shape

    def stats(self, numbers: Sequence[float], sizes: Sequence[int]) -> TensorStats:
        """Of its three numbers in a row, and the sizes that are there."""
        # A graph that an earlier process has left may fix what was not fixed where this one was asked for.
        shape = tuple(size if size >= 0 else sizes[~size] if ~size < len(sizes) else -1 for size in self.shape)
        if not self.is_read or max(numbers) == -math.inf:  # as a row without any: the size was not fixed, and is 0
            return TensorStats(math.nan, math.nan, math.nan, 0, 0, 0, None, 0, self.dtype, shape)
        largest, negated_smallest, negated_abs_min = numbers
        kinds = _kinds(largest, -negated_smallest)
        abs_min, abs_max = abs(negated_abs_min), abs(max(largest, negated_smallest))  # no zero is negative
        if math.isnan(largest):
            abs_min = abs_max = math.nan
        number = float if self.dtype.is_floating_point or self.dtype.is_complex else int
        return TensorStats(
            number(abs_min),
            number(abs_max),
            math.nan if kinds else number(abs_max),
            int(NonFinite.NAN in kinds),
            int(NonFinite.POSINF in kinds),
            int(NonFinite.NEGINF in kinds),
            () if kinds else None,
            math.prod(shape),
            self.dtype,
            shape,
            is_counted=not kinds,
        )


def of_any_tensor(row: Sequence[float]) -> TensorStats:
    """Of all that is in a row, as one number."""
    found = [max(column, key=lambda number: (math.isnan(number), number)) for column in _columns(row)]
    return ReadTensor(torch.float64, ()).stats(found, ())


def _columns(row: Sequence[float]) -> list[Sequence[float]]:
    return [row[FIRST_TENSOR + i :: MAXIMA] for i in range(MAXIMA)]


def _kinds(largest: float, smallest: float) -> NonFinite:
    if math.isnan(largest):
        return NonFinite.NAN
    found = NOTHING
    if largest == math.inf or smallest == math.inf:
        found |= NonFinite.POSINF
    if smallest == -math.inf or largest == -math.inf:
        found |= NonFinite.NEGINF
    return found

"""The order in which a tensor's elements are read, and the way back from a place in it to coordinates.

*Memory order* is that of csrc/layout.h: dimensions by falling stride, equal ones as they stand, the last one fastest.
"""

import math
from collections.abc import Sequence

__all__ = ["coordinates", "distinct_elements", "memory_order"]


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions of more than one element, largest stride first."""
    return sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -stride[d])


def distinct_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements there are in memory, those that an expanded view repeats counted once."""
    return 0 if 0 in shape else math.prod(size for size, step in zip(shape, stride, strict=True) if step)


def coordinates(index: int, shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Where the element with this memory-order index is, as one index a dimension."""
    place = [0] * len(shape)
    for dimension in reversed(memory_order(shape, stride)):
        index, place[dimension] = divmod(index, shape[dimension])
    return tuple(place)

"""The weights of a Llama: 291 tensors in bfloat16, side by side in one buffer, so that one tensor can hold them all."""

import math
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["WIDTH_STEP", "bytes_of", "shapes", "views", "widest"]

DTYPE = torch.bfloat16
LAYERS = 32
VOCABULARY = 32000
# Widths are multiples of it, so that each tensor begins at a multiple of 256 bytes, as memory from torch does.
WIDTH_STEP = 128

Shape = tuple[int, ...]


def shapes(width: int) -> list[Shape]:
    """Those of Llama 2 7B (width 4096) in the order of the model, scaled to another width."""
    feed_forward = width * 43 // 16  # 11008 for 4096
    attention = [(width, width)] * 4
    layer = [*attention, (feed_forward, width), (feed_forward, width), (width, feed_forward), (width,), (width,)]
    return [(VOCABULARY, width), *layer * LAYERS, (width,), (VOCABULARY, width)]


def bytes_of(width: int) -> int:
    return sum(map(math.prod, shapes(width))) * DTYPE.itemsize


def widest(size: int) -> int:
    """The largest width whose weights take no more than `size` bytes. Raises ValueError if the narrowest take more."""
    width = 0
    while bytes_of(width + WIDTH_STEP) <= size:
        width += WIDTH_STEP
    if width == 0:
        raise ValueError(f"the smallest list of weights takes {bytes_of(WIDTH_STEP)} bytes, and {size} are to be used")
    return width


def views(memory: Tensor, width: int) -> list[Tensor]:
    """The tensors as views of `memory`, uint8 of `bytes_of(width)` elements: together all of it, and nothing twice."""
    wanted = shapes(width)
    elements = memory.view(DTYPE)
    ends = list(accumulate(map(math.prod, wanted)))
    return [elements[start:end].view(shape) for start, end, shape in zip([0, *ends[:-1]], ends, wanted, strict=True)]

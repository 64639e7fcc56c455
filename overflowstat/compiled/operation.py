"""The operation by which a graph reads the tensors of a module call: some extremes of each, kept in a row.

It is composite: Dynamo sees one call, and the compiler behind it plain reductions, which Inductor fuses into the
kernels that make the tensors, so that nothing is read a second time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..stats import READABLE_DTYPES
from ..wording import short_name
from .row import FIRST_TENSOR, MAXIMA, MOST_SIZES, MOST_TENSORS, ReadTensor
from .sites import will_read

__all__ = ["read_into"]

# In it the version of the schema, since the caches of compiled code know an operation by its name.
NAME = "read_v1"

_LIBRARY: Any = torch.library.Library("overflowstat", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"{NAME}(Tensor[] tensors, Tensor(a!) row, int site) -> ()")


def read_into(tensors: Sequence[Tensor], row: Tensor, site: int) -> None:
    """Merge what these hold with what the row has of the calls before, as row.py tells. Traceable.

    Args:
        tensors: of any shapes, dtypes and devices.
        row: float64 of shape `[ROW_LENGTH]`.
        site: a number for the place in the program.
    """
    getattr(torch.ops.overflowstat, NAME)(tensors, row, site)


def _read(tensors: Sequence[Tensor], row: Tensor, site: int) -> None:
    # Runs where a graph is made, with fake tensors. What it tells is the same each time.
    told: list[ReadTensor | str] = []
    maxima: list[Tensor] = []
    sizes: dict[str, Any] = {}  # those that the graph does not fix, by their formula
    with torch.no_grad():
        for tensor in tensors:
            what = _described(tensor, sizes)
            told.append(what)
            if isinstance(what, ReadTensor) and what.is_read:
                extremes = [extreme.to(row.device, row.dtype) for extreme in _extremes(tensor.detach())]
                if len(maxima) == MOST_TENSORS * MAXIMA:  # the last one stands for all that are left
                    extremes = list(map(torch.maximum, maxima[-MAXIMA:], extremes))
                    del maxima[-MAXIMA:]
                maxima += extremes
        will_read(site, told)
        head = [row[0] + 1, *(torch.full_like(row[0], number) for number in (site, *sizes.values()))]
        row[: len(head)].copy_(torch.stack(head))
        if maxima:
            before = row[FIRST_TENSOR : FIRST_TENSOR + len(maxima)]
            before.copy_(torch.maximum(before, torch.stack(maxima)))


_LIBRARY.impl(NAME, _read, "CompositeImplicitAutograd")


def _described(tensor: Tensor, sizes: dict[str, Any]) -> ReadTensor | str:
    if tensor.layout != torch.strided or tensor.is_nested:
        return "nested" if tensor.is_nested else short_name(tensor.layout)
    if tensor.dtype not in READABLE_DTYPES:
        return short_name(tensor.dtype)
    shape: list[int] = []
    for size in tensor.shape:
        if isinstance(size, int) or (str(size) not in sizes and len(sizes) == MOST_SIZES):
            shape.append(int(size))
        else:
            sizes.setdefault(str(size), size)
            shape.append(~list(sizes).index(str(size)))
    return ReadTensor(tensor.dtype, tuple(shape))


def _extremes(tensor: Tensor) -> list[Tensor]:
    """Largest, negated smallest, negated smallest magnitude; each NaN if any number is."""
    if tensor.is_complex():
        tensor = tensor.abs()
    elif tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    elif not tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and not tensor.dtype.is_signed:
        tensor = tensor.to(torch.float64)  # torch reduces none of these
    elif tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.float32)
    return [tensor.amax(), -tensor.amin().double(), -tensor.abs().amin().double()]

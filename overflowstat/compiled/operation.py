"""The operation by which a graph reads the tensors of a module call: some extremes of each, kept in one of its rows.

It is composite: Dynamo sees one call, and the compiler behind it what that is made of. In host memory the extension
reads the tensors, where it is there, with operations of csrc/compiled.cpp. Elsewhere these are plain reductions, which
Inductor fuses into the kernels that make the tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..dynamo import as_known, in_place_by_inductor, is_only_asked, may_be_quantized, value_in_graph
from ..stats import READABLE_DTYPES
from ..wording import short_name
from .row import FIRST_SIZE, FIRST_TENSOR, MAXIMA, MOST_SIZES, MOST_TENSORS, ReadTensor
from .sites import will_read

__all__ = ["read_into"]

# In it the version of the schema, since the caches of compiled code know an operation by its name.
NAME = "read_v3"

_HAS_READ = "_overflowstat_has_read"
_OPERATIONS: Any = torch.ops.overflowstat
_LIBRARY: Any = torch.library.Library("overflowstat", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"{NAME}(Tensor[] tensors, Tensor(a!) rows, int site, bool native) -> ()")


def read_into(tensors: Sequence[Tensor], rows: Tensor, site: int, native: bool) -> None:
    """Merge what these hold with what a row has of the calls before, as row.py tells. Traceable.

    Args:
        tensors: of any shapes, dtypes and devices.
        rows: of the module, float64 of shape `[ROWS, ROW_LENGTH]`.
        site: a number for the place in the program.
        native: whether the extension, which is loaded then, reads those in host memory: one pass over each.
    """
    getattr(_OPERATIONS, NAME)(tensors, rows, site, native)


def _read(tensors: Sequence[Tensor], rows: Tensor, site: int, native: bool) -> None:
    # Runs where a graph is made, with fake tensors. What it tells is the same each time; of what AOTAutograd has in its
    # cache only Dynamo asks.
    sizes: dict[str, Any] = {}  # those that the graph does not fix, by their formula
    told = [_described(tensor, sizes) for tensor in tensors]
    number = will_read(site, told)
    if is_only_asked(rows):
        return
    read: list[Tensor] = []  # maxima of each tensor
    with torch.no_grad():
        for tensor, what in zip(tensors, told, strict=True):
            if isinstance(what, ReadTensor) and what.is_read:
                by_extension = native and tensor.device.type == "cpu"
                read.append(_once(tensor, _OPERATIONS.extremes_v1 if by_extension else _extremes).to(rows.device))
        if native and rows.device.type == "cpu":
            in_place_by_inductor(_OPERATIONS.kept_v2.default, _OPERATIONS.keep_v2.default, written=0)
            rows.copy_(_OPERATIONS.kept_v2(rows, number, site, list(sizes.values()), read, FIRST_SIZE, FIRST_TENSOR))
        else:
            _keep(read, [site, 0, *sizes.values()], rows[number])


def _keep(read: list[Tensor], head: list[Any], row: Tensor) -> None:
    numbers = [row[0] + 1, *(torch.full_like(row[0], number) for number in head)]
    row[: len(numbers)].copy_(torch.stack(numbers))
    while len(read) > MOST_TENSORS:  # the last one stands for all that are left
        read[-2:] = [torch.maximum(read[-2], read[-1])]
    if read:
        before = row[FIRST_TENSOR : FIRST_TENSOR + MAXIMA * len(read)]
        before.copy_(torch.maximum(before, torch.cat(read)))


def _read_below(tensors: Sequence[Tensor], row: Tensor, site: int, native: bool) -> None:
    """Inside of torch.vmap, torch.func.grad and the like: what they have wrapped, as of vmap the whole batch."""
    functorch: Any = torch._C._functorch
    level = functorch.maybe_current_level()
    if level is None:
        _read(tensors, row, site, native)
        return
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    *below, row = [functorch.get_unwrapped(x) if functorch.maybe_get_level(x) == level else x for x in (*tensors, row)]
    with retrieve_current_functorch_interpreter().lower():
        read_into(below, row, site, native)


# Of a batch, too: what is composite has no rule for it that would come before that of functorch for any operation.
for key in ("CompositeImplicitAutograd", "FuncTorchBatched"):
    _LIBRARY.impl(NAME, _read_below, key)


def _described(tensor: Tensor, sizes: dict[str, Any]) -> ReadTensor | str:
    if tensor.layout != torch.strided or tensor.is_nested:
        return "nested" if tensor.is_nested else short_name(tensor.layout)
    if tensor.dtype not in READABLE_DTYPES:
        return short_name(tensor.dtype)
    shape: list[int] = []
    for dimension in tensor.shape:
        size = as_known(dimension)
        if isinstance(size, int) or (str(size) not in sizes and len(sizes) == MOST_SIZES):
            shape.append(int(size))
        else:
            sizes.setdefault(str(size), size)
            shape.append(~list(sizes).index(str(size)))
    return ReadTensor(tensor.dtype, tuple(shape))


def _once(tensor: Tensor, extremes: Callable[[Tensor], Tensor]) -> Tensor:
    """Those of a tensor, in a graph that has them already just these: what one module gives, the next one takes."""
    value = value_in_graph(tensor)
    if value is None:
        return extremes(_readable(tensor))
    has_read = getattr(tensor, _HAS_READ, None)
    if has_read is None or has_read[0] is not value:
        has_read = value, extremes(_readable(tensor))
        setattr(tensor, _HAS_READ, has_read)
    return has_read[1]


def _readable(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if may_be_quantized(tensor) else tensor


def _extremes(tensor: Tensor) -> Tensor:
    """As row.py has them, and csrc/compiled.cpp makes them."""
    if tensor.is_complex():
        tensor = tensor.abs()
    elif tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    elif not tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and not tensor.dtype.is_signed:
        tensor = tensor.to(torch.float64)  # torch reduces none of these
    elif tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.float32)
    if tensor.dtype.is_floating_point or not tensor.dtype.is_signed:
        negated_abs_min = -tensor.abs().amin().double()
    else:
        negated_abs_min = tensor.minimum(-tensor).amax().double()  # the smallest of all has no magnitude of its dtype
    return torch.stack([tensor.amax().double(), -tensor.amin().double(), negated_abs_min])

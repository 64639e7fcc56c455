"""The statistics that a tensor should have, computed the slow and obvious way.

Everything here goes through float64 values or Python ints, never through the bits of a number format, so that it shares
no idea with the code that it is the measure of. What inf and NaN mean for a complex number is told in number_format.h.
"""

from __future__ import annotations

import math
from typing import Any, TypedDict, cast

import numpy as np
import torch


class ExpectedRow(TypedDict):
    """Magnitudes are ints for integer and bool tensors, floats for all others, NaN where no element has one."""

    abs_min: int | float  # over the elements that are not NaN; an infinity counts as one
    abs_max: int | float
    finite_abs_max: int | float
    nan_count: int
    posinf_count: int
    neginf_count: int
    first_bad: tuple[int, ...] | None  # coordinates of the first element in memory order that is not finite
    numel: int


class DetailedRow(ExpectedRow):
    zero_count: int
    subnormal_count: int  # neither 0 nor a normal number of the dtype; for a complex one, of its parts' dtype
    abs_min_nonzero: int | float  # over the elements that are neither 0 nor NaN


# From the formats' definitions: the smallest number whose leading bit is not spelt out. What is not here has no others.
SMALLEST_NORMAL = {
    torch.float64: 2.0**-1022,
    torch.float32: 2.0**-126,
    torch.float16: 2.0**-14,
    torch.bfloat16: 2.0**-126,
    torch.float8_e4m3fn: 2.0**-6,
    torch.float8_e5m2: 2.0**-14,
    torch.float8_e4m3fnuz: 2.0**-7,
    torch.float8_e5m2fnuz: 2.0**-15,
    torch.complex128: 2.0**-1022,
    torch.complex64: 2.0**-126,
    torch.complex32: 2.0**-14,
}


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Dimensions by falling stride, equal ones as they stand, without those that only repeat (stride 0, size 1)."""
    real = [d for d in range(tensor.dim()) if tensor.stride()[d] != 0 and tensor.size(d) != 1]
    return sorted(real, key=lambda d: -tensor.stride()[d])


def coordinates(tensor: torch.Tensor, index: int) -> tuple[int, ...]:
    """Where the element with this memory-order index is; 0 in the dimensions that only repeat."""
    order = memory_order(tensor)
    position = [0] * tensor.dim()
    for dimension, coordinate in zip(order, np.unravel_index(index, [tensor.size(d) for d in order]), strict=True):
        position[dimension] = int(coordinate)
    return tuple(position)


def first_in_memory(tensor: torch.Tensor, chosen: np.ndarray) -> tuple[int, ...] | None:
    """Coordinates of the first True of `chosen`, a mask of the tensor's shape, in the tensor's memory order."""
    if not chosen.any():
        return None
    order = memory_order(tensor)
    repeats = [d for d in range(tensor.dim()) if d not in order]
    once = chosen.transpose(repeats + order)[(0,) * len(repeats)]
    return coordinates(tensor, int(np.argmax(once.reshape(-1))))


def modulus(re: np.ndarray, im: np.ndarray) -> np.ndarray:
    """sqrt(re**2 + im**2) of finite float64 parts, free of overflow and underflow on the way."""
    _, exponent = np.frexp(np.maximum(np.abs(re), np.abs(im)))
    re, im = np.ldexp(re, -exponent), np.ldexp(im, -exponent)
    with np.errstate(over="ignore", under="ignore"):
        result: np.ndarray = np.ldexp(np.sqrt(re * re + im * im), exponent)
    return result


def complex_magnitude(parts: np.ndarray, magnitude_type: type[np.floating]) -> np.ndarray:
    """Modulus rounded to `magnitude_type`, where it saturates; inf where a part is infinite, else NaN where one is."""
    re, im = parts[..., 0], parts[..., 1]
    finite = np.isfinite(re) & np.isfinite(im)
    exact = modulus(np.where(finite, re, 0.0), np.where(finite, im, 0.0))
    with np.errstate(over="ignore"):
        rounded = exact.astype(magnitude_type).astype(np.float64)
    saturated = np.minimum(rounded, float(np.finfo(magnitude_type).max))
    infinite = np.isinf(re) | np.isinf(im)
    return np.where(finite, saturated, np.where(infinite, np.inf, np.nan))


def integer_values(tensor: torch.Tensor) -> np.ndarray:
    values: np.ndarray = (tensor.view(torch.uint8) != 0).numpy() if tensor.dtype == torch.bool else tensor.numpy()
    return values


def integer_row(tensor: torch.Tensor) -> ExpectedRow:
    values = integer_values(tensor)
    abs_min: int | float = math.nan
    abs_max: int | float = math.nan
    if values.size:
        smallest, largest = int(values.min()), int(values.max())
        abs_max = max(largest, -smallest)
        sides = [values[values >= 0], values[values < 0]]
        abs_min = min(min(abs(int(side.min())), abs(int(side.max()))) for side in sides if side.size)
    return ExpectedRow(
        abs_min=abs_min,
        abs_max=abs_max,
        finite_abs_max=abs_max,
        nan_count=0,
        posinf_count=0,
        neginf_count=0,
        first_bad=None,
        numel=tensor.numel(),
    )


def complex_parts(tensor: torch.Tensor) -> np.ndarray:
    parts: np.ndarray = torch.view_as_real(tensor.resolve_conj().resolve_neg()).to(torch.float64).numpy()
    return parts


def float_magnitude(tensor: torch.Tensor) -> np.ndarray:
    if not tensor.is_complex():
        magnitude: np.ndarray = np.abs(tensor.to(torch.float64).numpy())
        return magnitude
    return complex_magnitude(complex_parts(tensor), np.float64 if tensor.dtype == torch.complex128 else np.float32)


def detailed_row(tensor: torch.Tensor) -> DetailedRow:
    """What is asked for with detail, of the same tensors."""
    row = expected_row(tensor)
    tensor = tensor.detach().cpu() if tensor.device.type != "cpu" else tensor.detach()
    if tensor.is_floating_point() or tensor.is_complex():
        magnitude = float_magnitude(tensor)
        there = [float(m) for m in np.unique(magnitude) if m > 0]
        zeros = int(np.count_nonzero(magnitude == 0))
    else:
        numbers = np.unique(integer_values(tensor))
        there = [abs(int(number)) for number in numbers if number != 0]
        zeros = tensor.numel() - int(np.count_nonzero(integer_values(tensor)))
    subnormals = 0
    if tensor.dtype in SMALLEST_NORMAL:
        subnormals = int(np.count_nonzero((magnitude > 0) & (magnitude < SMALLEST_NORMAL[tensor.dtype])))
    return DetailedRow(
        **row, zero_count=zeros, subnormal_count=subnormals, abs_min_nonzero=min(there, default=math.nan)
    )


def without_detail(row: DetailedRow) -> ExpectedRow:
    found: Any = {field: value for field, value in row.items() if field in ExpectedRow.__annotations__}
    return cast(ExpectedRow, found)


def expected_row(tensor: torch.Tensor) -> ExpectedRow:
    """The row of one tensor of any dtype that overflowstat reads, in any layout; every logical element counts once."""
    tensor = tensor.detach().cpu() if tensor.device.type != "cpu" else tensor.detach()
    if not tensor.is_floating_point() and not tensor.is_complex():
        return integer_row(tensor)
    magnitude = float_magnitude(tensor)
    if tensor.is_complex():
        parts = complex_parts(tensor)
        nan = np.isnan(parts).any(axis=-1)
        posinf = np.isinf(parts).any(axis=-1)  # an infinite complex number has no sign
        neginf = np.zeros_like(posinf)
    else:
        values = tensor.to(torch.float64).numpy()
        nan, posinf, neginf = np.isnan(values), values == np.inf, values == -np.inf
    with_magnitude = magnitude[~np.isnan(magnitude)]
    finite = magnitude[np.isfinite(magnitude)]
    return ExpectedRow(
        abs_min=float(with_magnitude.min()) if with_magnitude.size else math.nan,
        abs_max=float(with_magnitude.max()) if with_magnitude.size else math.nan,
        finite_abs_max=float(finite.max()) if finite.size else math.nan,
        nan_count=int(nan.sum()),
        posinf_count=int(posinf.sum()),
        neginf_count=int(neginf.sum()),
        first_bad=first_in_memory(tensor, nan | posinf | neginf),
        numel=tensor.numel(),
    )

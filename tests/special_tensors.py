"""Tensors of every dtype with what is hard about them: all magnitudes, elements that are not finite, odd strides."""

from __future__ import annotations

import numpy as np
import torch
from device_on_cpu import DTYPES

CODE_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
PARTS = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
NUMBERS = [dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex]  # may be other than finite
# By hand from the formats' definitions: infinities and NaN of several payloads and both signs.
NOT_FINITE = {
    torch.float64: [0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, 0x7FF0 << 48 | 1, 2**64 - 1],
    torch.float32: [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF],
    torch.float16: [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF],
    torch.bfloat16: [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF],
    torch.float8_e4m3fn: [0x7F, 0xFF],
    torch.float8_e5m2: [0x7C, 0xFC, 0x7D, 0x7F, 0xFE],
    torch.float8_e4m3fnuz: [0x80],
    torch.float8_e5m2fnuz: [0x80],
    torch.float8_e8m0fnu: [0xFF],
}


def part(dtype: torch.dtype) -> torch.dtype:
    """The real dtype that an element consists of."""
    return PARTS.get(dtype, dtype)


def code_type(dtype: torch.dtype) -> type[np.unsignedinteger]:
    return CODE_TYPES[part(dtype).itemsize]


def from_codes(codes: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    if codes.size == 0:
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(codes.astype(code_type(dtype)).view(np.uint8).copy()).view(dtype)


def random_codes(dtype: torch.dtype, count: int, rng: np.random.Generator) -> np.ndarray:
    """The parts of `count` elements, all finite, of all magnitudes and both signs."""
    parts = count * dtype.itemsize // part(dtype).itemsize
    codes: np.ndarray = np.frombuffer(rng.bytes(parts * part(dtype).itemsize), dtype=code_type(dtype)).copy()
    if dtype in NUMBERS and parts:
        finite = torch.isfinite(from_codes(codes, part(dtype)).to(torch.float64)).numpy()
        codes[~finite] = rng.integers(1, 8)
    return codes


def with_bad(dtype: torch.dtype, count: int, positions: list[int], rng: np.random.Generator) -> torch.Tensor:
    """`count` elements, those at `positions` not finite (for complex numbers in either part)."""
    codes = random_codes(dtype, count, rng)
    step = dtype.itemsize // part(dtype).itemsize
    for position in positions:
        if dtype in NUMBERS and 0 <= position < count:
            bad = NOT_FINITE[part(dtype)]
            codes[position * step + int(rng.integers(step))] = bad[rng.integers(len(bad))]
    return from_codes(codes, dtype)


def strided_views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(5)
    count = 6 * 7 * 8 * 9
    base = with_bad(dtype, count, [0, 11, 500, 1201, count - 1], rng)
    box = base.view(6, 7, 8, 9)
    return {
        "dense": base,
        "transposed": box.transpose(1, 3),
        "sliced": box[:, 1:6, ::2, 1:8],
        "every third": base[1::3],
        "permuted and sliced": box.permute(2, 0, 3, 1)[1:7:2, :, 2:, 3:],
        "expanded": box[:, :1, :, ::2].expand(6, 5, 8, 5),
        "expanded scalar": base[11].expand(3, 4),
        "overlapping": base.as_strided((20, 30), (2, 3)),
        "scalar": base[11],
        "one element of a slice": box[2:3, ::5, 1:2, ::9][:, :1],
        "empty": box[:, :, 3:3, ::2],
    }

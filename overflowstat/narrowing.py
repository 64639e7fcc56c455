"""How many numbers of a tensor a narrower format would lose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import native, torch_recorder
from .recorder import RecorderName
from .stats import TensorStats

__all__ = ["FORMATS", "Narrowed", "narrowed"]

FORMATS: Mapping[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class Narrowed(NamedTuple):
    """What a plain cast to a narrower format would do to finite elements."""

    overflows: int
    """How many round to more than its largest number: to inf, or where it has none to NaN or to that number."""
    flushed: int
    """How many that are not zero would be."""


def narrowed(
    tensor: Tensor, stats: TensorStats, dtypes: Sequence[torch.dtype], recorder: RecorderName = "auto"
) -> list[Narrowed]:
    """What each of several formats would do to a tensor of floating point; of complex numbers both parts are counted.

    Args:
        stats: of the tensor.
        recorder: whether "native" code counts, or plain "torch".

    Cost: one pass for all formats; none where the statistics tell that nothing can be lost.
    """
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    extent = (0.0, math.inf) if tensor.is_complex() else (stats.abs_min, stats.finite_abs_max)  # moduli tell no parts
    edges = [_edges(real.dtype, dtype, *extent) for dtype in dtypes]
    thresholds = {threshold for each in edges for threshold in each if threshold is not None}
    counts: dict[float | None, int] = {None: 0}
    if thresholds:
        asked = sorted(thresholds | ({math.inf} if stats.has_inf else set()))
        counts |= zip(asked, _count_at_least(real, asked, recorder), strict=True)
    infinite = counts.get(math.inf, 0)
    return [
        Narrowed(
            counts[each.overflows] - (0 if each.overflows is None else infinite),
            counts[each.smallest] - counts[each.remains],
        )
        for each in edges
    ]


class _Edges(NamedTuple):
    """Magnitudes from which on a cast does something else to numbers; None where that happens to none of them."""

    overflows: float | None
    smallest: float | None
    """All but zero. From here to the next they are flushed."""
    remains: float | None


def _edges(of: torch.dtype, to: torch.dtype, low: float, high: float) -> _Edges:
    """Of a cast that rounds to the nearest, a tie to the even one, and numbers from `low` to `high`.

    Half a step beyond its largest number is such a tie: it goes up, and overflows, if that number is odd, as where its
    bits are all ones; the largest of float8_e4m3fn is even. So is zero.
    """
    have, want = torch.finfo(of), torch.finfo(to)
    # Edges must be numbers of the dtype in which magnitudes are compared.
    compared = torch.finfo(torch.float64 if of == torch.float64 else torch.float32)
    step = math.ldexp(want.eps, math.frexp(want.max)[1] - 1)
    limit, flushed = want.max + step / 2, want.smallest_normal * want.eps / 2
    overflows = smallest = remains = None
    if have.max > want.max and high > want.max:
        is_even = want.max / step % 2 == 0
        overflows = _next(limit, compared) if is_even else limit
    if have.smallest_normal * have.eps <= flushed and not low > flushed:
        smallest, remains = compared.smallest_normal * compared.eps, _next(flushed, compared)
    return _Edges(overflows, smallest, remains)


def _next(number: float, about: torch.finfo) -> float:
    """The next larger one."""
    exponent = max(math.frexp(number)[1] - 1, math.frexp(about.smallest_normal)[1] - 1)
    return number + math.ldexp(about.eps, exponent)


def _count_at_least(tensor: Tensor, thresholds: Sequence[float], recorder: RecorderName) -> list[int]:
    """As that of torch_recorder, which does it where the extension is not there, or cannot."""
    extension = None if recorder == "torch" else native.load()
    counts: list[int] | None = None if extension is None else extension.count_at_least(tensor, thresholds)
    return torch_recorder.count_at_least(tensor, thresholds) if counts is None else counts

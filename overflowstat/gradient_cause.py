"""What a single node of the backward proves of the cause by the gradients that it got and made alone.

Each bound is that of a derivative away from its pole, at the number of the dtype that is nearest to it: a gradient that
is beyond the limit though it got too little for that was made at the pole itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch

from .cause import Cause
from .stats import TensorStats
from .wording import limit_of, limit_text, short_name

__all__ = ["AGAIN", "REPEATABLE", "SUM", "advise_gradient", "cause_of_one", "only_operation"]

SUM = "a sum of gradients"
"""Stands for a node where gradients meet, and are added up."""
AGAIN = "another node of the same name"
"""Stands for it, but for those that are REPEATABLE."""

# They give what they get, parts of it, or 0: nothing bad of what is finite, and nothing larger.
_PASSING = frozenset(
    f"{name}Backward{i}"
    for name in ("Where", "Slice", "Select", "Split", "Neg", "Relu", "MaskedFill", "Cat", "Stack", "Sum", "Mean")
    for i in range(2)
)
# But for these, by which autograd may add up what was broadcast, of any number of elements that fits a memory.
_BROADCASTING = frozenset({"WhereBackward0", "MaskedFillBackward0", "MaskedFillBackward1"})
_MOST_SUMMANDS = 2.0**40
REPEATABLE = _PASSING | {"ToCopyBackward0"}
# Sums of products of what they got with what the forward gave or was given, or with nothing.
_PRODUCTS = frozenset({"MmBackward0", "AddmmBackward0", "BmmBackward0", "MvBackward0", "ConvolutionBackward0"})
_SUMS = frozenset({"EmbeddingBackward0", "ExpandBackward0"})


def _of_root(dtype: torch.dtype) -> float:
    """1 / (2 * sqrt(x)) at the smallest x."""
    return 0.5 / math.sqrt(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)


def _of_arc(dtype: torch.dtype) -> float:
    """1 / sqrt(1 - x * x) at the largest x below 1, where the square is no more than 1 - eps / 2."""
    return math.sqrt(2 / torch.finfo(dtype).eps)


_POLES: dict[str, tuple[Callable[[torch.dtype], float], str]] = {
    "SqrtBackward0": (_of_root, "the derivative of sqrt at 0 is 1 / 0"),
    **dict.fromkeys(("AcosBackward0", "AsinBackward0"), (_of_arc, "its derivative at 1 and -1 is 1 / 0")),
}
# Their only NaN, if the forward gave them a finite number.
_ZEROS: dict[str, Cause] = {
    "LogBackward0": Cause("division-by-zero", "the derivative of log at 0 is 1 / 0, of which it got a gradient of 0"),
    "ExpBackward0": Cause("zero-times-inf", "exp overflows in the forward, and the gradient that it got is 0 there"),
}


def cause_of_one(
    operations: Collection[str],
    got: TensorStats,
    made: TensorStats,
    is_input_finite: bool,
    is_output_finite: bool,
    is_weights: bool = False,
) -> Cause | None:
    """Why one node made bad gradients of finite ones; None where these numbers do not prove it.

    Args:
        operations: the names of all nodes between the two. Where more than one could have done it, nothing is proven.
        got, made: gradients, the latter bad.
        is_input_finite, is_output_finite: whether the tensor that the bad gradient is of is known to be finite, and
            the one that the other is of.
        is_weights: whether it is the gradient of a weight, to which others may have been added.
    """
    if got.is_bad or not got.dtype.is_floating_point or not made.dtype.is_floating_point:
        return None
    all_of = _without_widening(operations, got, made)
    working = all_of - _PASSING
    if len(working) > 1:
        return None
    operation = next(iter(working), "")
    is_alone = len(working) == len(all_of)
    limit, text = limit_of(made.dtype), limit_text(made.dtype)
    if operation == SUM and is_alone:
        return Cause("arithmetic-overflow", f"finite gradients add up to what is beyond {text}")
    if operation == "ToCopyBackward0" and not made.has_nan and limit < got.abs_max:
        return Cause("cast-overflow", f"{got.abs_max:.3g} in {short_name(got.dtype)} is beyond {text}")
    if operation in _SUMS and is_alone:
        return Cause("accumulation-overflow", f"finite gradients add up to what is beyond {text}")
    if operation in _PRODUCTS and is_alone and is_output_finite:
        text = f"finite gradients times finite numbers add up to what is beyond {limit_text(got.dtype)}"
        return Cause("accumulation-overflow", text)
    if operation in _POLES and got.dtype == made.dtype and not is_weights:
        bound, why = _POLES[operation]
        largest = got.abs_max * (_MOST_SUMMANDS if all_of & _BROADCASTING else 1)
        if made.has_inf and 2 * largest * bound(made.dtype) <= limit:
            return Cause("division-by-zero", why)
        if made.has_nan and is_alone and is_output_finite:
            return Cause("division-by-zero", why)
    if operation in _ZEROS and made.has_nan and is_input_finite:
        return _ZEROS[operation]
    return None


def only_operation(operations: Collection[str], got: TensorStats, made: TensorStats) -> str | None:
    """The name of those of these nodes that can make anything bad of what is finite, if all have the same."""
    working = _without_widening(operations, got, made) - _PASSING - {AGAIN}
    return next(iter(working)) if len(working) == 1 and SUM not in working else None


def _without_widening(operations: Collection[str], got: TensorStats, made: TensorStats) -> set[str]:
    """Without the conversions that autocast adds: to a wider dtype they make nothing bad."""
    is_widened = (got.dtype, made.dtype) == (torch.float16, torch.float32)
    return set(operations) - ({"ToCopyBackward0"} if is_widened else set())


_POLE = "an eps or clamp before it; where torch.where is to leave it out, that has to come before it, too"
_ADVICE = {"division-by-zero": _POLE, "zero-times-inf": _POLE, "domain": _POLE}
_OVERFLOWS = ("cast-overflow", "arithmetic-overflow", "accumulation-overflow")


def advise_gradient(kind: str, is_half: bool) -> str | None:
    """One line, or None where nothing is known to help. `is_half` tells whether some of it is in float16."""
    if kind in _OVERFLOWS and is_half:
        return "a smaller loss scale, as torch.amp.GradScaler finds it, or bfloat16, which holds up to 3.4e+38"
    return _ADVICE.get(kind)

"""What to try, from the cause of numbers that are not finite."""

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import nn

from .bad_tensors import first_bad_tensor
from .calls import Call
from .errors import MonitorWarning
from .float32 import NARROW, run_module_in_float32
from .kept_tensors import KeptTensors
from .operations import Birth
from .recorder import Recorder
from .rerun import run_again, why_not_again
from .run_state import RunState
from .stats import TensorStats
from .wording import limit_of, limit_text, short_name

__all__ = ["Cure", "advise", "may_float32_cure", "where_float32_cures"]

OVERFLOWS = ("cast-overflow", "arithmetic-overflow", "accumulation-overflow")
OTHERS = {
    "zero-times-inf": "keep infinities out of products: torch.where in place of a product with a mask",
    "inf-minus-inf": "keep infinities out of sums: torch.finfo(dtype).min in place of -inf, and only once",
    "masked-row": "let each row see something, as itself; or torch.finfo(dtype).min in place of -inf",
    "empty-reduction": "leave out what has no element, or divide a sum by count.clamp(min=1)",
    "uninitialised": "torch.zeros in place of torch.empty, or write to all of it",
}
DOMAINS = {
    **dict.fromkeys(
        ("log", "log2", "log10"),
        "log_softmax, logsigmoid or torch.xlogy in place of a logarithm of what can be 0, or clamp(min=...) before it",
    ),
    **dict.fromkeys(("sqrt", "rsqrt"), "clamp(min=0) before it; of a variance, the mean of (x - mean)**2"),
    **dict.fromkeys(("acos", "asin"), "clamp(-1, 1) before it"),
    "acosh": "clamp(min=1) before it",
    **dict.fromkeys(
        ("atanh", "erfinv", "special_erfinv"), "clamp to within -1 and 1 before it, as (-1 + eps, 1 - eps)"
    ),
    "logit": "its argument eps, as torch.logit(x, eps=1e-6)",
    "pow": "clamp(min=0) before it",
}
EXPONENTIALS = ("exp", "exp2", "expm1")
# What people write, and all of these hold.
USUAL_EPS = {torch.float16: 1e-4, torch.float64: 1e-12}


class Cure(NamedTuple):
    """Whether computing in float32 helps, as far as it was tried."""

    module: str | None = None
    """The smallest of which what it gives is finite then, and fits where it is cast back."""
    holds_uncast: bool | None = None
    """Whether what the largest one gives is finite as float32; None where that was not tried."""


def advise(birth: Birth, cure: Cure, is_autocast: bool) -> str | None:
    """One line, or None where nothing is known to help.

    Args:
        birth: where the numbers come from.
        cure: what `where_float32_cures` has found.
        is_autocast: whether autocast was on.
    """
    kind = birth.cause.kind
    dtype = _result_dtype(birth)
    name = birth.operation.rpartition(".")[2].removesuffix("_")
    if kind in OVERFLOWS and _adds_limits(birth):
        return "a mask that is half of torch.finfo(dtype).min, or -inf, or one of bool: another is added to it here"
    if kind in OVERFLOWS and (number := _too_large(birth, limit_of(dtype))) is not None:
        return f"torch.finfo(dtype).min / 2, or another that {short_name(dtype)} holds, in place of {number:.3g}"
    if kind in OVERFLOWS and dtype in NARROW:
        return _wider(birth, cure, is_autocast)
    if kind == "arithmetic-overflow" and name in EXPONENTIALS:
        return "torch.softmax or torch.logsumexp in place of it; or x - x.amax(dim, keepdim=True) before it, or a clamp"
    if kind == "division-by-zero" and dtype.is_floating_point:
        return _eps(birth, dtype, name)
    return DOMAINS.get(name) if kind == "domain" else OTHERS.get(kind)


def _wider(birth: Birth, cure: Cure, is_autocast: bool) -> str:
    dtype = _result_dtype(birth)
    if cure.module is not None:
        whole = "" if cure.module else ", all of it"
        return f'overflowstat.run_in_float32(model, "{cure.module}"){whole}: tried, and finite'
    if dtype is torch.float16 and cure.holds_uncast is not False:
        how = "torch.autocast to torch.bfloat16" if is_autocast else "torch.bfloat16 for the model"
        tried = " (not tried)" if cure.holds_uncast is None else ": in float32 it is finite"
        return f"{how}, which holds up to 3.4e+38{tried}"
    if birth.cause.kind == "cast-overflow":
        return f"a clamp to within {limit_text(dtype)} before it is converted, or another dtype there"
    return (
        "its operands .float() at that line: run_in_float32 was tried, and does not change what has a dtype of its own"
    )


def _eps(birth: Birth, dtype: torch.dtype, name: str) -> str:
    """Large enough for what is divided by it, with a factor of ten to spare."""
    limit = limit_of(dtype)
    contents = {operand.name: operand.content for operand in birth.operands[:-1]}
    exponent = abs(float(contents["exponent"])) if name == "pow" and isinstance(contents["exponent"], str) else 1.0
    divided = contents.get("tensor1", contents.get("self")) if name not in ("pow", "rsqrt", "reciprocal") else None
    largest = float(divided.finite_abs_max) if isinstance(divided, TensorStats) else 1.0
    largest = largest if largest == largest else 1.0
    needed = max(10 * math.pow(largest / limit, 1 / exponent), torch.finfo(dtype).smallest_normal)
    usual = USUAL_EPS.get(dtype, 1e-6)
    eps = usual if needed <= usual else math.pow(10, math.ceil(math.log10(needed)))
    too_small = f"; 1e-8 is 0 in {short_name(dtype)}" if dtype is torch.float16 else ""
    return f"an eps in what is divided by, as {eps:.0e}{too_small}"


def where_float32_cures(
    calls: Sequence[Call], names: Mapping[nn.Module, str], recorder: Recorder, states: Sequence[RunState]
) -> Cure:
    """The first of some modules, the innermost first, whose output is finite if it runs in float32: by trying.

    Cost: a forward in float32 of each up to there, or of the last twice.
    """
    tried = None
    for call, state in zip(calls, states, strict=True):
        if why_not_again(call):
            continue
        tried = call, state
        if _is_finite_in_float32(call, state, recorder, casts_back=True):
            return Cure(names[call.module])
    if tried is None:
        return Cure()
    holds = _is_finite_in_float32(*tried, recorder, casts_back=False)
    is_all = tried[0] is calls[-1]  # a part says nothing of what comes after it
    return Cure(holds_uncast=holds if is_all or holds is False else None)


def _is_finite_in_float32(call: Call, state: RunState, recorder: Recorder, casts_back: bool) -> bool | None:
    """None if it takes no float32."""

    def bears_bad(args: object, kwargs: object, output: object) -> bool:
        return first_bad_tensor(recorder, output) is not None

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MonitorWarning)  # that it does not fit is what is asked
            again = run_module_in_float32(call.module, recorder, casts_back)
            is_bad = run_again(call, state, KeptTensors(), again, bears_bad)
    except Exception:  # of the user's code, which runs
        return None
    return is_bad is False


def may_float32_cure(birth: Birth) -> bool:
    dtype = _result_dtype(birth)
    is_overflow = birth.cause.kind in OVERFLOWS and dtype in NARROW
    return is_overflow and not _adds_limits(birth) and _too_large(birth, limit_of(dtype)) is None


def _too_large(birth: Birth, limit: float) -> float | None:
    """A number of Python's among the operands that the dtype of the result does not hold."""
    for operand in birth.operands[:-1]:
        if operand.name in ("other", "value") and isinstance(operand.content, str):
            with suppress(ValueError):  # of one that is none
                if limit < abs(number := float(operand.content)) < math.inf:
                    return number
    return None


def _result_dtype(birth: Birth) -> torch.dtype:
    result = birth.operands[-1].content
    return result.dtype if isinstance(result, TensorStats) else torch.float32


def _adds_limits(birth: Birth) -> bool:
    """Whether an operand is the largest number of its dtype, as masks have it."""
    contents = [each.content for each in birth.operands[:-1] if isinstance(each.content, TensorStats)]
    is_sum = birth.operation.rpartition(".")[2].removesuffix("_") in ("add", "sub")
    return is_sum and any(
        stats.dtype.is_floating_point and stats.abs_max == limit_of(stats.dtype) for stats in contents
    )

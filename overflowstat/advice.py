"""What to try, from the cause of numbers that are not finite."""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .bad_tensors import first_bad_tensor
from .calls import Call
from .errors import MonitorWarning
from .float32 import NARROW, run_in_float32
from .kept_tensors import KeptTensors
from .operations import Birth
from .recorder import Recorder
from .rerun import run_again, why_not_again
from .run_state import RunState
from .stats import TensorStats
from .wording import limit_of, short_name

__all__ = ["advise", "may_float32_cure", "where_float32_cures"]

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
}


def advise(birth: Birth, cure: str | None) -> str | None:
    """One line, or None where nothing is known to help.

    Args:
        birth: where the numbers come from.
        cure: what `where_float32_cures` has found.
    """
    kind = birth.cause.kind
    dtype = _result_dtype(birth)
    name = birth.operation.rpartition(".")[2].removesuffix("_")
    if kind in OVERFLOWS and _adds_limits(birth):
        return "a mask that is half of torch.finfo(dtype).min, or -inf, or one of bool: another is added to it here"
    if kind in OVERFLOWS and dtype in NARROW:
        if cure is not None:
            whole = "" if cure else ", all of it"
            return f'overflowstat.run_in_float32(model, "{cure}"){whole}: tried, and finite'
        return "bfloat16, which holds up to 3.4e+38" if dtype is torch.float16 else None
    if kind == "division-by-zero" and dtype.is_floating_point:
        return (
            f"an eps in what is divided by, of {torch.finfo(dtype).smallest_normal:.2g} or more in {short_name(dtype)}"
        )
    return DOMAINS.get(name) if kind == "domain" else OTHERS.get(kind)


def where_float32_cures(
    calls: Sequence[Call], names: Mapping[nn.Module, str], recorder: Recorder, states: Sequence[RunState]
) -> str | None:
    """The first of some modules, the innermost first, whose output is finite if it runs in float32: by trying.

    None if there is none, or none that may be run again. Cost: a forward in float32 of each up to there.
    """
    for call, state in zip(calls, states, strict=True):
        if why_not_again(call):
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", MonitorWarning)  # that it does not fit is what is asked
                again = run_in_float32(call.module, "", recorder=recorder)
                bad = run_again(call, state, KeptTensors(), again, lambda output: first_bad_tensor(recorder, output))
        except Exception:  # of code that takes no float32
            return None
        if bad is None:
            return names[call.module]
    return None


def may_float32_cure(birth: Birth) -> bool:
    return birth.cause.kind in OVERFLOWS and _result_dtype(birth) in NARROW and not _adds_limits(birth)


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

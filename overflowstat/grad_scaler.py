"""Whether a backward is that of a loss which a GradScaler has multiplied.

Its infinities are then no fault: the scaler looks for them, skips the optimizer's step and lowers its scale.
"""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.amp import GradScaler
from torch.optim import Optimizer

from .backward_roots import backward_roots
from .frames import Frame
from .measurement import measure
from .recorder import Recorder
from .verdict import Kind, Verdict

__all__ = ["Promise", "seems_scaled", "what_the_scaler_does"]

MOST_NODES = 64  # of a loss
MAY_BE_CURED: tuple[Kind, ...] = (
    *("cast-overflow", "arithmetic-overflow", "accumulation-overflow"),
    *("bad-input", "unknown"),  # it may have been the scaled loss that overflowed
)
"""By a lower scale."""


def seems_scaled(is_models: Callable[[Any], bool]) -> bool:
    """Whether the loss of the backward in progress may be one that a scaler has multiplied: if one of its operations is
    a product with what needs no gradient. After that may come a division, or a sum of several.

    To be asked in the backward. True where it cannot be told.

    Args:
        is_models: whether a node is one of the model's own forward, and none of the loss.
    """
    nodes = [node for node, _ in backward_roots()]
    has_begun = bool(nodes)
    for node in nodes:  # which grows
        if is_models(node):
            continue
        if node.name() == "MulBackward0" and node.next_functions[1][0] is None:
            return True
        if len(nodes) < MOST_NODES:
            nodes += [following for following, _ in node.next_functions if following is not None]
    return not has_begun


def what_the_scaler_does(kind: Kind) -> str | None:
    """With gradients that are bad; None if no scaler has multiplied a loss yet.

    Looks through all objects of the process: for a detection, not for hooks. A scaler leaves no other trace: what it
    multiplies keeps the scale only until the backward has passed there, and its `step` does not call an optimizer whose
    step it skips. To wrap its methods would be to change torch for all.
    """
    found = [each for each in gc.get_objects() if issubclass(type(each), GradScaler) and _has_scaled(each)]
    if not found:
        return None
    now = f" (now {found[0].get_scale():g})" if len(found) == 1 else ""
    but = "" if kind in MAY_BE_CURED else ", which is no cure for this"
    return f"GradScaler will skip this step, and lower its scale{now}{but}"


def _has_scaled(scaler: Any) -> bool:
    return scaler.is_enabled() and scaler._scale is not None


class Promise(NamedTuple):
    """That a scaler will skip a step."""

    frame: Frame
    verdict: Verdict
    """For where it does not."""

    def is_broken(self, optimizer: Optimizer, recorder: Recorder) -> bool:
        """By an optimizer that takes its step with gradients that are bad. Cost: a pass over them."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        # Fused optimizers are called all the same, and told of infinities.
        if getattr(optimizer, "found_inf", None) is not None or not gradients:
            return False
        measurement = measure(recorder, gradients)
        return any(measurement.non_finite(i) for i in range(measurement.count))

"""A module call that is run once more, to find the operation that made numbers which are not finite."""

from typing import NamedTuple

from torch import Tensor, nn

from .bad_tensors import first_bad_tensor
from .calls import Call
from .kept_tensors import KeptTensors
from .operations import Birth, Operations
from .recorder import Recorder
from .rerun import run_again, why_not_again
from .run_state import RunState

__all__ = ["Drilled", "drill"]


class Drilled(NamedTuple):
    """What running a call once more has shown."""

    birth: Birth | None = None
    """Of the bad numbers; None where they came from something that was there before, or did not come."""
    given: Tensor | None = None
    """What bore them, where they were there before."""
    reason: str = ""
    """Why it has shown nothing."""


class _Found(BaseException):
    """Ends the run where the bad numbers have come. No Exception, which the user's code may catch."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor


def drill(call: Call, target: nn.Module, recorder: Recorder, state: RunState) -> Drilled:
    """Run a call once more, as far as to what the target, itself or a module in it, is given or gives that is bad.

    Tensors that were there before and are written to are put back, too, beside what `run_again` puts back.

    Cost: that of the call, and that of `Operations`; twice where it does not come to anything bad, and memory that is
    not initialised may be the reason.

    Args:
        call: one that is in progress, or whose arguments are as they were.
        target: where the bad numbers were seen.
        state: to begin in.
    """
    if reason := why_not_again(call):
        return Drilled(reason=reason)
    kept = KeptTensors()
    operations = Operations(recorder, call.module, kept)
    found = _run(call, target, operations, kept, recorder, state)
    if operations.has_seen_empty and found.birth is None and found.given is None:
        again = _run(call, target, Operations(recorder, call.module, kept, fill_empty=True), kept, recorder, state)
        if again.birth is not None and again.birth.cause.kind == "uninitialised":
            return again
    return found


def _run(
    call: Call, target: nn.Module, operations: Operations, kept: KeptTensors, recorder: Recorder, state: RunState
) -> Drilled:
    def look(values: object) -> None:
        if (tensor := first_bad_tensor(recorder, values)) is not None:
            raise _Found(tensor)

    hooks = []
    if target is not call.module:
        hooks.append(target.register_forward_pre_hook(lambda module, a, kw: look((a, kw)), with_kwargs=True))
        hooks.append(target.register_forward_hook(lambda module, a, kw, output: look(output), with_kwargs=True))
    try:
        run_again(call, state, kept, operations, look if target is call.module else lambda output: None)
    except _Found as found:
        birth = operations.birth_of(found.tensor)
        return Drilled(birth, None if birth else found.tensor)
    except Exception as error:
        return Drilled(reason=f"run again, it raised {type(error).__name__}: {error}")
    finally:
        for hook in hooks:
            hook.remove()
    return Drilled(reason="run again, it gave finite numbers")

"""A module call that is run once more, to find the operation that made numbers which are not finite."""

import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from . import capture
from .bad_tensors import kinds_in
from .calls import Call
from .kept_tensors import KeptTensors
from .operations import Operations, Origin
from .recorder import Recorder
from .rerun import run_again, why_not_again
from .row import NonFinite
from .run_state import RunState
from .stats import apart_from_the_run

__all__ = ["FAILED", "Drilled", "Seen", "drill"]

FAILED = "the search for it failed"


class Seen(NamedTuple):
    """Where the bad numbers were seen."""

    module: nn.Module
    label: str
    """Of the line of its frame."""
    kinds: NonFinite
    """What it bears, and may not."""


class Drilled(NamedTuple):
    """What running a call once more has shown."""

    origin: Origin | None = None
    """Of the bad numbers."""
    reason: str = ""
    """Why it has shown nothing."""
    has_drawn: bool = False
    """Whether random numbers were drawn: if these were others than before, it shows nothing."""


class _Found(BaseException):
    """Ends the run where the bad numbers have come. No Exception, which the user's code may catch."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor


def drill(call: Call, seen: Seen, recorder: Recorder, state: RunState) -> Drilled:
    """Run a call once more, as far as to where the bad numbers come again.

    Tensors that were there before and are written to are put back, too, beside what `run_again` puts back.

    Cost: that of the call, and that of `Operations`; twice where it does not come to anything bad, and memory that is
    not initialised may be the reason.

    Args:
        call: one that is in progress, or whose arguments are as they were.
        seen: in the module of the call itself, or in one that it calls.
        state: to begin in.
    """
    if reason := why_not_again(call):
        return Drilled(reason=reason)
    kept = KeptTensors()
    operations = Operations(recorder, call.module, kept)
    found = _run(call, seen, operations, kept, recorder, state)
    if operations.has_seen_empty and found.origin is None:
        again = _run(call, seen, Operations(recorder, call.module, kept, fill_empty=True), kept, recorder, state)
        if again.origin is not None and again.origin.is_uninitialised:
            return again
    return found


def _run(
    call: Call, seen: Seen, operations: Operations, kept: KeptTensors, recorder: Recorder, state: RunState
) -> Drilled:
    others: list[NonFinite] = []
    thread = threading.get_ident()

    def look(args: tuple[object, ...], kwargs: Mapping[str, object], output: object = None) -> None:
        if threading.get_ident() != thread:  # which runs the model for its own ends
            return
        with apart_from_the_run():
            for tensor in _at(seen.label, args, kwargs, output):
                kinds = kinds_in(recorder, tensor)
                if kinds & seen.kinds == seen.kinds:
                    raise _Found(tensor)
                if kinds:
                    others.append(kinds)

    hooks = []
    if seen.module is not call.module:
        hooks.append(seen.module.register_forward_pre_hook(lambda module, *given: look(*given), with_kwargs=True))
        hooks.append(seen.module.register_forward_hook(lambda module, *given: look(*given), with_kwargs=True))
    try:
        run_again(call, state, kept, operations, look if seen.module is call.module else None)
    except _Found as found:
        if operations.failure:
            return Drilled(reason=f"{FAILED}: {operations.failure}")
        return Drilled(operations.origin_of(found.tensor, seen.kinds), has_drawn=operations.has_drawn)
    except Exception as error:
        return Drilled(reason=f"run again, it raised {type(error).__name__}: {error}")
    finally:
        for hook in hooks:
            hook.remove()
    return Drilled(reason="run again, it gave " + ("bad numbers of another kind" if others else "finite numbers"))


def _at(label: str, args: tuple[object, ...], kwargs: Mapping[str, object], output: object) -> Iterator[Tensor]:
    """The tensor that a line shows, or the ones that hold its numbers."""
    found = capture.inputs(args, kwargs, nested=True) if label.startswith("input") else capture.outputs(output, True)
    for name, value in found:
        if capture.is_tensor(value) and (name == label or label.startswith((f"{name}.", f"{name}["))):
            yield value

"""A module call that is run once more, to find the operation that made numbers which are not finite."""

import enum
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from .calls import Call
from .capture import is_wrapper
from .kept_tensors import KeptTensors
from .operations import Birth, Operations
from .recorder import Recorder
from .run_state import RunState
from .stats import apart_from_the_run, shape_of

__all__ = ["Drilled", "drill", "why_not_again"]

_UNCHANGING = (
    *(type(None), bool, int, float, complex, str, bytes, slice, range, type, enum.Enum, types.FunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


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

    The user's code runs twice for it. No gradients are recorded; tensors that were there before and are written to, and
    the random numbers to come, are put back; other objects that the code changes are not.

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
    found = _run(call, target, operations, kept, state)
    if operations.has_seen_empty and found.birth is None and found.given is None:
        again = _run(call, target, Operations(recorder, call.module, kept, fill_empty=True), kept, state)
        if again.birth is not None and again.birth.cause.kind == "uninitialised":
            return again
    return found


def why_not_again(call: Call) -> str:
    """What stands against running a call twice, or nothing."""
    for value in _pytree.tree_leaves((call.args, dict(call.kwargs))):
        if isinstance(value, Tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(value):
                return "it is inside of a transform of torch.func"
        elif not isinstance(value, _UNCHANGING):
            return f"it is given a {type(value).__name__}, which it may write to"
    return ""


def _run(call: Call, target: nn.Module, operations: Operations, kept: KeptTensors, state: RunState) -> Drilled:
    def look(values: object) -> None:
        if (tensor := operations.bad_among(values)) is not None:
            raise _Found(tensor)

    hooks = []
    if target is not call.module:
        hooks.append(target.register_forward_pre_hook(lambda module, a, kw: look((a, kw)), with_kwargs=True))
        hooks.append(target.register_forward_hook(lambda module, a, kw, output: look(output), with_kwargs=True))
    with apart_from_the_run():
        # Running statistics, too, of which the schema of batch norm does not tell that they are written to.
        kept.keep(buffer for buffer in call.module.buffers() if not is_wrapper(buffer))
    # Containers are new ones, so that what the forward puts into them is not in those of the user.
    args, kwargs = _pytree.tree_map(lambda value: value, (call.args, dict(call.kwargs)))
    try:
        with (
            torch.no_grad(),
            _members_kept(call.module, (args, kwargs)),
            state.restored(),
            _without_autocast_cache(),
            _eager(),
        ):
            with operations:
                output = call.module.forward(*args, **kwargs)
            if target is call.module:
                look(output)
    except _Found as found:
        birth = operations.birth_of(found.tensor)
        return Drilled(birth, None if birth else found.tensor)
    except Exception as error:
        return Drilled(reason=f"run again, it raised {type(error).__name__}: {error}")
    finally:
        for hook in hooks:
            hook.remove()
        with apart_from_the_run():
            kept.put_back()
    return Drilled(reason="run again, it gave finite numbers")


@contextmanager
def _members_kept(module: nn.Module, given: object) -> Iterator[None]:
    """Parameters, buffers and what was given, where the forward puts other tensors or other memory in their place."""
    members: list[dict[str, Any]] = [each for part in module.modules() for each in (part._parameters, part._buffers)]
    kept = [(each, dict(each)) for each in members]
    tensors = [value for each in members for value in each.values()] + _pytree.tree_leaves(given)
    with apart_from_the_run():
        memory = [(t, t.data) for t in tensors if isinstance(t, Tensor) and not is_lazy(t) and not is_wrapper(t)]
    try:
        yield
    finally:
        for each, values in kept:
            each.clear()
            each.update(values)
        with apart_from_the_run():
            for tensor, data in memory:
                if _place(tensor) != _place(data):
                    tensor.data = data


def _place(tensor: Tensor) -> object:
    """Which memory a tensor is in, and how; None for one without storage."""
    try:
        return tensor.untyped_storage()._cdata, tensor.storage_offset(), shape_of(tensor)
    except (RuntimeError, NotImplementedError):
        return None


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Casts of weights that are made here know of no gradient, and must not be met by the forward that goes on."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def _eager() -> Any:
    """What is compiled would not show its operations."""
    return torch.compiler.set_stance("force_eager")

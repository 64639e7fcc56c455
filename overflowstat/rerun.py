"""A module call that is run once more, of which nothing stays."""

import enum
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from .calls import Call
from .capture import is_tensor, is_wrapper
from .kept_tensors import KeptTensors
from .run_state import RunState
from .stats import apart_from_the_run, shape_of

__all__ = ["holds_containers", "run_again", "why_not_again"]

T = TypeVar("T")

_UNCHANGING = (
    *(type(None), bool, int, float, complex, str, bytes, slice, range, type, enum.Enum),
    *(types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def why_not_again(call: Call) -> str:
    """What stands against running a call twice, or nothing."""
    for value in _pytree.tree_leaves((call.args, dict(call.kwargs))):
        if is_tensor(value):
            if torch._C._functorch.is_functorch_wrapped_tensor(value):
                return "it is inside of a transform of torch.func"
        elif not isinstance(value, _UNCHANGING):
            return f"it is given a {type(value).__name__}, which it may write to"
    return ""


def holds_containers(call: Call) -> bool:
    """Whether a call is given lists or dicts, which it may have put something into."""

    def any_in(values: Iterable[object]) -> bool:
        return any(isinstance(x, (list, dict)) or (isinstance(x, tuple) and any_in(x)) for x in values)

    return any_in((*call.args, *call.kwargs.values()))


def run_again(
    call: Call,
    state: RunState,
    kept: KeptTensors,
    inside: AbstractContextManager[object],
    look: Callable[[tuple[Any, ...], dict[str, Any], Any], T] | None,
) -> T | None:
    """Run the forward of a call once more, and give look(args, kwargs, output), if that is to be called.

    The user's code runs twice for it. No gradients are recorded; buffers, what was put in the place of parameters,
    buffers and inputs, what is in `kept` and the random numbers to come are put back. Other objects that the code
    changes are not. Raises what it raises.

    Args:
        call: one that is in progress, or whose arguments are as they were.
        state: to begin in.
        kept: to which what is written to may be added.
        inside: entered around the forward.
        look: at what it was given and gave, before what that may share memory with is put back.
    """
    # Containers are new ones, so that what the forward puts into them is not in those of the user.
    args, kwargs = _pytree.tree_map(lambda value: value, (call.args, dict(call.kwargs)))
    with apart_from_the_run():
        # Running statistics, too, of which the schema of batch norm does not tell that they are written to.
        kept.keep(buffer for buffer in call.module.buffers() if not is_wrapper(buffer))
    try:
        with _as_before(), _members_kept(call.module, (args, kwargs)), state.restored(), _without_autocast_cache():
            with _eager(), inside:
                output = call.module.forward(*args, **kwargs)
            return look(args, kwargs, output) if look is not None else None
    finally:
        with apart_from_the_run():
            kept.put_back()


@contextmanager
def _members_kept(module: nn.Module, given: object) -> Iterator[None]:
    """Parameters, buffers and what was given, where the forward puts other tensors or other memory in their place."""
    members: list[dict[str, Any]] = [each for part in module.modules() for each in (part._parameters, part._buffers)]
    kept = [(each, dict(each)) for each in members]
    tensors = [value for each in members for value in each.values()] + _pytree.tree_leaves(given)
    with apart_from_the_run():
        memory = [(t, t.data) for t in tensors if is_tensor(t) and not is_lazy(t) and not is_wrapper(t)]
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


@contextmanager
def _as_before() -> Iterator[None]:
    """Without gradients; but torch's transformers do not take the short way that they have then, if they had not."""
    was_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(was_fast and not torch.is_grad_enabled())
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fast)


def _eager() -> Any:
    """What is compiled would not show its operations."""
    return torch.compiler.set_stance("force_eager")

"""Which modules a program calls that are no part of another one: a hook on all modules finds them, and watches none."""

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

import torch
from torch import fx, nn
from torch.nn.modules import module as torch_modules
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ..dynamo import is_making_a_program, not_compiled, traced_only
from ..hooks import is_in_backward, is_watched

__all__ = ["ModuleSet", "RootFinder", "is_any_in_progress"]

_CALL = nn.Module._call_impl.__code__
_HAS_ANY_GLOBAL_HOOK = torch_modules._has_any_global_hook

Found = Callable[[nn.Module, tuple[object, ...], Mapping[str, object]], bool]
"""(root, args, kwargs) -> whether that is done with, or else to be asked again at the next call."""


class ModuleSet:
    """Of modules that it does not keep alive; by identity, since a module may have an equality of its own."""

    def __init__(self) -> None:
        self.by_id: dict[int, weakref.ref[nn.Module]] = {}
        """A number is taken out before another object can have it."""

    def add(self, module: nn.Module) -> None:
        by_id, number = self.by_id, id(module)

        def forget(_: object) -> None:
            by_id.pop(number, None)

        by_id[number] = weakref.ref(module, forget)

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self.by_id


class RootFinder:
    """Tells of each module that is called while no other one is being called on this thread, before its forward runs.

    Once for each: all modules that are in it then are known, and not looked at again. Not told of are calls that
    compute nothing (torch.export, torch.jit.trace, torch.fx, fake tensors), recomputed ones, what torch.compile makes,
    and the replicas of nn.DataParallel.

    Cost, as long as it is on: a lookup of 0.2 microseconds a module call, and what torch takes for any such hook, 0.6
    of a module that has others, 1.5 of one that has none; of a module that is not known, as one that a model keeps in a
    plain list, a walk up the stack to the call that it is made from. torch.compile traces through the lookup, and
    breaks its graph once at a module that is not known yet.

    Args:
        found: called with a root; see `Found`.
    """

    def __init__(self, found: Found) -> None:
        self._found = found
        self._known = ModuleSet()
        self._lock = threading.RLock()
        self._handle: RemovableHandle | None = None

    def start(self) -> None:
        known, look = self._known.by_id, self._look

        # On its own it would be compiled with a guard on all that is known, which changes as models come and go.
        @traced_only
        def hook(module: nn.Module, args: object) -> None:
            if id(module) not in known:
                look(module)

        self._handle = register_module_forward_pre_hook(hook)
        # What torch.compile makes of a module warns at each call if there is a hook like this, which is none of the
        # program's and may be called as often as it likes.
        torch_modules._has_any_global_hook = _has_other_global_hook

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            torch_modules._has_any_global_hook = _HAS_ANY_GLOBAL_HOOK

    @not_compiled
    def _look(self, module: nn.Module) -> None:
        if _is_copy(module) or is_in_backward() or _computes_nothing():
            return
        call = None
        for frame in _calls():
            if frame.f_locals["self"] is not module:
                if is_watched(module):  # as one that has come into a model since that was found
                    self._known.add(module)
                return
            call = call or frame
        values = {} if call is None else call.f_locals
        args, kwargs = values.get("args", ()), values.get("kwargs", {})
        if any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values())):
            return
        with self._lock:
            if module in self._known:  # since another thread was quicker
                return
            if self._found(module, args, kwargs):
                for each in module.modules():
                    self._known.add(each)


def is_any_in_progress() -> bool:
    """Whether this thread is in a module's forward."""
    return next(_calls(), None) is not None


def _calls() -> Iterator[FrameType]:
    """The frames of module calls in progress on this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame
        frame = frame.f_back


def _has_other_global_hook() -> bool:
    tables = [table for name, table in vars(torch_modules).items() if name.startswith("_global_")]
    return sum(len(table) for table in tables if isinstance(table, OrderedDict)) > 1


def _is_copy(module: nn.Module) -> bool:
    """Whether it is what torch has made of a module to run it, without weights of its own."""
    inside = dict(module.named_children()).get("_orig_mod", module)  # of what torch.compile wraps
    if isinstance(inside, fx.GraphModule):
        return next(inside.parameters(), None) is None
    return bool(getattr(module, "_is_replica", False))


def _computes_nothing() -> bool:
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or is_making_a_program():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None

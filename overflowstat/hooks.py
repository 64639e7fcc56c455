"""The hooks that a monitor puts on modules, and what they are on copies of these modules."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import nn
from torch.optim import Optimizer

from .dynamo import not_compiled

__all__ = [
    "IN_COPIES",
    "NOT_SCRIPTED",
    "ForwardHook",
    "Hook",
    "OptimizerHook",
    "Record",
    "RootEntryHook",
    "RootHook",
    "is_in_backward",
    "is_watched",
    "refuse_replica",
]

# What torch.jit.script says, which compiles hooks and asks for their name first.
NOT_SCRIPTED = "a watched model cannot be scripted: call monitor.disable() before that, and enable() when it is done"

IN_COPIES = (getattr, (nullcontext, "__exit__"))
"""What a hook is on a copy of its module, as `__reduce__` tells it: a function that takes anything and does nothing. It
is not of this package, without which a model that was saved under watch can be loaded, then."""

Kwargs = Mapping[str, object]
Record = Callable[[int, nn.Module, object, Kwargs, object], bool]
"""(number of a module, module, args, kwargs, output) -> whether there is something to look at"""


class Hook:
    """A copy of a module, deep or pickled, takes the hooks along: there they do nothing, instead of dragging a copy of
    the monitor with them."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return IN_COPIES

    @property
    def __name__(self) -> str:
        raise AttributeError(NOT_SCRIPTED)


class ForwardHook(Hook):
    """After each forward of one module: record(number, module, args, kwargs, output), and look() if that is true.

    csrc/hook.cpp does the same.
    """

    def __init__(
        self,
        number: int,
        module: nn.Module,
        record: Record,
        look: Callable[[], None],
    ) -> None:
        self._number = number
        self._module = module
        self._record = record
        self._look = look

    @not_compiled
    def __call__(self, module: nn.Module, args: object, kwargs: Kwargs, output: object) -> None:
        if module is not self._module:
            refuse_replica(module)
        elif self._record(self._number, module, args, kwargs, output):
            self._look()


class RootHook(Hook):
    """Calls callback(root, args, kwargs, output) after each forward of the root module."""

    def __init__(self, root: nn.Module, callback: Callable[[nn.Module, object, Kwargs, object], None]) -> None:
        self._root = root
        self._callback = callback

    @not_compiled
    def __call__(self, module: nn.Module, args: object, kwargs: Kwargs, output: object) -> None:
        if module is self._root:
            self._callback(module, args, kwargs, output)
        else:
            refuse_replica(module)


def refuse_replica(module: nn.Module) -> None:
    """What a hook does on a module that is not its own: nothing on a copy, which may be used as it is."""
    if getattr(module, "_is_replica", False):
        raise RuntimeError(
            "overflowstat watches a model that nn.DataParallel has replicated: replicas come and go with every forward "
            "and cannot be watched; use nn.parallel.DistributedDataParallel"
        )


class RootEntryHook(Hook):
    """Calls callback(args, kwargs) before each forward of the root module."""

    def __init__(self, root: nn.Module, callback: Callable[[tuple[object, ...], Kwargs], None]) -> None:
        self._root = root
        self._callback = callback

    @not_compiled
    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: Kwargs) -> None:
        if module is self._root:
            self._callback(args, kwargs)


class OptimizerHook:
    """Calls method(optimizer) as long as the method's object is there: torch keeps such hooks for all optimizers."""

    def __init__(self, method: Callable[[Optimizer], None]) -> None:
        self._method = weakref.WeakMethod(method)

    @not_compiled
    def __call__(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if (method := self._method()) is not None:
            method(optimizer)


def is_watched(module: nn.Module) -> bool:
    """Whether any monitor has a hook on this module."""
    return any(type(hook).__module__.split(".")[0] == __package__ for hook in module._forward_hooks.values())


def is_in_backward() -> bool:
    """Whether autograd is running a backward in this thread. A forward there is one that is recomputed."""
    return torch._C._current_graph_task_id() != -1

"""The hooks that a monitor puts on modules, and what they do on copies of these modules."""

import sys
from collections.abc import Callable
from types import FrameType

from torch import nn

__all__ = ["ForwardHook", "RootEntryHook", "RootHook", "calls_in_progress", "is_watched"]


class _Hook:
    """A copy of a module, deep or pickled, takes the hooks along: there they do nothing, instead of dragging a copy of
    the monitor with them."""

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inert_hook, ()


class ForwardHook(_Hook):
    """After each forward of one module: record(number, module, args, output), and look() if that is true.

    Here is all the Python that runs at each module call.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        record: Callable[[int, nn.Module, object, object], bool],
        look: Callable[[], None],
    ) -> None:
        self._module = module
        self._number = number
        self._record = record
        self._look = look

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if module is not self._module:
            _refuse_replica(module)
        elif self._record(self._number, module, args, output):
            self._look()


class RootHook(_Hook):
    """Calls callback(root, args, output) after each forward of the root module."""

    def __init__(self, root: nn.Module, callback: Callable[[nn.Module, object, object], None]) -> None:
        self._root = root
        self._callback = callback

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if module is self._root:
            self._callback(module, args, output)
        else:
            _refuse_replica(module)


def _refuse_replica(module: nn.Module) -> None:
    if getattr(module, "_is_replica", False):
        raise RuntimeError(
            "overflowstat watches a model that nn.DataParallel has replicated: replicas come and go with every forward "
            "and cannot be watched; use nn.parallel.DistributedDataParallel"
        )


class RootEntryHook(_Hook):
    """Calls callback() before each forward of the root module."""

    def __init__(self, root: nn.Module, callback: Callable[[], None]) -> None:
        self._root = root
        self._callback = callback

    def __call__(self, module: nn.Module, args: object) -> None:
        if module is self._root:
            self._callback()


def _inert_hook() -> Callable[..., None]:
    return _ignore


def _ignore(*_: object) -> None:
    pass


def is_watched(module: nn.Module) -> bool:
    """Whether any monitor has a hook on this module."""
    return any(isinstance(hook, (ForwardHook, RootHook)) for hook in module._forward_hooks.values())


def calls_in_progress(module: nn.Module) -> int:
    """How many calls of this module the calling thread is in, as told by its stack."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back
    return count

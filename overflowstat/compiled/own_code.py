"""Code of a model's own, where torch.compile has made something of the same code without our hooks."""

import types
import weakref
from collections.abc import Iterable

from torch import nn

from ..dynamo import compiled_versions

__all__ = ["OwnCode", "forward_of"]


class OwnCode:
    """Of one monitor, whose modules are given a copy of their class's `forward` where what was compiled of that is not
    theirs alone.

    Dynamo keeps what it has made with the code that it was made of, and where a module had no hooks it guards on none:
    what it has made of another instance, or before a monitor was attached, would run in place of what is watched. A
    copy of the code has nothing yet. One is shared by all modules of a class, so that they share what is compiled, too.
    """

    def __init__(self) -> None:
        self._copies: dict[types.FunctionType, types.FunctionType] = {}
        self._known: dict[types.FunctionType, int] = {}  # how many versions there were when it was looked at last
        self._given: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def give(self, modules: Iterable[nn.Module]) -> bool:
        """To those of which versions have come that were not there when `look` was called last. Gives whether any had
        been there.

        Cost: a microsecond a class.
        """
        by_forward: dict[types.FunctionType, list[nn.Module]] = {}
        for module in modules:
            if "forward" not in module.__dict__ and (forward := forward_of(module)) is not None:
                by_forward.setdefault(forward, []).append(module)
        found = False
        for forward, its_modules in by_forward.items():
            versions = compiled_versions(forward.__code__)
            found = found or versions > 0
            if versions > self._known.get(forward, 0):
                for module in its_modules:
                    self.give_to(module)
            elif versions < self._known.get(forward, 0):
                self._known[forward] = versions
        return found

    def give_to(self, module: nn.Module) -> bool:
        """Gives whether it had none, and can have."""
        forward = forward_of(module)
        if "forward" in module.__dict__ or forward is None:
            return False
        if forward not in self._copies:
            self._copies[forward] = _copy(forward)
        # As what wraps a forward does, and not by __setattr__, which models override.
        module.__dict__["forward"] = types.MethodType(self._copies[forward], module)
        self._given.add(module)
        return True

    def has(self, module: nn.Module) -> bool:
        return self.is_copy(module.__dict__.get("forward"))

    def is_copy(self, function: object) -> bool:
        return getattr(function, "__func__", None) in self._copies.values()

    def look(self, modules: Iterable[nn.Module]) -> None:
        """All versions that there are now of what has no code of its own are with hooks."""
        for forward in {forward_of(module) for module in modules if "forward" not in module.__dict__}:
            if forward is not None:
                self._known[forward] = compiled_versions(forward.__code__)

    def take_back(self) -> None:
        """From all modules; what was compiled of their own code is kept for when they are given it again."""
        for module in list(self._given):
            self.take_from(module)

    def take_from(self, module: nn.Module) -> None:
        if self.has(module):
            del module.__dict__["forward"]
        self._given.discard(module)


def forward_of(module: nn.Module) -> types.FunctionType | None:
    """That of its class; None for one that is no function of Python. Not by getattr, which modules of TorchScript do
    not expect."""
    for kind in type(module).__mro__:
        if "forward" in kind.__dict__:
            found = kind.__dict__["forward"]
            return found if isinstance(found, types.FunctionType) else None
    return None


def _copy(function: types.FunctionType) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    copy.__annotations__ = function.__annotations__
    copy.__doc__ = function.__doc__
    copy.__qualname__ = function.__qualname__
    copy.__module__ = function.__module__
    return copy

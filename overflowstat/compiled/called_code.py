"""The code that a model's forwards call by name, where torch.compile has made something of it without our hooks."""

import types
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from ..dynamo import compiled_versions, frames_compiled
from .own_code import forward_of

__all__ = ["CalledCode"]

_FUNCTIONS = types.FunctionType, types.MethodType


class CalledCode:
    """Of one monitor: what `OwnCode` does not copy. A method that is called where a graph broke, what a decorator
    holds, functions and methods that were compiled by themselves, and those that were put on one module.

    Args:
        is_copy: whether a function is one of `OwnCode`.
    """

    def __init__(self, is_copy: Callable[[object], bool]) -> None:
        self._is_copy = is_copy
        self._of_class: dict[type, set[types.CodeType]] = {}
        self._known: dict[types.CodeType, int] = {}  # how many versions there were when it was looked at last
        self._frames = 0  # that had been compiled then, in all of the process

    def look_again(self) -> None:
        """At modules that have come since."""
        self._frames = 0

    def found(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Those that call code of which versions have come that were not there when this was called last.

        Cost: where nothing was compiled since, a look-up; else some microseconds for each function.
        """
        if self._frames == (frames := frames_compiled()):
            return []
        self._frames = frames
        by_code: dict[types.CodeType, list[nn.Module]] = {}
        for module in modules:
            for code in self._code_of(module):
                by_code.setdefault(code, []).append(module)
        versions = {code: compiled_versions(code) for code in by_code}
        grown = [module for code in by_code if versions[code] > self._known.get(code, 0) for module in by_code[code]]
        self._known.update(versions)
        return grown

    def _code_of(self, module: nn.Module) -> set[types.CodeType]:
        kind = type(module)
        if kind not in self._of_class:
            forward = forward_of(module)
            self._of_class[kind] = _called_by([forward], kind) - {forward.__code__} if forward is not None else set()
        own = {name: value for name, value in module.__dict__.items() if isinstance(value, _FUNCTIONS)}
        own.pop("_compiled_call_impl", None)  # module.compile() puts it there: calls what any call of the module does
        if self._is_copy(own.get("forward")):
            del own["forward"]
        return self._of_class[kind] | _called_by(own.values(), kind) if own else self._of_class[kind]


def _called_by(functions: Iterable[object], kind: type) -> set[types.CodeType]:
    """The code of functions, of what they hold, and of methods and functions that are called by the names in them."""
    left, seen = list(functions), set()
    while left:
        function = left.pop()
        function = function.__func__ if isinstance(function, types.MethodType) else function
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        left += function.__dict__.values()  # what a decorator says that it wraps
        left += _held_by(function)
        if not _is_of_torch(function):
            for name in _names_in(function.__code__):
                left += [vars(base)[name] for base in kind.__mro__ if name in vars(base) and base is not nn.Module]
                left.append(function.__globals__.get(name))
    return {function.__code__ for function in seen if not _is_of_torch(function)}


def _held_by(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue


def _is_of_torch(function: types.FunctionType) -> bool:
    """As its decorators are, which all that they are on shares. Its modules have methods as those of others do."""
    name = str(function.__globals__.get("__name__"))
    return name.startswith("torch.") and not name.startswith("torch.nn.modules.")


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)

"""The modules of a model that have hooks for torch.compile to trace."""

from collections.abc import Iterator

from torch import nn

from ..modules import ModuleTree
from ..wording import module_text
from .hook import WatchedHook

__all__ = ["HookedModules"]


class HookedModules:
    """Of one monitor, by their numbers: all that are watched but the root, which is compiled without its hooks.

    Args:
        modules: those that are watched.
    """

    def __init__(self, modules: ModuleTree) -> None:
        self._modules = modules
        self._hooks: dict[int, tuple[nn.Module, str, WatchedHook]] = {}
        self._inside: dict[int, list[int]] = {}  # as far as they were asked for

    def __contains__(self, number: int) -> bool:
        return number in self._hooks

    def __iter__(self) -> Iterator[tuple[nn.Module, WatchedHook]]:
        for module, _, hook in self._hooks.values():
            yield module, hook

    def add(self, number: int, name: str, module: nn.Module, hook: WatchedHook) -> None:
        self._hooks[number] = module, name, hook
        self._inside.clear()

    def drop(self, number: int) -> None:
        self._hooks.pop(number, None)
        self._inside.clear()

    def clear(self) -> None:
        self._hooks.clear()
        self._inside.clear()

    def module(self, number: int) -> nn.Module:
        return self._hooks[number][0]

    def hook(self, number: int) -> WatchedHook:
        return self._hooks[number][2]

    def text(self, number: int) -> str:
        """What to call it, the root too."""
        if number not in self._hooks:
            return module_text("", type(self._modules.root).__name__)
        module, name, _ = self._hooks[number]
        return module_text(name, type(module).__name__)

    def inside(self, number: int) -> list[int]:
        """Numbers of those in a module, or in the root."""
        if number not in self._inside:
            around = self._hooks[number][0] if number in self._hooks else self._modules.root
            numbers = self._modules.numbers
            found = [numbers[module] for module in around.modules() if module is not around and module in numbers]
            self._inside[number] = [i for i in found if i in self._hooks]
        return self._inside[number]

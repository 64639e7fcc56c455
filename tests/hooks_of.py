"""Whose hooks are on a model."""

from collections.abc import Iterator

from torch import nn
from torch.optim import optimizer

__all__ = ["ours", "ours_on_optimizers"]


def ours(model: nn.Module, package: str = "overflowstat") -> int:
    """How many hooks of this package are on the modules of a model, of any kind that a module has."""
    return sum(_package(hook) == package for module in model.modules() for hook in _hooks(module))


def ours_on_optimizers() -> int:
    """Of those that torch calls for every optimizer."""
    kept = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
    return sum(_package(hook) == "overflowstat" for hooks in kept for hook in hooks.values())


def _hooks(module: nn.Module) -> Iterator[object]:
    for name, hooks in vars(module).items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            yield from hooks.values()


def _package(hook: object) -> str:
    """A bound method is of its object's class's package."""
    owner = getattr(hook, "__self__", None)
    module: str = type(hook).__module__ if owner is None else type(owner).__module__
    return module.split(".")[0]

"""The qualified names of modules as the user knows them, without what wrappers put in front."""

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["has_forward", "module_around", "named_modules", "submodule"]

INNER = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""What FSDP1, checkpoint_wrapper and torch.compile call what they wrap."""


def named_modules(root: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """As `root.named_modules()`, but a wrapper and what it wraps have the same name: that in the model without it. The
    wrapper comes first.

    Wrappers are DistributedDataParallel, the engine of DeepSpeed, FSDP1, checkpoint_wrapper, and what torch.compile
    gives. A child of the user's own that is called `module` keeps its name.
    """
    return _walk("", root, set() if remove_duplicate else None)


def _walk(name: str, module: nn.Module, met: set[nn.Module] | None) -> Iterator[tuple[str, nn.Module]]:
    if met is not None:
        if module in met:
            return
        met.add(module)
    yield name, module
    inner = _name_of_wrapped(module)
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(name if key == inner else f"{name}.{key}" if name else key, child, met)


def _name_of_wrapped(module: nn.Module) -> str | None:
    if isinstance(module, DistributedDataParallel) or type(module).__name__ == "DeepSpeedEngine":
        return "module"
    return next((name for name in INNER if name in module._modules), None)


def submodule(root: nn.Module, name: str) -> nn.Module:
    """The one that has a name, not what wraps it. Raises KeyError where there is none."""
    module = _unwrapped(root)
    for key in name.split(".") if name else ():
        module = _unwrapped(module._modules[key])
    return module


def _unwrapped(module: nn.Module | None) -> nn.Module:
    assert module is not None
    while (name := _name_of_wrapped(module)) is not None:
        module = module.get_submodule(name)
    return module


def module_around(root: nn.Module, name: str) -> str | None:
    """That which calls the one of this name, as a rule; None for the root."""
    while name:
        name = name.rpartition(".")[0]
        if has_forward(submodule(root, name)):
            return name
    return None


def has_forward(module: nn.Module) -> bool:
    """Not so for lists of modules, which are never called."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__

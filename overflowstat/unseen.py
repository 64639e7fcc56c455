"""What a monitor never sees, told once: modules that run without its hooks, and a root that ends no batch."""

from collections.abc import Collection

from torch import nn
from torch.optim import Optimizer

from .dynamo import has_compiled
from .errors import warn_user
from .modules import ModuleTree

__all__ = ["Unseen"]


class Unseen:
    """Of one monitor.

    Args:
        modules: those that it watches.
    """

    def __init__(self, modules: ModuleTree) -> None:
        self._modules = modules
        self._root_calls = 0
        self._told_of_modules = False
        self._ends_batches = False

    def root_was_called(self, times: int) -> None:
        """So many were seen."""
        self._root_calls += times

    def something_ends_batches(self) -> None:
        """Or has a forward that will."""
        self._ends_batches = True

    def modules_were_told_of(self) -> None:
        """By others."""
        self._told_of_modules = True

    def tell_of_modules(self, calls: int) -> None:
        """At the end, with the number of module calls that were seen by then, if torch.compile may be the reason."""
        if has_compiled():
            self._tell_of(self._unseen(calls))

    def tell_of_trained_modules(self, calls: int, optimizer: Optimizer) -> None:
        """Where an optimizer takes a step with gradients of theirs."""
        if self._told_of_modules or not (unseen := self._unseen(calls)):
            return
        used = {id(w) for group in optimizer.param_groups for w in group["params"] if w.grad is not None}
        if any(id(weight) in used for module in unseen for weight in module._parameters.values()):
            self._tell_of(unseen)

    def _unseen(self, calls: int) -> Collection[nn.Module]:
        """Those that were never called, if that are all, or, where torch.compile is in use, all but the root: what runs
        compiled may still call the root's hooks."""
        if calls == 0:
            return self._modules.numbers
        if calls == self._root_calls and has_compiled():
            return [module for module in self._modules.numbers if module is not self._modules.root]
        return ()

    def _tell_of(self, modules: Collection[nn.Module]) -> None:
        if self._told_of_modules or not modules:
            return
        self._told_of_modules = True
        which = "of" if self._modules.root in modules else "inside"
        warn_user(
            f"no call of a module {which} {type(self._modules.root).__name__} was seen: if torch.compile had compiled "
            "a function that calls it before the monitor was attached, that runs without hooks; attach the monitor "
            "first, or call torch.compiler.reset() after that to have it compiled anew, with hooks"
        )

    def tell_of_idle_root(self, calls: int) -> None:
        """Where all that has run is one batch because nothing ends it."""
        if not self._ends_batches and calls > 0:
            self._ends_batches = True
            warn_user(
                f"the forward of {type(self._modules.root).__name__} itself is never called, so that all calls of its "
                "modules are one batch: call monitor.step() at the end of each, or watch the module that is called"
            )

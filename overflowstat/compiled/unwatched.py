"""What torch.compile had made of a model without its hooks, which runs in the place of what is watched."""

from torch import nn

from ..dynamo import forget_wrapped_functions, frames_compiled
from ..errors import warn_user
from ..modules import ModuleTree
from ..recorder import is_capturing
from .called_code import CalledCode
from .hooked import HookedModules
from .own_code import OwnCode

__all__ = ["Unwatched"]


class Unwatched:
    """Of one monitor: mends that where it can, and else tells of it, in the first batch and once a module.

    A batch proves that it was watched: where a module was called, and runs code that may have been compiled without
    hooks, a call of something inside of it has been seen.

    Args:
        modules: those that are watched.
        hooked: those of them that have hooks.
    """

    def __init__(self, modules: ModuleTree, hooked: HookedModules) -> None:
        self._modules = modules
        self._hooked = hooked
        self._own_code = OwnCode()
        self._called_code = CalledCode(self._own_code.is_copy)
        self._calls_unwatched: set[int] = set()  # modules that call what may have been compiled without hooks
        self._cannot_be_seen: set[int] = set()
        self._seen: set[int] = set()  # in this batch
        self._proved: set[int] = set()  # seen in any
        self._silent: list[int] = []  # called in this batch, and nothing in them
        self._told: set[int] = set()
        self._root_runs_as_it_was = False
        self._frames = 0  # that had been compiled when the batch began

    def look_again(self) -> None:
        """At modules that have come since."""
        self._called_code.look_again()

    def drop(self, module: nn.Module) -> None:
        self._own_code.take_from(module)

    def attached(self) -> bool:
        """To all modules; none is being called. Gives whether the code of one may have run compiled."""
        may_have_run = self._give_own_code()
        forget_wrapped_functions()
        return may_have_run

    def detach(self) -> None:
        """What was compiled with the hooks will not run any more."""
        self._own_code.take_back()

    def begin_batch(self) -> bool:
        """Before the root is called. Gives whether the code of a module may have run compiled.

        Cost: microseconds, and one for each class of modules.
        """
        root = self._modules.root
        had_own = self._own_code.has(root)
        self._frames = frames_compiled()
        may_have_run = self._give_own_code()
        # Which comes too late for the root: what it will run was looked up before its hooks were called.
        self._root_runs_as_it_was = self._own_code.has(root) and not had_own
        self._seen.clear()
        self._silent.clear()
        return may_have_run

    def _give_own_code(self) -> bool:
        """Where that can be, and find the modules for which it is not enough."""
        may_have_run = self._own_code.give(self._modules.all)
        for module in self._called_code.found(self._modules.numbers):
            number = self._modules.numbers[module]
            self._calls_unwatched.add(number)
            self._proved.difference_update(self._hooked.inside(number))
            self._told.discard(number)
        return may_have_run or bool(self._calls_unwatched)

    def cannot_be_seen(self, number: int) -> bool:
        """What was compiled of a module with its hook does not read it, of which others tell. Gives whether that is
        new."""
        is_new = number not in self._cannot_be_seen
        self._cannot_be_seen.add(number)
        return is_new

    def see(self, number: int) -> None:
        """A call of it was read."""
        self._seen.add(number)
        self._proved.add(number)

    def see_eager(self, number: int, was_compiled: bool) -> None:
        """A module was called whose hooks are not compiled.

        Args:
            was_compiled: whether its own code may be, and so code that this calls by no name.
        """
        if self._misses_calls_in(number, was_compiled):
            self._silent.append(number)
        self.see(number)

    def _misses_calls_in(self, number: int, was_compiled: bool) -> bool:
        """Whether nothing in a module has ever been seen, where it runs code that may have been compiled without hooks.

        Where something was, it runs what was compiled with hooks, and calls no module where it need not.
        """
        if is_capturing() or (number not in self._calls_unwatched and not was_compiled):
            return False
        inside = self._hooked.inside(number)
        was_seen = not all(known.isdisjoint(inside) for known in (self._seen, self._proved, self._cannot_be_seen))
        return not was_seen and any(_can_be_called(self._hooked.module(i)) for i in inside)

    def root_was_called(self, batch_number: int, may_have_run: bool) -> bool:
        """To its end, and all calls in it have been seen that will be. Gives whether there were none, and that was
        told."""
        is_silent = True
        if self._root_runs_as_it_was and not self._seen and self._hooked.inside(0):
            warn_user(
                f"batch {batch_number} was not watched inside of {self._hooked.text(0)}: torch.compile had compiled "
                "that without hooks, and will compile it once more, with them"
            )
        elif may_have_run and self._misses_calls_in(0, self._own_code.has(self._modules.root)):
            self._silent.append(0)
        else:
            is_silent = False
        self.end_batch(batch_number)
        return is_silent

    def end_batch(self, batch_number: int) -> None:
        """Whatever was compiled in it was with hooks."""
        self.tell(batch_number)
        self._root_runs_as_it_was = False
        if self._frames != frames_compiled():
            self._own_code.look(self._modules.all)
            self._called_code.found(self._modules.numbers)

    def tell(self, batch_number: int) -> None:
        """Of modules that were called, and nothing in them."""
        for number in dict.fromkeys(self._silent):
            text = self._hooked.text(number)
            if number not in self._calls_unwatched and self._give_own_code_to(number):
                warn_user(
                    f"no call inside of {text} was seen in batch {batch_number}: what torch.compile had compiled of it "
                    "without hooks, it will compile once more, with them"
                )
            elif number not in self._told:
                self._told.add(number)
                warn_user(
                    f"no call inside of {text} was seen in batch {batch_number}, and torch.compile had compiled it, or "
                    "what it calls, without hooks: attach the monitor before the first compiled call, or call "
                    "torch.compiler.reset() now to have it compiled anew, with hooks"
                )
        self._silent.clear()

    def _give_own_code_to(self, number: int) -> bool:
        """Gives whether that can help: it had none."""
        return number in self._hooked and self._own_code.give_to(self._hooked.module(number))


def _can_be_called(module: nn.Module) -> bool:
    """Not one that only holds others, nor whose weights nn.MultiheadAttention uses itself."""
    is_used_otherwise = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return type(module).forward is not nn.Module.forward and not is_used_otherwise

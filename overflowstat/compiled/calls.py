"""The calls inside of what is compiled: collected from the rows that it leaves, and told to the log."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..capture import devices
from ..dynamo import forget_wrapped_functions, is_loaded, not_compiled
from ..errors import warn_user
from ..frame_log import FrameLog
from ..measurement import GivenMeasurement
from ..modules import ModuleTree
from ..recorder import is_capturing
from ..stats import TensorStats, apart_from_the_run
from ..wording import module_text
from .hook import WatchedHook
from .own_code import OwnCode
from .row import empty_row, is_bad
from .sites import Site, new_site, site

if TYPE_CHECKING:
    import threading

__all__ = ["CompiledCalls"]


class _Called(NamedTuple):
    place: Site
    number: int
    calls: int
    is_bad: bool
    row: Tensor

    def contents(self) -> list[TensorStats | str]:
        return self.place.contents(self.row.tolist())


class CompiledCalls:
    """Of one monitor.

    Where a module is called that was not compiled itself, but has compiled ones in it, their calls are told before its
    own, which is after them. Those that were called more than once by then are one frame, which says how often.

    Args:
        modules: those that are watched.
        log: which is told of the calls.
        look: called where it then has something to look at.
        nested: see `Monitor`.
        native: whether the extension reads what is in host memory.
        lock: in which the others of the monitor are.
    """

    def __init__(
        self,
        modules: ModuleTree,
        log: FrameLog,
        look: Callable[[], None],
        nested: bool,
        native: bool,
        lock: "threading.RLock",
    ) -> None:
        self._lock = lock
        self._home: torch.device | None = None  # where most rows are
        self._modules = modules
        self._log = log
        self._look = look
        self._nested = nested
        self._native = native
        self._hooks: dict[int, tuple[nn.Module, str, WatchedHook]] = {}
        self._inside: dict[int, list[int]] = {}  # numbers of the modules in one, as far as they were asked for
        self._orders: dict[int, int] = {}  # of modules, those of their first site
        self._own_code = OwnCode()
        self._was_traced = False
        self._seen: set[int] = set()  # in this batch
        self._not_seen_inside: set[int] = set()
        self._root_runs_as_it_was = False
        self.may_have_run = False
        """Whether anything is compiled with the hooks of these modules, or the code of one in whichever way."""

    def hook(self, number: int, name: str, module: nn.Module, eager: Callable[..., None]) -> WatchedHook:
        """For a module that has not been called yet. `eager` is its hook where it is not compiled."""
        self._home = self._home or self._find_home()
        hook = WatchedHook(number, eager, self, self._nested, self._native, self._device_of(module))
        self._hooks[number] = module, name, hook
        self._inside.clear()
        return hook

    def drop(self, number: int) -> None:
        if number in self._hooks:
            self._own_code.take_from(self._hooks.pop(number)[0])
        self._inside.clear()

    def _find_home(self) -> torch.device | None:
        """Where the model is; its first weight, if it is in several places."""
        return next((device for module in self._modules.numbers for device in devices(module)), None)

    def _device_of(self, module: nn.Module) -> torch.device:
        return next(iter(sorted(devices(module), key=str)), None) or self._home or torch.device("cpu")

    def _follow_devices(self) -> None:
        """The model may have been moved since."""
        if (home := self._find_home()) != self._home:
            self._home = home
            for module, _, hook in self._hooks.values():
                hook.row = empty_row(self._device_of(module))

    def new_site(self, number: int, labels: Sequence[str], words: Sequence[str]) -> int:
        """Where a graph is made."""
        self.may_have_run = self._was_traced = True
        found = new_site(self._orders.get(number), labels, words)
        self._orders.setdefault(number, found)
        return found

    def attached(self) -> None:
        """To all modules; none is being called."""
        self._own_code.give(self._modules.all)
        forget_wrapped_functions()

    def begin_batch(self) -> None:
        """Before the root is called.

        Cost: where Dynamo is loaded, microseconds, and one for each class of modules.
        """
        if not is_loaded():
            return
        self._follow_devices()
        root = self._modules.root
        had_own = self._own_code.has(root)
        self.may_have_run = self._own_code.give(self._modules.all) or self._was_traced
        # Which comes too late for the root: what it will run was looked up before its hooks were called.
        self._root_runs_as_it_was = self._own_code.has(root) and not had_own
        self._seen.clear()
        self._not_seen_inside.clear()

    def root_was_called(self, batch_number: int) -> None:
        """In a batch of this number; the log does not know of it yet."""
        self.collect(0)
        missed = [(self._hooks[number][1], self._hooks[number][0]) for number in sorted(self._not_seen_inside)]
        missed = [(name, module) for name, module in missed if self._own_code.give_to(module)]
        if self._root_runs_as_it_was and not self._seen and self._numbers_inside(0):
            missed.append(("", self._modules.root))
        for name, module in missed:
            warn_user(
                f"batch {batch_number} was not watched inside of {module_text(name, type(module).__name__)}: "
                "torch.compile had compiled that without hooks, and will compile it once more, with them"
            )
        self._not_seen_inside.clear()
        self._root_runs_as_it_was = False
        if self.may_have_run:
            self._own_code.look(self._modules.all)

    def detach(self) -> None:
        """What was compiled with the hooks will not run any more."""
        self._own_code.take_back()
        self._hooks.clear()
        self._inside.clear()

    @not_compiled
    def before_eager(self, number: int, callback: object) -> None:
        """A module was called whose hooks are not compiled. `callback` is what `get_eval_frame_callback` gave there."""
        with self._lock:
            if self.collect(number):
                self._look()
            inside = self._numbers_inside(number)
            if inside and callable(callback) and self._seen.isdisjoint(inside):
                self._not_seen_inside.add(number)
            self._seen.add(number)

    def _numbers_inside(self, number: int) -> list[int]:
        if number not in self._inside:
            around = self._modules.root if number not in self._hooks else self._hooks[number][0]
            numbers = self._modules.numbers
            inside = [numbers[module] for module in around.modules() if module is not around and module in numbers]
            self._inside[number] = [i for i in inside if i in self._hooks]
        return self._inside[number]

    def collect(self, number: int) -> bool:
        """Tell the log of the calls of what is in a module. Gives whether it has something to look at.

        Cost: where anything is compiled, a few operations and a wait for the device of these modules.
        """
        inside = self._numbers_inside(number) if self._was_traced and not is_capturing() else []
        called = []
        for numbers in self._by_device(inside):
            with apart_from_the_run(), torch.no_grad():
                rows = torch.stack([self._hooks[i][2].row for i in numbers])
                heads, bad = rows[:, :2].tolist(), is_bad(rows).tolist()
            called += [
                _Called(site(int(place)), numbers[i], int(calls), bad[i], rows[i])
                for i, (calls, place) in enumerate(heads)
                if calls > 0
            ]
        if called:
            self._empty([call.number for call in called])
        called.sort(key=lambda call: call.place.order)
        has_something = False
        for call in called:
            lines = call.place.lines
            read = GivenMeasurement(len(lines), call.is_bad, call.contents)
            has_something |= self._log.add(call.number, self._hooks[call.number][0], lines, read, call.calls)
            self._seen.add(call.number)
        return has_something

    def _by_device(self, numbers: list[int]) -> list[list[int]]:
        found: dict[torch.device, list[int]] = {}
        for number in numbers:
            found.setdefault(self._hooks[number][2].row.device, []).append(number)
        return list(found.values())

    def _empty(self, numbers: list[int]) -> None:
        for of_device in self._by_device(numbers):
            rows = [self._hooks[number][2].row for number in of_device]
            with apart_from_the_run(), torch.no_grad():
                torch._foreach_copy_(rows, [empty_row(rows[0].device)] * len(rows))

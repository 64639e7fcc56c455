"""The calls inside of what is compiled: collected from the rows that it leaves, and told to the log."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..capture import devices
from ..dynamo import is_loaded, not_compiled, unwritable_body
from ..errors import warn_user
from ..frame_log import FrameLog
from ..measurement import GivenMeasurement
from ..modules import ModuleTree
from ..native import load
from ..recorder import is_capturing
from ..stats import TensorStats, apart_from_the_run
from .hook import WatchedHook
from .hooked import HookedModules
from .row import empty_rows, is_bad, of_any_tensor
from .sites import Site, new_site, site
from .unwatched import Unwatched
from .walk import is_told_by

if TYPE_CHECKING:
    import threading

__all__ = ["CompiledCalls"]


class _Called(NamedTuple):
    place: Site
    number: int
    is_bad: bool
    row: list[float]

    @property
    def calls(self) -> int:
        return int(self.row[0])

    @property
    def time(self) -> float:
        return self.row[2]

    def lines(self) -> list[str]:
        """Their labels."""
        return self.place.lines if self._shows_all() else [*self.place.lines, "input[of another call]"]

    def contents(self) -> list[TensorStats | str]:
        found = self.place.contents(self.row)
        return found if self._shows_all() else [*found, of_any_tensor(self.row)]

    def _shows_all(self) -> bool:
        """A row that calls of several kinds share, since there are more of these than rows, holds what it does not show
        as that of the last one."""
        return not self.is_bad or any(
            content.is_bad for content in self.place.contents(self.row) if isinstance(content, TensorStats)
        )


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
        self.hooked = HookedModules(modules)
        self._unwatched = Unwatched(modules, self.hooked)
        self._orders: dict[int, int] = {}  # of modules, those of their first site
        self._told_of: set[int] = set()  # of what in these is not read
        self._was_traced = False
        self._extension: Any = load() if native else None
        self._has_clock = native  # all rows are written by the extension's operations, which tell when
        self._clock = 0  # as rows were collected last
        self.may_have_run = False
        """Whether anything is compiled with the hooks of these modules, or the code of one in whichever way."""

    def hook(self, number: int, name: str, module: nn.Module, eager: Callable[..., None]) -> WatchedHook:
        """For a module that has not been called yet. `eager` is its hook where it is not compiled."""
        self._home = self._home or self._find_home()
        hook = WatchedHook(number, eager, self, self._nested, self._native, self._device_of(module))
        self.hooked.add(number, name, module, hook)
        self._has_clock &= hook.rows.device.type == "cpu"
        self._unwatched.look_again()
        return hook

    def drop(self, number: int) -> None:
        if number in self.hooked:
            self._unwatched.drop(self.hooked.module(number))
            self.hooked.drop(number)

    def _find_home(self) -> torch.device | None:
        """Where the model is; its first weight, if it is in several places."""
        return next((device for module in self._modules.numbers for device in devices(module)), None)

    def _device_of(self, module: nn.Module) -> torch.device:
        return next(iter(sorted(devices(module), key=str)), None) or self._home or torch.device("cpu")

    def _follow_devices(self) -> None:
        """The model may have been moved since."""
        if (home := self._find_home()) != self._home:
            self._home = home
            for module, hook in self.hooked:
                hook.rows = empty_rows(self._device_of(module))
            self._has_clock = self._native and all(hook.rows.device.type == "cpu" for _, hook in self.hooked)

    def new_site(self, number: int, labels: Sequence[str], words: Sequence[str]) -> int | None:
        """Where a graph is made. None where the call cannot be read in it, of which it warns once for each module."""
        self.may_have_run = self._was_traced = True
        called = self.hooked.text(number)
        if (around := unwritable_body()) is not None:
            if self._unwatched.cannot_be_seen(number):
                warn_user(f"calls of {called} inside of {around} are not watched where that is compiled")
            return None
        unread = [f"{label}, a {word}" for label, word in zip(labels, words, strict=True) if not is_told_by(word)]
        if unread and number not in self._told_of:
            self._told_of.add(number)
            warn_user(
                f"{called}: what torch.compile makes does not read {'; '.join(unread)}; where that matters, keep the "
                "module out of it by torch.compiler.disable"
            )
        found = new_site(type(self.hooked.module(number)), labels, words)
        self._orders.setdefault(number, found)
        return found

    def attached(self) -> None:
        """To all modules; none is being called."""
        self.may_have_run = self._unwatched.attached() or self._was_traced

    def begin_batch(self) -> None:
        """Before the root is called.

        Cost: where Dynamo is loaded, microseconds, and one for each class of modules.
        """
        if is_loaded():
            self._follow_devices()
            self.may_have_run = self._unwatched.begin_batch() or self._was_traced

    def root_was_called(self, batch_number: int) -> bool:
        """In a batch of this number, to its end; the log does not know of it yet. Gives whether nothing inside of the
        root was seen, and that was told."""
        self.collect(0)
        return self._unwatched.root_was_called(batch_number, self.may_have_run)

    def root_raised(self, batch_number: int) -> None:
        """In a batch of this number."""
        self.collect(0)
        self._unwatched.end_batch(batch_number)

    def tell(self, batch_number: int) -> None:
        """Of modules that were called, and nothing in them."""
        self._unwatched.tell(batch_number)

    def detach(self) -> None:
        """What was compiled with the hooks will not run any more."""
        self._unwatched.detach()
        self.hooked.clear()

    @not_compiled
    def before_eager(self, number: int, callback: object) -> None:
        """A module was called whose hooks are not compiled. `callback` is what `get_eval_frame_callback` gave there."""
        with self._lock:
            if self.collect(0 if self._has_clock else number):
                self._look()
            self._unwatched.see_eager(number, was_compiled=callable(callback))

    def collect(self, number: int) -> bool:
        """Tell the log of the calls of what is in a module. Gives whether it has something to look at.

        Cost: where anything is compiled, a few operations and a wait for the device of these modules; with the
        extension and in host memory only where something was read since.
        """
        if not self._was_traced or is_capturing():
            return False
        if self._has_clock:
            before, self._clock = self._clock, self._extension.calls_kept()
            if before == self._clock:
                return False
        called = []
        for numbers in self._by_device(self.hooked.inside(number)):
            with apart_from_the_run(), torch.no_grad():
                rows = torch.stack([self.hooked.hook(i).rows for i in numbers]).to("cpu")
                written = (rows[:, :, 0] > 0).nonzero()
                rows = rows[tuple(written.T)]
                bad = is_bad(rows).tolist()
            called += [
                _Called(site(int(row[1])), numbers[i], bad_one, row)
                for (i, _), bad_one, row in zip(written.tolist(), bad, rows.tolist(), strict=True)
            ]
        if called:
            self._empty(list({call.number for call in called}))
        has_something = False
        for call in self._as_they_ran(called):
            read = GivenMeasurement(len(call.lines()), call.is_bad, call.contents)
            module = self.hooked.module(call.number)
            has_something |= self._log.add(call.number, module, call.lines(), read, call.calls)
            self._unwatched.see(call.number)
        return has_something

    def _as_they_ran(self, called: list[_Called]) -> list[_Called]:
        """Of a graph as they were traced, whatever the compiler has made of their order. One graph after the other by
        the clock; without one as they were met first, and where several layers share one, as the modules are."""
        begin: dict[object, int] = {}
        for call in called:
            graph, order = call.place.graph, self._orders.get(call.number, call.place.number)
            begin[graph] = min(order, begin.get(graph, order))
        runs: list[dict[int, _Called]] = []  # of graphs, in each of which a site is there once
        graph = None
        for call in sorted(called, key=lambda call: (call.time, begin[call.place.graph], call.number)):
            if not runs or call.place.graph != graph or call.place.number in runs[-1]:
                runs.append({})
            graph = call.place.graph
            runs[-1][call.place.number] = call
        return [run[number] for run in runs for number in sorted(run)]

    def _by_device(self, numbers: list[int]) -> list[list[int]]:
        found: dict[torch.device, list[int]] = {}
        for number in numbers:
            found.setdefault(self.hooked.hook(number).rows.device, []).append(number)
        return list(found.values())

    def _empty(self, numbers: list[int]) -> None:
        for of_device in self._by_device(numbers):
            rows = [self.hooked.hook(number).rows for number in of_device]
            with apart_from_the_run(), torch.no_grad():
                torch._foreach_copy_(rows, [empty_rows(rows[0].device)] * len(rows))

"""Watches the root models of a program as they are found, under names of their own, until it ends."""

import contextlib
import os
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ..detections import Detections
from ..errors import TraceError
from ..hooks import OptimizerHook, RootEntryHook, is_watched
from ..monitor import Monitor
from ..ranks import rank_and_world_size
from ..terminal import on_one_line
from .outputs import NamedStyle, make_sink, of_model
from .roots import ModuleSet, RootFinder, is_any_in_progress

__all__ = ["Watch"]


@dataclass(frozen=True)
class _Root:
    """That is watched, or was. Keeps nothing of it alive: a program may go through many models."""

    number: int
    name: str
    monitor: "weakref.ref[Monitor]"
    detections: Detections

    def is_in(self, modules: set[nn.Module]) -> bool:
        monitor = self.monitor()
        return monitor is not None and monitor.model in modules


class Watch:
    """Has a `Monitor` on every root model of this process, from its first call on, and tells of it on stderr.

    A root is a module that is called while no other one is. One that turns out to be part of another root is watched as
    that. A batch is a forward of the root, or ends when an optimizer has taken a step, for what is called of a root
    apart from its own forward. A module without weights, as a loss, is watched if it is the first of its class to be
    called, or else from its second call on, so that one that is made anew for each call is no root each time.

    Processes that are forked are left alone: their hooks are taken away.

    Args:
        options: of `Monitor`.
        sinks: see `make_sink`.
        trace_file: of the first model; in the name of those of others is their number.
        is_quiet: tell only of what is not watched, and of bad numbers.
    """

    def __init__(
        self, options: Mapping[str, Any], *, sinks: Sequence[str], trace_file: str | None, is_quiet: bool
    ) -> None:
        self._options = options
        self._sinks = sinks
        self._trace_file = trace_file
        self._is_quiet = is_quiet
        self._stderr = sys.stderr  # whatever the program puts in its place later, and may read
        self._has_met_any = False
        self._roots: list[_Root] = []
        self._weightless: set[type[nn.Module]] = set()
        self._met_once = ModuleSet()
        self._passing: Counter[str] = Counter()
        self._finder = RootFinder(self._found)
        self._step: RemovableHandle | None = None

    def start(self) -> None:
        self._finder.start()
        self._step = register_optimizer_step_post_hook(OptimizerHook(self._after_step))
        os.register_at_fork(after_in_child=self._leave)

    def end(self, error: BaseException | None) -> None:
        """Judge what still is to be, end the files, and tell what was found.

        Raises what a monitor raises, as for bad numbers that are found only now; where there is an error, that gets a
        note instead.
        """
        if self._step is None:  # in a process that was forked
            return
        monitors = self._monitors()
        self._leave()
        found: Exception | None = None
        for monitor in monitors:
            try:
                if error is None:
                    monitor.remove()
                else:
                    monitor.__exit__(type(error), error, None)
            except Exception as late:  # and the others still are to be ended
                found = found or late
        self._sum_up(is_good=found is None and not any(root.detections.all() for root in self._roots))
        if found is not None:
            raise found

    def _leave(self) -> None:
        """No hook is left in this process."""
        self._finder.stop()
        if self._step is not None:
            self._step.remove()
            self._step = None
            for monitor in self._monitors():
                monitor.disable()

    def _monitors(self) -> list[Monitor]:
        return [monitor for root in self._roots if (monitor := root.monitor()) is not None]

    def _sum_up(self, is_good: bool) -> None:
        raises = self._options.get("on_detect", "raise") == "raise"
        for root in self._roots:
            if (places := root.detections.all()) and not raises:
                self._tell(f"{root.name}: bad numbers in " + "; ".join(place.text for place in places))
        for name, count in self._passing.items():
            if count:
                self._note(f"not watched: {count} more {name}, without weights and called once each")
        if not self._has_met_any:
            self._tell("no module was called in this process, and nothing watched (processes that it starts are not)")
        elif self._roots and is_good:
            self._note("nothing bad was seen")

    def _found(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        self._has_met_any = True
        if is_watched(module):
            if not any(module in set(monitor.model.modules()) for monitor in self._monitors()):
                self._note(f"{_class_name(module)} is watched by the program itself, and left to that")
            return True
        if self._is_passing(module):
            return False
        inside = set(module.modules())
        parts = [root for root in self._roots if root.is_in(inside)]
        number = min((root.number for root in parts), default=1 + max((root.number for root in self._roots), default=0))
        name = f"model {number} ({_class_name(module)})"
        for root in parts:
            if (monitor := root.monitor()) is not None:
                monitor.disable()  # and it tells no sums, which the end does
                monitor.remove()
        monitor = self._monitor(module, number, name)
        if monitor is None:
            return True
        self._roots.append(_Root(number, name, weakref.ref(monitor), monitor._reporter.detections))
        held = f", which holds {' and '.join(root.name for root in parts)}" if parts else ""
        to = f", frames to {monitor.trace_file}" if monitor.trace_file is not None else ""
        count = len(inside)
        self._note(f"watching {name}, {count} module{'s' if count > 1 else ''}{held}{to}")
        for hook in list(module._forward_pre_hooks.values()):  # torch has listed those that it calls now already
            if isinstance(hook, RootEntryHook):
                hook(module, args, kwargs)
        return True

    def _is_passing(self, module: nn.Module) -> bool:
        """Whether it may be made anew for each call. Then it is not met again."""
        if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
            return False
        if type(module) not in self._weightless:
            self._weightless.add(type(module))
            return False
        is_new = module not in self._met_once
        self._met_once.add(module)
        self._passing[_class_name(module)] += 1 if is_new else -1
        return is_new

    def _monitor(self, module: nn.Module, number: int, name: str) -> Monitor | None:
        """None where it cannot be watched."""
        style = NamedStyle(name)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                monitor = Monitor(
                    module,
                    **self._options,
                    style=style,
                    sinks=[make_sink(sink, style, number) for sink in self._sinks],
                    trace_file=None if self._trace_file is None else of_model(self._trace_file, number),
                )
            except TraceError as error:
                self._tell(str(error))
                raise SystemExit(2) from None
            except Exception as error:
                self._tell(f"{_class_name(module)} is not watched: {error}")
                monitor = None
        for warning in told:
            self._tell(f"{name}: {warning.message}")
        return monitor

    def _after_step(self, optimizer: Optimizer) -> None:
        if not is_any_in_progress():
            for monitor in self._monitors():
                monitor.step()

    def _note(self, text: str) -> None:
        if not self._is_quiet and rank_and_world_size()[0] == 0:  # all ranks would say the same
            self._tell(text)

    def _tell(self, text: str) -> None:
        if self._stderr is not None:  # or else print would take stdout
            with contextlib.suppress(OSError, ValueError):  # of a program that has closed it
                rank, world_size = rank_and_world_size()
                whose = f"rank {rank} of {world_size}: " if world_size > 1 else ""
                print(on_one_line(f"overflowstat: {whose}{text}"), file=self._stderr, flush=True)


def _class_name(module: nn.Module) -> str:
    """Of what a wrapper wraps, too: as "DistributedDataParallel of GPT2"."""
    name, inside = type(module).__name__, dict(module.named_children())
    for wrapped in ("module", "_orig_mod"):
        if list(inside) == [wrapped]:
            return f"{name} of {_class_name(inside[wrapped])}"
    return name

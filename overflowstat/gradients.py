"""What a monitor sees of the backward: the gradients of modules' outputs and inputs as they come, and of weights."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import capture
from .backward_roots import backward_roots
from .dynamo import not_compiled
from .frames import Frame
from .grad_scaler import Promise, seems_scaled, what_the_scaler_does
from .gradient_backward import Backward, GradientJudge
from .gradient_births import GradientBirths
from .gradient_graph import GradientGraph, Place, Tap
from .gradient_reader import GradientReader
from .gradient_verdict import BadGradient, GradientVerdicts, in_place_of_advice
from .hooks import ForwardHook, is_in_backward
from .measurement import Place as Found
from .modules import ModuleTree
from .names import module_around
from .pending import PendingFrame
from .policy import Policy
from .recorder import Recorder

__all__ = ["GradientWatch"]


MOST_BACKWARDS = 16  # in progress; more are those that exceptions have ended


class GradientWatch:
    """Reads gradients where they reach tensors that modules gave or took, and all those of weights in one launch when
    the backward has ended, or else before the optimizer takes its step.

    A gradient is read in a hook of the node behind the tensor, which is told it and changes nothing. Weights are read
    in a callback that autograd runs at the end of its backward, when all of theirs have come: a hook on each would be a
    launch for each. Exceptions that these raise leave the backward as they are.

    All methods are called with the lock of the monitor, but for hooks, which take it.
    """

    def __init__(
        self,
        judge: GradientJudge,
        modules: ModuleTree,
        recorder: Recorder,
        policy: Policy | None,
        keep: int | None,
        lock: Any,
    ) -> None:
        self._judge = weakref.ref(judge)
        self._modules = modules
        self._recorder = recorder
        self._lock = lock
        self._reader = GradientReader(modules, recorder, policy)
        self._callers: dict[int, str | None] = {}
        self._graph = GradientGraph(_weakly(self, "_reached"), _weakly(self, "_ran"))
        self._verdicts = GradientVerdicts(modules, self._reader.names, self._graph, self._reader.rule)
        self._backwards: dict[int, Backward] = {}  # by the number that autograd gives to it
        self._kept: deque[PendingFrame] = deque(maxlen=keep)
        self._has_read_weights = False
        self._promise: Promise | None = None
        self.is_on = False

    @property
    def tensors(self) -> int:
        """That were read."""
        return self._reader.tensors

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def add_module(self, number: int, name: str, module: nn.Module) -> None:
        self._reader.add_module(number, name, module)
        self._callers[number] = "" if (around := module_around(self._modules.root, name)) is None and name else around

    def hook(self, number: int, module: nn.Module) -> ForwardHook:
        return ForwardHook(number, module, self._after_forward, _nothing)

    @not_compiled
    def _after_forward(
        self, number: int, module: nn.Module, args: object, kwargs: Mapping[str, object], output: object
    ) -> bool:
        judge = self._judge()
        if judge is None or not torch.is_grad_enabled() or self._recorder.capture() is not None:
            return False
        with self._lock:
            batch_number = judge._gradient_batch(has_run=is_in_backward())
            if batch_number is not None:
                given = self._places(number, module, capture.inputs(args, kwargs, nested=True))
                made = self._places(number, module, capture.outputs(output, nested=True))
                self._graph.add_call(given, made, self._callers[number], batch_number)
        return False

    def _places(
        self, number: int, module: nn.Module, values: Iterable[tuple[str, object]]
    ) -> list[tuple[Place, Tensor, bool]]:
        name = self._reader.names[number]
        found = []
        for label, value in values:
            if capture.is_tensor(value) and value.requires_grad and value.grad_fn is not None:
                place = Place(number, name, type(module).__name__, f"grad {label}")
                found.append((place, value, self._reader.rule(number, place.label).is_shown))
        return found

    def _reached(self, taps: dict[int, Tap], gradients: tuple[Tensor | None, ...]) -> None:
        """Gradients have come to a node, which runs next."""
        if not self.is_on or self._recorder.capture() is not None:
            return
        with self._lock:
            by_module: dict[int, list[tuple[int, Tap, Tensor]]] = {}
            for i, tap in sorted(taps.items()):
                gradient = gradients[i] if i < len(gradients) else None
                if gradient is not None and tap.is_shown:
                    by_module.setdefault(tap.place.number, []).append((i, tap, gradient))
            if not by_module:
                return
            backward = self._backward(next(iter(by_module.values()))[0][1])
            if backward.is_over:
                return
            for number, group in by_module.items():
                labelled = [(tap.place.label, gradient) for _, tap, gradient in group]
                read = self._reader.read(backward.batch_number, number, group[0][1].place.class_name, labelled)
                if not read.pending.lines:
                    continue
                lines = [(tap, line) for (_, tap, _), line in zip(group, read.lines, strict=True)]
                backward.read.update((tap, (read.pending, line)) for tap, line in lines)
                backward.queue.append((read.pending, lines))
                if backward.births is not None:
                    self._note_births(backward, backward.births, group)
            try:
                self._settle(backward, at_end=False)
            except Exception:
                self._forget(backward)  # it ends here
                raise

    def _note_births(self, backward: Backward, births: GradientBirths, group: list[tuple[int, Tap, Tensor]]) -> None:
        """In the hook of the node that they have come to."""
        node = torch._C._current_autograd_node()
        for i, tap, _ in group:
            if (birth := births.of(node, i)) is not None:
                backward.born[tap] = birth

    def _backward(self, tap: Tap) -> Backward:
        task = torch._C._current_graph_task_id()
        found = self._backwards.get(task)
        if found is None and tap.made_in in self._backwards:
            found = self._backwards[task] = self._backwards[tap.made_in]
        if found is None:
            while len(self._backwards) >= MOST_BACKWARDS:
                self._forget(next(iter(self._backwards.values())))
            found = self._backwards[task] = Backward(tap.batch_number, seems_scaled(self._graph.knows))
            self._promise = None
            self._kept.clear()  # a report has the frames of one
            end = _weakly(self, "_end")
            torch.autograd.Variable._execution_engine.queue_callback(lambda: end(task))
        return found

    def _end(self, task: int) -> None:
        """All gradients have come."""
        with self._lock:
            backward = self._backwards.get(task)
            if backward is None or not self.is_on:
                return
            backward.has_ended = True
            self._has_read_weights = True
            try:
                if not backward.is_over:
                    self._read_weights(backward)
                self._settle(backward, at_end=True)
            finally:
                if backward.is_over or not backward.queue:
                    self._forget(backward)

    def _forget(self, backward: Backward) -> None:
        self._backwards = {task: each for task, each in self._backwards.items() if each is not backward}

    @not_compiled
    def _ran(self, tap: Tap, module: str, traceback: list[str], made: Sequence[Any], got: Sequence[Any]) -> None:
        """In anomaly mode, a node."""
        if not self.is_on or self._recorder.capture() is not None:
            return
        with self._lock:
            backward = self._backward(tap)
            if backward.is_over:
                return
            if backward.births is None:
                backward.births = GradientBirths(self._recorder, self._modules.root, self._is_finite)
            try:
                backward.births.follow(module, traceback, made, got)
            except Exception:  # of tensors of a kind that was not thought of: the backward is what matters
                backward.births.is_complete = False

    def _is_finite(self, node: Any, number: int) -> bool:
        tap = self._graph.tap_at(node, number)
        return tap is not None and self._verdicts.is_known_finite(tap)

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is going to use the gradients."""
        if not self.is_on or self._recorder.capture() is not None:
            return
        self.settle(only_ended=True)
        judge = self._judge()
        if self._promise is not None and judge is not None and self._promise.is_broken(optimizer, self._recorder):
            (bad, verdict), self._promise = self._promise, None
            judge._detect_gradient(bad, [frame.frame() for frame in self._kept], None, verdict, is_skipped=False)
        batch_number = None if self._has_read_weights or judge is None else judge._gradient_batch(has_run=True)
        if batch_number is not None:
            backward = Backward(batch_number, seems_scaled=False)
            self._read_weights(backward)
            self._settle(backward, at_end=True)
        self._has_read_weights = False

    def settle(self, only_ended: bool = False) -> None:
        """Judge all that has been read: also of backwards that are in progress, or that an exception has ended."""
        for backward in list(self._backwards.values()):
            if only_ended and not backward.has_ended:
                continue
            try:
                self._settle(backward, at_end=True, wait=True)
            finally:
                self._forget(backward)

    def _read_weights(self, backward: Backward) -> None:
        order = {tap.place.number: i for i, tap in reversed(list(enumerate(backward.read)))}
        frames, backward.were_bad = self._reader.read_weights(backward.batch_number, order)
        backward.queue.extend((frame, []) for frame in frames)

    def _settle(self, backward: Backward, at_end: bool, wait: bool = False) -> None:
        """Judge frames in the order in which their gradients came, as far as they are there."""
        judge = self._judge()
        if judge is None:
            return
        wait = wait or judge._waits_for_gradients(backward.batch_number, at_end)
        queue = backward.queue
        while queue and not backward.is_over and (wait or queue[0][0].ready()):
            pending, taps = queue.popleft()
            self._kept.append(pending)
            if not pending.is_bad() and not judge._tells_all_gradients(backward.batch_number):
                continue
            frame = pending.frame()
            if judge._judge_gradient(frame):
                backward.is_over = True
                self._detect(judge, backward, pending, frame, taps)

    def _detect(
        self,
        judge: GradientJudge,
        backward: Backward,
        pending: PendingFrame,
        frame: Frame,
        taps: list[tuple[Tap, int]],
    ) -> None:
        first = frame.lines.index(frame.bad_lines[0])
        content = pending.lines[first].content
        tensor = content.measurement.tensor(content.position) if isinstance(content, Found) else None
        verdict = self._verdicts.verdict(self._bad(backward, frame, first, taps))
        skipped = what_the_scaler_does(verdict.kind) if backward.seems_scaled else None
        if skipped is not None:
            broken = in_place_of_advice(verdict, "a GradScaler is in use, and yet the optimizer takes its step")
            self._promise = Promise(frame, broken)
            verdict = in_place_of_advice(verdict, skipped)
        before = [each.frame() for each in list(self._kept)[:-1]]
        self._kept.clear()
        judge._detect_gradient(frame, before, tensor, verdict, is_skipped=skipped is not None)

    def _bad(self, backward: Backward, frame: Frame, first: int, taps: list[tuple[Tap, int]]) -> BadGradient:
        line, births = frame.lines[first], backward.births
        tap = next((tap for tap, its in reversed(taps) if its <= first), None)
        weight, birth = None, None
        if tap is not None:
            birth = backward.born.get(tap)
        else:
            name = line.label.removeprefix("grad ").split(".")[0]
            modules = self._modules.numbers.items()
            names = self._reader.names
            weight = next((m._parameters.get(name) for m, number in modules if names[number] == frame.module), None)
            birth = births.of_leaf(weight) if births is not None and weight is not None else None
        was_bad = weight is not None and id(weight) in backward.were_bad
        is_followed = births is not None and births.is_complete
        roots = backward_roots(all_threads=True)
        return BadGradient(frame, line, tap, weight, was_bad, backward.read, roots, birth, is_followed)


def _weakly(owner: object, method: str) -> Callable[..., None]:
    """Calls a method as long as its object is there: a graph may live on."""
    reference = weakref.ref(owner)

    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            getattr(found, method)(*args)

    return call


def _nothing() -> None:
    pass

"""What a monitor sees of the backward: the gradients of modules' outputs and inputs as they come, and of weights."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import capture
from .dynamo import not_compiled
from .frame_log import SHOWN, rules_of
from .frames import Frame
from .grad_scaler import scaler_in_use, seems_scaled
from .gradient_births import GradientBirth, GradientBirths
from .gradient_graph import GradientGraph, Place, Tap
from .gradient_verdict import BadGradient, GradientVerdicts
from .hooks import ForwardHook, is_in_backward
from .measurement import Place as Found
from .measurement import measure
from .modules import ModuleTree
from .pending import PendingFrame, PendingLine
from .policy import Policy, Rule
from .recorder import Recorder
from .unchanged import Unchanged
from .verdict import Verdict

__all__ = ["GradientJudge", "GradientWatch"]


MOST_BACKWARDS = 16  # in progress; more are those that exceptions have ended


class GradientJudge(Protocol):
    """Who knows of batches, and what to do with frames: a monitor, whose users these are not for."""

    def _gradient_batch(self, has_run: bool) -> int | None:
        """The batch that runs now, or that `has_run`, as in a backward it has; None if it is not watched."""
        ...

    def _waits_for_gradients(self, batch_number: int, at_end: bool) -> bool:
        """Whether the numbers of a batch are judged now, or at the end of its backward; else when they are there."""
        ...

    def _tells_all_gradients(self, batch_number: int) -> bool:
        """Whether frames of a batch are told of that are good."""
        ...

    def _judge_gradient(self, frame: Frame) -> bool:
        """Tell of a frame. Whether it is one to detect."""
        ...

    def _detect_gradient(
        self, bad: Frame, before: list[Frame], tensor: Tensor | None, verdict: Verdict, is_skipped: bool
    ) -> None:
        """May raise, but where `is_skipped`: a GradScaler will not use these gradients."""
        ...


@dataclass(eq=False)
class _Backward:
    """One that is running. Those that a reentrant checkpoint runs inside of it are part of it."""

    batch_number: int
    seems_scaled: bool
    queue: deque[tuple[PendingFrame, list[Tap]]] = field(default_factory=deque)
    read: dict[Tap, tuple[PendingFrame, int]] = field(default_factory=dict)
    """With the line of the frame."""
    births: GradientBirths | None = None
    """In anomaly mode."""
    born: dict[Tap, GradientBirth] = field(default_factory=dict)
    has_ended: bool = False
    is_over: bool = False
    """Something was detected: what follows worked on bad numbers."""


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
        self._policy = policy
        self._lock = lock
        self._names: dict[int, str] = {}
        self._finders: dict[int, Callable[[str], Rule] | None] = {}
        self._callers: dict[int, str | None] = {}
        self._rules: dict[tuple[int, str], Rule] = {}
        self._graph = GradientGraph(_weakly(self, "_reached"), _weakly(self, "_ran"))
        self._verdicts = GradientVerdicts(modules, self._names, self._graph, self._rule)
        self._backwards: dict[int, _Backward] = {}  # by the number that autograd gives to it
        self._kept: deque[PendingFrame] = deque(maxlen=keep)
        self._known = Unchanged()
        self._has_read_weights = False
        self._promised: tuple[Frame, Verdict] | None = None  # what a GradScaler should keep from the weights
        self.is_on = False
        self.tensors = self.bytes_read = 0

    def add_module(self, number: int, name: str, module: nn.Module) -> None:
        self._names[number] = name
        self._finders[number] = rules_of(self._policy, name, module)
        self._callers[number] = "" if (around := self._module_around(name)) is None and name else around

    def hook(self, number: int, module: nn.Module) -> ForwardHook:
        return ForwardHook(number, module, self._after_forward, _nothing)

    def _rule(self, number: int, label: str) -> Rule:
        if (number, label) not in self._rules:
            find = self._finders[number]
            self._rules[number, label] = SHOWN if find is None else find(label)
        return self._rules[number, label]

    def _module_around(self, name: str) -> str | None:
        """That which calls the one of this name, as a rule; None for the root."""
        while name:
            name = name.rpartition(".")[0]
            if type(self._modules.root.get_submodule(name)).forward is not nn.Module.forward:
                return name
        return None

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
                name = self._names[number]
                shown = [
                    [
                        (Place(number, name, type(module).__name__, f"grad {label}"), value)
                        for label, value in values
                        if capture.is_tensor(value)
                        and value.requires_grad
                        and value.grad_fn is not None
                        and self._rule(number, f"grad {label}").is_shown
                    ]
                    for values in (capture.inputs(args, kwargs, nested=True), capture.outputs(output, nested=True))
                ]
                self._graph.add_call(shown[0], shown[1], self._callers[number], batch_number)
        return False

    def _reached(self, taps: dict[int, Tap], gradients: tuple[Tensor | None, ...]) -> None:
        """Gradients have come to a node, which runs next."""
        if not self.is_on or self._recorder.capture() is not None:
            return
        with self._lock:
            there = [(tap, gradients[i]) for i, tap in sorted(taps.items()) if i < len(gradients)]
            there = [(tap, gradient) for tap, gradient in there if gradient is not None]
            backward = self._backward(there[0][0]) if there else None
            if backward is None or backward.is_over:
                return
            by_module: dict[int, list[tuple[Tap, Tensor]]] = {}
            for tap, gradient in there:
                assert gradient is not None
                by_module.setdefault(tap.place.number, []).append((tap, gradient))
            for number, group in by_module.items():
                place = group[0][0].place
                labelled = [(tap.place.label, gradient) for tap, gradient in group]
                frame = self._read(backward.batch_number, [(number, place.name, place.class_name, labelled)])[0]
                for tap, _ in group:
                    labels = [line.label for line in frame.lines]
                    line = next(i for i, label in enumerate(labels) if label.startswith(tap.place.label))
                    backward.read[tap] = frame, line
                    if backward.births is not None and (birth := self._birth(backward.births, taps, tap)):
                        backward.born[tap] = birth
                backward.queue.append((frame, [tap for tap, _ in group]))
            try:
                self._settle(backward, at_end=False)
            except Exception:
                self._forget(backward)  # it ends here
                raise

    def _backward(self, tap: Tap) -> _Backward:
        task = torch._C._current_graph_task_id()
        found = self._backwards.get(task)
        if found is None and tap.made_in in self._backwards:
            found = self._backwards[task] = self._backwards[tap.made_in]
        if found is None:
            while len(self._backwards) >= MOST_BACKWARDS:
                self._forget(next(iter(self._backwards.values())))
            found = self._backwards[task] = _Backward(tap.batch_number, seems_scaled())
            self._promised = None
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

    def _forget(self, backward: _Backward) -> None:
        self._backwards = {task: each for task, each in self._backwards.items() if each is not backward}

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is going to use the gradients."""
        if not self.is_on or self._recorder.capture() is not None:
            return
        self.settle(only_ended=True)
        if self._promised is not None:
            self._hold_promise(optimizer)
        judge = self._judge()
        batch_number = None if self._has_read_weights or judge is None else judge._gradient_batch(has_run=True)
        if batch_number is not None:
            backward = _Backward(batch_number, seems_scaled=False)
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

    def _hold_promise(self, optimizer: Optimizer) -> None:
        """A step was to be skipped. If it is taken with gradients that are bad, nothing skips them."""
        assert self._promised is not None
        bad, verdict = self._promised
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        # Fused optimizers are called all the same, and told of infinities.
        if getattr(optimizer, "found_inf", None) is not None or not gradients:
            return
        measurement = measure(self._recorder, gradients)
        if any(measurement.non_finite(i) for i in range(measurement.count)):
            self._promised = None
            judge = self._judge()
            if judge is not None:
                judge._detect_gradient(bad, [frame.frame() for frame in self._kept], None, verdict, is_skipped=False)

    def _read_weights(self, backward: _Backward) -> None:
        """Those that have changed since they were read before."""
        groups, met = [], set()
        for module, number in self._modules.numbers.items():
            own = []
            for name, weight in module._parameters.items():
                gradient = None if weight is None or id(weight) in met else weight.grad
                met.add(id(weight))
                if gradient is not None and self._known.find(gradient) is None:
                    own.append((f"grad {name}", gradient))
            if own:
                groups.append((number, self._names[number], type(module).__name__, own))
        order = {tap.place.number: i for i, tap in reversed(list(enumerate(backward.read)))}
        groups.sort(key=lambda group: (order.get(group[0], len(order)), -group[0]))
        for frame in self._read(backward.batch_number, groups, remember=True):
            backward.queue.append((frame, []))

    def _read(
        self,
        batch_number: int,
        groups: list[tuple[int, str, str, list[tuple[str, Tensor]]]],
        remember: bool = False,
    ) -> list[PendingFrame]:
        """A frame for each (number, name, class, (label, gradient)...) that shows anything, all in one launch."""
        unread: list[Tensor] = []
        frames: list[tuple[str, str, list[tuple[str, Any, Rule]]]] = []
        for number, name, class_name, labelled in groups:
            lines: list[tuple[str, Any, Rule]] = []
            for label, gradient in labelled:
                rule = self._rule(number, label)
                for part_label, part in capture.opened(label, gradient) if rule.is_shown else ():
                    lines.append((part_label, len(unread) if capture.is_tensor(part) else capture.stand_in(part), rule))
                    if capture.is_tensor(part):
                        unread.append(part)
            if lines:
                frames.append((name, class_name, lines))
        measurement = measure(self._recorder, unread)
        read = measurement.being_read()
        self.tensors += len(read)
        self.bytes_read += sum(map(measurement.size, read))
        for i in read if remember else ():
            self._known.insert(unread[i], Found(measurement, i), measurement.size(i))
        return [
            PendingFrame(
                batch_number,
                name,
                class_name,
                tuple(
                    PendingLine(
                        label, Found(measurement, content) if isinstance(content, int) else content, True, rule.allowed
                    )
                    for label, content, rule in lines
                ),
                starts_batch=False,
            )
            for name, class_name, lines in frames
        ]

    def _settle(self, backward: _Backward, at_end: bool, wait: bool = False) -> None:
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
        self, judge: GradientJudge, backward: _Backward, pending: PendingFrame, frame: Frame, taps: list[Tap]
    ) -> None:
        first = frame.lines.index(frame.bad_lines[0])
        content = pending.lines[first].content
        tensor = content.measurement.tensor(content.position) if isinstance(content, Found) else None
        verdict = self._verdicts.verdict(self._bad(backward, frame, first, taps))
        scaler = scaler_in_use() if backward.seems_scaled else None
        if scaler is not None:
            self._promised = (
                frame,
                _with_advice(verdict, "a GradScaler is in use, and yet the optimizer takes its step"),
            )
            advice = f"GradScaler will skip this step, and lower its scale (now {scaler.get_scale():g})"
            verdict = _with_advice(verdict, advice)
        before = [each.frame() for each in list(self._kept)[:-1]]
        self._kept.clear()
        judge._detect_gradient(frame, before, tensor, verdict, is_skipped=scaler is not None)

    def _bad(self, backward: _Backward, frame: Frame, first: int, taps: list[Tap]) -> BadGradient:
        line = frame.lines[first]
        tap = next((tap for tap in reversed(taps) if backward.read[tap][1] <= first), None)
        if tap is not None:
            return BadGradient(frame, line, tap, None, False, backward.read, backward.born.get(tap))
        name = line.label.removeprefix("grad ").split(".")[0]
        modules = self._modules.numbers.items()
        weight = next((m._parameters.get(name) for m, number in modules if self._names[number] == frame.module), None)
        birth = None if backward.births is None or weight is None else backward.births.of_leaf(weight)
        return BadGradient(frame, line, None, weight, False, backward.read, birth)

    def _birth(self, births: GradientBirths, taps: dict[int, Tap], tap: Tap) -> GradientBirth | None:
        """In the hook of the node that it has come to."""
        number = next(number for number, each in taps.items() if each is tap)
        return births.of(torch._C._current_autograd_node(), number)

    @not_compiled
    def _ran(self, module: str, traceback: list[str], made: Sequence[Any], got: Sequence[Any]) -> None:
        """In anomaly mode, a node."""
        if not self.is_on or self._recorder.capture() is not None:
            return
        with self._lock:
            backward = self._backwards.get(torch._C._current_graph_task_id())
            if backward is None or backward.is_over:
                return
            if backward.births is None:
                root = self._modules.root
                backward.births = GradientBirths(self._recorder, root, self._is_finite)
            backward.births.follow(module, traceback, made, got)

    def _is_finite(self, node: Any, number: int) -> bool:
        tap = self._graph.tap_at(node, number)
        return tap is not None and self._verdicts.is_known_finite(tap)


def _with_advice(verdict: Verdict, advice: str) -> Verdict:
    return replace(verdict, advice=advice, text=f"{verdict.text}\n{advice}")


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

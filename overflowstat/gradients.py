"""What a monitor sees of the backward: the gradients of modules' outputs and inputs as they come, and of weights."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
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
from .gradient_graph import GradientGraph, Place, Tap
from .hooks import ForwardHook, is_in_backward
from .measurement import Measurement, measure
from .measurement import Place as Found
from .modules import ModuleTree
from .pending import PendingFrame, PendingLine
from .policy import Policy, Rule
from .recorder import Recorder
from .stats import TensorStats
from .unchanged import Unchanged
from .verdict import Kind, Verdict
from .wording import module_text

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
    nodes: list[tuple[str, str, list[str], Measurement, int]] = field(default_factory=list)
    """In anomaly mode: module, node, traceback, what it made and got, how many it made; until one is found."""
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
        self._names: dict[int, tuple[str, Callable[[str], Rule] | None]] = {}
        self._callers: dict[int, str | None] = {}
        self._rules: dict[tuple[int, str], Rule] = {}
        self._graph = GradientGraph(_weakly(self, "_reached"), _weakly(self, "_ran"))
        self._backwards: dict[int, _Backward] = {}  # by the number that autograd gives to it
        self._kept: deque[PendingFrame] = deque(maxlen=keep)
        self._known = Unchanged()
        self._has_read_weights = False
        self._promised: tuple[Frame, Verdict] | None = None  # what a GradScaler should keep from the weights
        self.is_on = False
        self.tensors = self.bytes_read = 0

    def add_module(self, number: int, name: str, module: nn.Module) -> None:
        self._names[number] = name, rules_of(self._policy, name, module)
        self._callers[number] = "" if (around := self._module_around(name)) is None and name else around

    def hook(self, number: int, module: nn.Module) -> ForwardHook:
        return ForwardHook(number, module, self._after_forward, _nothing)

    def _rule(self, number: int, label: str) -> Rule:
        if (number, label) not in self._rules:
            find = self._names[number][1]
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
                name = self._names[number][0]
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
                groups.append((number, self._names[number][0], type(module).__name__, own))
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
        verdict = self._verdict(backward, frame, first, taps)
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

    def _verdict(self, backward: _Backward, frame: Frame, first: int, taps: list[Tap]) -> Verdict:
        line = frame.lines[first]
        kinds = _kinds(line.content)
        here = module_text(frame.module, frame.class_name)
        operation, source = None, None
        is_outside = False
        tap = next((tap for tap in reversed(taps) if backward.read[tap][1] <= first), None)
        if tap is not None:
            what = f"the one that reached {here} as {line.label} is {kinds}"
            uses = [use for use in tap.uses if use.of in backward.read]
            makers = {use.module for use in uses} | tap.also_used_by
            is_outside = tap.leaves
            clean = [self._content(backward, use.of) for use in uses]
            operations = {name for use in uses for name in use.operations}
            if len(operations) == 1 and not tap.also_used_by and not is_outside:
                operation = operations.pop()
        else:
            name = line.label.removeprefix("grad ").split(".")[0]
            found = (m._parameters.get(name) for m in self._modules.numbers if self._name_of(m) == frame.module)
            weight = next(found, None)
            makers = set() if weight is None else set(self._graph.users(weight))
            what = f"that of its {line.label.removeprefix('grad ')} is {kinds}"
            clean = [
                self._content(backward, each)
                for each in backward.read
                if each.place.name in makers and each.place.label.startswith("grad output")
            ]
        node = self._first_bad_node(backward)
        if node is not None:
            maker, operation, source = node
            makers, is_outside = {maker}, False
        produced = len(makers) == 1 and not is_outside and all(map(_is_finite, clean))
        if produced:
            maker = next(iter(makers))
            largest = [content.abs_max for content in clean if isinstance(content, TensorStats) and content.numel]
            between = ", in its own forward between its children" if self._has_children(maker) else ""
            finite = f" (up to {max(largest):.3g})" if largest else ""
            text = f"made in the backward of {module_text(maker)}{between}: "
            text += f"the gradients that reached it are finite{finite}, {what}"
            if operation is not None:
                text += f"\nby {operation}" + ("" if source is None else f", of {source}")
            class_name = next((type(m).__name__ for m in self._modules.numbers if self._name_of(m) == maker), "")
            return Verdict(
                frame.batch_number, maker, class_name, line.label, True, "unknown", operation, source, text=text
            )
        kind: Kind = "unknown"
        if is_outside and not makers:
            kind = "bad-input"
            text = f"it came so to the model, from the loss or what else follows: {what}"
        elif makers:
            names = sorted(map(module_text, makers)) + ["what follows the model"] * is_outside
            text = f"made in the backward of one of {', '.join(names)}: {what}"
        else:
            text = f"made outside of the modules that are watched: {what}"
        return Verdict(frame.batch_number, frame.module, frame.class_name, line.label, False, kind, text=text)

    def _name_of(self, module: nn.Module) -> str:
        return self._names[self._modules.numbers[module]][0]

    def _has_children(self, name: str) -> bool:
        return any(each != name and each.startswith(f"{name}." if name else "") for each, _ in self._names.values())

    def _content(self, backward: _Backward, tap: Tap) -> TensorStats | str:
        frame, line = backward.read[tap]
        return frame.lines[line].arrived().content

    @not_compiled
    def _ran(self, module: str, node: str, traceback: list[str], made: Any, got: Any) -> None:
        """In anomaly mode, a node."""
        if not self.is_on or self._recorder.capture() is not None:
            return
        with self._lock:
            backward = self._backwards.get(torch._C._current_graph_task_id())
            if backward is None or backward.is_over or not self.is_on:
                return
            tensors = [[tensor for tensor in group if capture.is_tensor(tensor)] for group in (made, got)]
            measurement = measure(self._recorder, tensors[0] + tensors[1])
            if not measurement.ready() or any(measurement.non_finite(i) for i in range(measurement.count)):
                backward.nodes.append((module, node, traceback, measurement, len(tensors[0])))

    def _first_bad_node(self, backward: _Backward) -> tuple[str, str, str | None] | None:
        """The module, the name and the line of the first that made bad gradients of finite ones."""
        for module, node, traceback, measurement, count in backward.nodes:
            is_bad = [bool(measurement.non_finite(i)) for i in range(measurement.count)]
            if any(is_bad[:count]):
                return None if any(is_bad[count:]) else (module, node, _source(traceback))
        return None


def _with_advice(verdict: Verdict, advice: str) -> Verdict:
    return replace(verdict, advice=advice, text=f"{verdict.text}\n{advice}")


def _kinds(content: TensorStats | str) -> str:
    assert isinstance(content, TensorStats)
    return " and ".join(kind for kind, there in (("nan", content.has_nan), ("inf", content.has_inf)) if there)


def _is_finite(content: TensorStats | str) -> bool:
    return not isinstance(content, TensorStats) or not content.is_bad


_TORCH = os.path.dirname(torch.__file__) + os.sep


def _source(traceback: list[str]) -> str | None:
    """The last line that is not torch's, of texts as `traceback.format_stack` makes them."""
    for text in reversed(traceback):
        parts = text.split('"', 2)
        if len(parts) == 3 and not parts[1].startswith(_TORCH):
            return f"{os.path.basename(parts[1])}:{parts[2].split(',')[1].replace('line', '').strip()}"
    return None


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

"""The log of module calls with any recorder."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from . import capture
from .frame_log import SHOWN, CapturedCall, Counters, rules_of
from .frames import Frame
from .hooks import ForwardHook, is_in_backward
from .measurement import Measurement, Place, measure
from .pending import PendingFrame, PendingLine
from .policy import Policy, Rule
from .recorder import Recorder
from .stats import is_on_meta
from .unchanged import Known, Unchanged, can_know

__all__ = ["PlainFrameLog"]

MOST_RULES = 10_000  # that are remembered of a module: keys of structures may be made anew in each call
OFFLOADED = "offloaded"  # what a weight without memory is, where the forward computes with some


class _Batch(NamedTuple):
    """How the calls of a batch are treated: see FrameLog.configure."""

    number: int = 0
    is_watching: bool = True
    is_told: bool = False
    always_look: bool = False
    reuse: bool = True


@dataclass(slots=True)
class _Module:
    reference: Callable[[], nn.Module | None]
    name: str
    weight_names: Sequence[str]
    find_rule: Callable[[str], Rule] | None
    rules: dict[str, Rule] = field(default_factory=dict)
    children: Sequence[tuple[str, int]] = ()
    was_called: bool = False

    def rule(self, label: str) -> Rule:
        if self.find_rule is None:
            return SHOWN
        if label not in self.rules:
            if len(self.rules) >= MOST_RULES:
                self.rules.clear()
            self.rules[label] = self.find_rule(label)
        return self.rules[label]

    def weights(self, module: nn.Module, buffers: bool) -> Iterator[tuple[str, Tensor | None]]:
        return capture.weights(module, self.weight_names, buffers)


class _Shown(NamedTuple):
    """A line to be, with what stands in it: a value, or a place where its numbers are already."""

    label: str
    value: object
    is_weight: bool = False
    is_judged: bool = True


class PlainFrameLog:
    """`FrameLog` with any recorder.

    Cost of a call: one `Recorder.record` for the tensors that have not been read yet, and tens of microseconds of
    Python.
    """

    def __init__(
        self,
        recorder: Recorder,
        keep: int | None,
        nested: bool,
        buffers: bool,
        policy: Policy | None,
        warn_at: float | None,
    ) -> None:
        self._warn_at = warn_at
        self._detail = bool(getattr(recorder, "detail", False))
        self._told: set[tuple[str, str, str]] = set()  # (module, label, what of)
        self._modules: list[_Module] = []
        self._policy = policy
        self._nested = nested
        self._buffers = buffers
        self._recorder = recorder
        self._lock = threading.RLock()
        self._queue: deque[PendingFrame] = deque()
        self._captured: deque[tuple[int, PendingFrame]] = deque()
        self._kept: deque[PendingFrame] = deque(maxlen=keep)
        self._given: PendingFrame | None = None
        self._weights = Unchanged()
        self._activations = Unchanged()
        self._graph: int | None = None  # in which the weights were read
        self._calls = self._tensors = self._bytes_read = self._bytes_reused = self._waits = 0
        # The next batch is begun by its first call, since recomputes belong to the last one.
        self._batch = self._next_batch = _Batch()
        self._keeps_weights = self._is_begun = self._has_weights = self._has_calls = False

    def add_module(self, number: int, name: str, module: nn.Module) -> None:
        names = capture.weight_names(module) if self._nested else ()
        with self._lock:
            self._modules.append(_Module(weakref.ref(module), name, names, rules_of(self._policy, name, module)))

    def drop_module(self, number: int) -> None:
        with self._lock:
            self._modules[number].weight_names = ()
            self._modules[number].children = []
            self._modules[number].reference = lambda: None

    def set_children(self, number: int, children: Sequence[tuple[str, int]]) -> None:
        with self._lock:
            self._modules[number].children = children if self._nested else ()

    def start_batch(self, number: int, keep_weights: bool) -> None:
        with self._lock:
            self._next_batch = self._next_batch._replace(number=number)
            self._keeps_weights = keep_weights
            self._is_begun = self._has_calls = False

    def configure(self, is_watching: bool, is_told: bool, always_look: bool, reuse: bool) -> None:
        with self._lock:
            self._next_batch = _Batch(self._next_batch.number, is_watching, is_told, always_look, reuse)

    def forget_weights(self) -> None:
        with self._lock:
            self._weights.clear()

    def hook(self, number: int, module: nn.Module, look: Callable[[], None]) -> Callable[..., None]:
        return ForwardHook(number, module, self.call, look)

    def add(self, number: int, module: nn.Module, labels: Sequence[str], read: Measurement, calls: int) -> bool:
        with self._lock:
            is_recompute = self._begin_call()
            if not self._batch.is_watching:
                return False
            shown = [_Shown(label, Place(read, i)) for i, label in enumerate(labels)]
            return self._keep_call(number, module, shown, is_recompute, calls)

    def call(self, number: int, module: nn.Module, args: object, kwargs: Mapping[str, object], output: object) -> bool:
        with self._lock:
            is_recompute = self._begin_call()
            if not self._batch.is_watching:
                return False
            found = (*capture.inputs(args, kwargs, self._nested), *capture.outputs(output, self._nested))
            shown = [_Shown(label, value) for label, value in found]
            return self._keep_call(number, module, shown, is_recompute, 1)

    def _begin_call(self) -> bool:
        """Gives whether it is a recompute."""
        is_recompute = is_in_backward()
        if not is_recompute:
            self._use_next_batch()
        return is_recompute

    def _use_next_batch(self) -> None:
        self._batch = self._next_batch
        if self._is_begun:
            return
        self._is_begun = True
        self._has_weights = False
        self._activations.clear()
        if not self._keeps_weights:
            self._weights.clear()

    def _use_graph(self, graph: int | None) -> None:
        """What is read in a graph has no numbers elsewhere."""
        if self._graph != graph:
            self._graph = graph
            self._has_weights = False
            self._weights.clear()
            self._activations.clear()

    def _keep_call(
        self, number: int, module: nn.Module, computed: Sequence["_Shown"], is_recompute: bool, calls: int
    ) -> bool:
        graph = self._recorder.capture()
        self._use_graph(graph)
        if not self._has_weights and not is_recompute:
            self._read_weights(graph)
        lines: list[PendingLine] = []
        unread: dict[int, tuple[Tensor, list[int]]] = {}  # by the tensor's id, with the lines that show it
        shown = [*self._shown_weights(number, module), *computed]
        if self._nested:
            shown = [
                line._replace(label=label, value=part)
                for line in shown
                for label, part in capture.opened(line.label, line.value)
            ]
        rule_of = self._modules[number].rule
        shown = [line for line in shown if rule_of(line.label).is_shown]
        values = [line.value for line in shown if not line.is_weight]
        is_all_on_meta = all(is_on_meta(value) for value in values if capture.is_tensor(value))
        has_memory = not is_all_on_meta or any(type(value) is Place for value in values)
        for label, value, is_weight, is_judged in shown:
            line = PendingLine(label, "", is_judged, rule_of(label).allowed)
            if type(value) is Place:  # and not isinstance, which objects answer as they like
                line = line._replace(content=value)
            elif is_weight and value is None:
                line = line._replace(content=capture.NOT_VISIBLE)
            elif not capture.is_tensor(value):
                line = line._replace(content=capture.stand_in(value))
            elif is_weight and is_on_meta(value) and has_memory:
                line = line._replace(content=OFFLOADED)
            elif (known := self._weights.find(value) if is_weight else self._find(value)) is not None:
                line = line._replace(content=known.place)
            else:
                unread.setdefault(id(value), (value, []))[1].append(len(lines))
            lines.append(line)
        if not lines and self._policy is not None:  # nothing of it is to be shown
            return False
        if unread:
            measurement = self._read([tensor for tensor, _ in unread.values()], graph)
            for position, (tensor, shown_in) in enumerate(unread.values()):
                place = Place(measurement, position)
                for i in shown_in:
                    lines[i] = lines[i]._replace(content=place)
                if self._batch.reuse and position in measurement.being_read():
                    self._activations.insert(tensor, place, measurement.size(position))
        call = PendingFrame(
            self._batch.number,
            self._modules[number].name,
            type(module).__name__,
            tuple(lines),
            starts_batch=not self._has_calls and not is_recompute and graph is None,
            is_recompute=is_recompute,
            is_told=self._batch.is_told,
            thread=threading.get_ident(),
            calls=calls,
        )
        if graph is not None:
            self._captured.append((graph, call))
            return True
        self._has_calls = self._has_calls or not is_recompute
        self._calls += calls
        self._queue.append(call)
        while self._queue and self._queue[0].ready() and not self._is_given(self._queue[0]):
            self._kept.append(self._queue.popleft())
        return bool(self._queue) and (self._batch.always_look or self._queue[0].ready() or call.is_known_bad())

    def _shown_weights(self, number: int, module: nn.Module) -> Iterator["_Shown"]:
        watched = self._modules[number]
        watched.was_called = True
        for label, weight in watched.weights(module, self._buffers):
            yield _Shown(label, weight, is_weight=True)
        for name, child_number in watched.children:
            child = self._modules[child_number]
            if not child.was_called and (child_module := child.reference()) is not None:
                for label, weight in child.weights(child_module, self._buffers):
                    # It may be used nowhere.
                    yield _Shown(f"{name}.{label}", weight, is_weight=True, is_judged=False)

    def _find(self, value: object) -> Known | None:
        known = self._activations.find(value) if self._batch.reuse and capture.is_tensor(value) else None
        if known is not None:
            self._bytes_reused += known.size
        return known

    def _read_weights(self, graph: int | None) -> None:
        self._has_weights = True
        unread = {}
        for watched in self._modules:
            module = watched.reference()
            # Without buffers: running statistics are written to with no new version, and are read in their module.
            for name, weight in watched.weights(module, buffers=False) if module is not None else ():
                if weight is None or not watched.rule(name).is_shown:
                    continue
                # Parts of other kinds are made for each look, and would not be known again.
                for _, part in capture.opened(name, weight) if capture.is_wrapper(weight) else ((name, weight),):
                    if not capture.is_tensor(part):
                        continue
                    if (known := self._weights.find(part)) is not None:
                        self._bytes_reused += known.size
                    # The others are looked at in their modules only: those that could change unseen (inference
                    # tensors, wrappers without storage) and those that have no numbers yet (lazy, offloaded).
                    elif can_know(part):
                        unread[id(part)] = part
        if unread:
            weights = list(unread.values())
            measurement = self._read(weights, graph)
            for i in measurement.being_read():
                self._weights.insert(weights[i], Place(measurement, i), measurement.size(i))

    def _read(self, tensors: Sequence[Tensor], graph: int | None) -> Measurement:
        measurement = measure(self._recorder, tensors, graph)
        read = measurement.being_read()
        self._tensors += len(read)
        self._bytes_read += sum(map(measurement.size, read))
        return measurement

    def next(self, wait: bool) -> Frame | None:
        with self._lock:
            if wait and self._queue:
                self._wait_for(self._queue[-1])
            wait = wait or bool(self._queue and self._queue[-1].is_known_bad())
            while self._queue and (wait or self._queue[0].ready()):
                call = self._queue.popleft()
                self._wait_for(call)
                self._kept.append(call)
                if self._is_given(call):
                    self._given = call
                    if not call.is_bad():
                        self._told |= self._notable(call)
                    return call.frame()
        return None

    def _is_given(self, call: PendingFrame) -> bool:
        return call.is_told or call.is_bad() or bool(self._notable(call))

    def _notable(self, call: PendingFrame) -> set[tuple[str, str, str]]:
        """Places that are near their limit or mostly subnormal, and were not given as that before."""
        found = set()
        if (warn_at := self._warn_at) is not None:
            found |= {(call.module, line.label, "near") for line in call.lines if line.is_near(warn_at)}
        if self._detail:
            found |= {(call.module, line.label, "subnormal") for line in call.lines if line.is_mostly_subnormal()}
        return found - self._told

    def tensor(self, line: int) -> Tensor | None:
        content = self._given.lines[line].content if self._given else None
        return content.measurement.tensor(content.position) if isinstance(content, Place) else None

    def thread(self) -> int | None:
        return None if self._given is None else self._given.thread

    def _wait_for(self, call: PendingFrame) -> None:
        if not call.ready():
            self._waits += 1
            call.wait()

    def take_captured(self) -> tuple[int, CapturedCall] | None:
        with self._lock:
            return self._captured.popleft() if self._captured else None

    def judge_captured(self, call: Any, batch_number: int, starts_batch: bool) -> Frame:
        self._given = None  # the tensors are what the graph makes of them
        frame: Frame = replace(call, batch_number=batch_number, starts_batch=starts_batch).frame()
        # Whatever the next replay finds.
        lines = tuple(PendingLine(line.label, line.content, line.is_judged, line.allowed) for line in frame.lines)
        self._kept.append(replace(call, batch_number=batch_number, starts_batch=starts_batch, lines=lines))
        return frame

    def drop_batch(self, number: int) -> None:
        with self._lock:
            self._queue = deque(call for call in self._queue if call.batch_number != number)

    def kept(self) -> list[Frame]:
        return [call.frame() for call in list(self._kept)]  # a copy, as other threads go on

    def clear_kept(self) -> None:
        self._kept.clear()

    @property
    def pending(self) -> int:
        return len(self._queue)

    @property
    def is_begun(self) -> bool:
        return self._is_begun

    @property
    def calls(self) -> int:
        return self._calls

    def counters(self) -> Counters:
        return Counters(self._calls, self._tensors, self._bytes_read, self._bytes_reused, 0, self._waits)

"""The module calls of a run, kept as numbers: those that are not judged yet, and the last ones that were.

There are two, which do the same: `PlainFrameLog` with any recorder, and `NativeFrameLog`, where one call of
csrc/frame_log.cpp does all that a hook has to do.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from . import capture
from .frames import Frame, Line
from .hooks import ForwardHook, inert_hook, refuse_replica
from .measurement import Measurement, Place, measure, measured_content
from .pending import PendingFrame
from .recorder import NativeRecorder, Recorder
from .row import Row
from .stats import TensorStats
from .unchanged import Known, Unchanged, can_know

__all__ = ["CapturedCall", "Counters", "FrameLog", "make_frame_log"]


class Counters(NamedTuple):
    """What watching has cost so far."""

    frames: int
    """Module calls."""
    tensors: int
    """That were read; one that is met again unchanged is not."""
    bytes_read: int
    bytes_reused: int
    """Of tensors that were shown again without being read."""
    launches: int
    """Of kernels on GPUs; 0 where plain torch reads, which launches many."""
    syncs: int
    """Waits for numbers that were still on their way from a GPU when they were asked for."""


class CapturedCall(Protocol):
    """A module call inside a CUDA graph."""

    def replays(self) -> tuple[int, bool, str] | None:
        """`Replays` of the graph; None if nothing of this call was read there. May wait."""
        ...


class FrameLog(Protocol):
    def start_batch(self, number: int, keep_weights: bool) -> None:
        """What follows belongs to the batch of this number.

        With `keep_weights` a weight that has not changed since it was read in an earlier one is not read again.
        """
        ...

    def configure(self, is_watching: bool, is_told: bool, always_look: bool, reuse: bool) -> None:
        """How the calls that follow are treated.

        Args:
            is_watching: without it `call` does nothing.
            is_told: `next` gives all of their frames, not only the bad ones.
            always_look: `call` is true wherever it has not judged a call itself.
            reuse: a tensor that is met again in the batch unchanged is not read again.
        """
        ...

    def forget_weights(self) -> None:
        """All of them may have changed."""
        ...

    def call(self, number: int, module: nn.Module, args: object, kwargs: Mapping[str, object], output: object) -> bool:
        """Keep a call of the module of this number, and read now what it shows.

        True if there is something to look at: `next` has a frame, or `take_captured` a call.
        """
        ...

    def hook(self, number: int, module: nn.Module, look: Callable[[], None]) -> Callable[..., None]:
        """A forward hook for a module, with its keyword inputs, that does `call`, and then look() if that is true."""
        ...

    def next(self, wait: bool) -> Frame | None:
        """Judge calls in the order in which they ran up to one that is bad or to be told, which is given.

        None if there is none among those whose numbers are there or, with `wait`, among all. Waits anyway where the
        last call is known to be bad, since only what ran before it is then still to be judged.
        """
        ...

    def take_captured(self) -> tuple[int, CapturedCall] | None:
        """The next call that was captured into a CUDA graph and has not been taken, with the graph's number."""
        ...

    def drop_batch(self, number: int) -> None:
        """Forget calls of this batch that are not judged yet."""
        ...

    def kept(self) -> list[Frame]:
        """The last ones that were judged."""
        ...

    def judge_captured(self, call: Any, batch_number: int, starts_batch: bool) -> Frame:
        """Keep and give what the last replay of the graph left of a `CapturedCall` of this log."""
        ...

    def clear_kept(self) -> None: ...

    @property
    def pending(self) -> int:
        """How many calls are not judged yet."""
        ...

    @property
    def calls(self) -> int: ...

    def counters(self) -> Counters: ...


class PlainFrameLog:
    """With any recorder.

    Cost of a call: one `Recorder.record` for the tensors that have not been read yet, and tens of microseconds of
    Python.
    """

    def __init__(self, modules: Mapping[str, nn.Module], recorder: Recorder, keep: int | None, nested: bool) -> None:
        self._modules = dict(modules)
        self._nested = nested
        self._names = list(modules)
        self._recorder = recorder
        self._lock = threading.RLock()
        self._queue: deque[PendingFrame] = deque()
        self._captured: deque[tuple[int, PendingFrame]] = deque()
        self._kept: deque[PendingFrame] = deque(maxlen=keep)
        self._weights = Unchanged()
        self._activations = Unchanged()
        self._graph: int | None = None  # in which the weights were read
        self._calls = self._tensors = self._bytes_read = self._bytes_reused = self._waits = 0
        self.configure(is_watching=True, is_told=False, always_look=False, reuse=True)
        self.start_batch(0, keep_weights=False)

    def start_batch(self, number: int, keep_weights: bool) -> None:
        with self._lock:
            self._number = number
            self._has_weights = self._has_calls = False
            self._activations.clear()
            if not keep_weights:
                self._weights.clear()

    def configure(self, is_watching: bool, is_told: bool, always_look: bool, reuse: bool) -> None:
        with self._lock:
            self._is_watching, self._is_told, self._always_look, self._reuse = is_watching, is_told, always_look, reuse

    def forget_weights(self) -> None:
        with self._lock:
            self._weights.clear()

    def hook(self, number: int, module: nn.Module, look: Callable[[], None]) -> Callable[..., None]:
        return ForwardHook(number, module, self.call, look)

    def call(self, number: int, module: nn.Module, args: object, kwargs: Mapping[str, object], output: object) -> bool:
        with self._lock:
            return self._is_watching and self._call(number, module, args, kwargs, output)

    def _call(self, number: int, module: nn.Module, args: object, kwargs: Mapping[str, object], output: object) -> bool:
        graph = self._recorder.capture()
        if not self._has_weights or self._graph != graph:
            self._read_weights(graph)
        lines: list[tuple[str, Place | TensorStats | str]] = []
        unread: dict[int, tuple[Tensor, list[int]]] = {}  # by the tensor's id, with the lines that show it
        weights = [(label, value, self._weights.find(value)) for label, value in capture.weights(module)]
        values = [*capture.inputs(args, kwargs, self._nested), *capture.outputs(output, self._nested)]
        for label, value, known in [*weights, *((label, value, self._find(value)) for label, value in values)]:
            if not isinstance(value, Tensor):
                lines.append((label, capture.stand_in(value)))
            elif known is not None:
                lines.append((label, known.place))
            else:
                unread.setdefault(id(value), (value, []))[1].append(len(lines))
                lines.append((label, ""))
        if unread:
            measurement = self._read([tensor for tensor, _ in unread.values()], graph)
            for position, (tensor, shown_in) in enumerate(unread.values()):
                place = Place(measurement, position)
                for i in shown_in:
                    lines[i] = lines[i][0], place
                if self._reuse and position in measurement.being_read():
                    self._activations.insert(tensor, place, measurement.size(position))
        call = PendingFrame(
            self._number,
            self._names[number],
            type(module).__name__,
            tuple(lines),
            starts_batch=not self._has_calls and graph is None,
            is_told=self._is_told,
        )
        if graph is not None:
            self._captured.append((graph, call))
            return True
        self._has_calls = True
        self._calls += 1
        self._queue.append(call)
        while self._queue and self._queue[0].ready() and not self._queue[0].is_told and not self._queue[0].is_bad():
            self._kept.append(self._queue.popleft())
        return bool(self._queue) and (self._always_look or self._queue[0].ready() or call.is_known_bad())

    def _find(self, value: object) -> Known | None:
        known = self._activations.find(value) if self._reuse and isinstance(value, Tensor) else None
        if known is not None:
            self._bytes_reused += known.size
        return known

    def _read_weights(self, graph: int | None) -> None:
        if self._graph != graph:  # what is read in a graph has no numbers elsewhere
            self._weights.clear()
            self._activations.clear()
        self._graph, self._has_weights = graph, True
        unread = {}
        for module in self._modules.values():
            for _, weight in capture.weights(module):
                if (known := self._weights.find(weight)) is not None:
                    self._bytes_reused += known.size
                # The others are looked at in their modules only: those that could change unseen (inference tensors,
                # wrappers without storage) and those that have no numbers yet (lazy, offloaded).
                elif can_know(weight):
                    unread[id(weight)] = weight
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
                if call.is_told or call.is_bad():
                    return call.frame()
        return None

    def _wait_for(self, call: PendingFrame) -> None:
        if not call.ready():
            self._waits += 1
            call.wait()

    def take_captured(self) -> tuple[int, CapturedCall] | None:
        with self._lock:
            return self._captured.popleft() if self._captured else None

    def judge_captured(self, call: Any, batch_number: int, starts_batch: bool) -> Frame:
        frame: Frame = replace(call, batch_number=batch_number, starts_batch=starts_batch).frame()
        lines = tuple((line.label, line.content) for line in frame.lines)  # whatever the next replay finds
        self._kept.append(replace(call, batch_number=batch_number, starts_batch=starts_batch, lines=lines))
        return frame

    def drop_batch(self, number: int) -> None:
        with self._lock:
            self._queue = deque(call for call in self._queue if call.batch_number != number)

    def kept(self) -> list[Frame]:
        return [call.frame() for call in self._kept]

    def clear_kept(self) -> None:
        self._kept.clear()

    @property
    def pending(self) -> int:
        return len(self._queue)

    @property
    def calls(self) -> int:
        return self._calls

    def counters(self) -> Counters:
        return Counters(self._calls, self._tensors, self._bytes_read, self._bytes_reused, 0, self._waits)


class NativeFrameLog:
    """In C++, for tensors that the extension can read; all others go through a `Measurement`, as in PlainFrameLog.

    Cost of a call: under a microsecond, and the reading of tensors that have not been read yet.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], recorder: NativeRecorder, keep: int | None, nested: bool
    ) -> None:
        self._modules = list(modules.items())
        self._make_hook = recorder.extension.make_hook
        self._log = recorder.extension.FrameLog(
            modules=list(modules.values()),
            keep=-1 if keep is None else keep,
            measure=functools.partial(measure, recorder),
            works_on=recorder.works_on,
            capture=recorder.extension.current_capture,
            items=capture.items if nested else None,
        )

    def hook(self, number: int, module: nn.Module, look: Callable[[], None]) -> Callable[..., None]:
        hook: Callable[..., None] = self._make_hook(self._log, number, module, look, refuse_replica, inert_hook)
        return hook

    def call(self, number: int, module: nn.Module, args: object, kwargs: Mapping[str, object], output: object) -> bool:
        return bool(self._log.call(number, module, args, kwargs, output))

    def start_batch(self, number: int, keep_weights: bool) -> None:
        self._log.start_batch(number, keep_weights)

    def configure(self, is_watching: bool, is_told: bool, always_look: bool, reuse: bool) -> None:
        self._log.configure(is_watching, is_told, always_look, reuse)

    def forget_weights(self) -> None:
        self._log.forget_weights()

    def next(self, wait: bool) -> Frame | None:
        call = self._log.next(wait)
        return None if call is None else self._frame(call)

    def take_captured(self) -> tuple[int, CapturedCall] | None:
        found: tuple[int, CapturedCall] | None = self._log.take_captured()
        return found

    def judge_captured(self, call: Any, batch_number: int, starts_batch: bool) -> Frame:
        return self._frame(self._log.judge_captured(call, batch_number, starts_batch))

    def drop_batch(self, number: int) -> None:
        self._log.drop_batch(number)

    def kept(self) -> list[Frame]:
        return [self._frame(call) for call in self._log.kept()]

    def clear_kept(self) -> None:
        self._log.clear_kept()

    @property
    def pending(self) -> int:
        return int(self._log.pending)

    @property
    def calls(self) -> int:
        return int(self._log.calls)

    def counters(self) -> Counters:
        return Counters(**self._log.counters())

    def _frame(self, call: Any) -> Frame:
        batch_number, i, starts_batch, lines = self._log.frame(call)
        name, module = self._modules[i]
        contents = tuple(Line(label, _content(content)) for label, content in lines)
        return Frame(batch_number, name, type(module).__name__, contents, starts_batch)


def _content(content: Any) -> TensorStats | str:
    """Of what csrc/bindings.cpp gives for a line."""
    if isinstance(content, str):
        return content
    if isinstance(content[0], Measurement):
        in_python: TensorStats | str = content[0].content(content[1])
        return in_python
    row, sizes, strides, dtype = content
    return measured_content(row if isinstance(row, str) else Row._make(row), (sizes, strides, dtype))


def make_frame_log(modules: Mapping[str, nn.Module], recorder: Recorder, keep: int | None, nested: bool) -> FrameLog:
    """The one that goes with a recorder.

    Args:
        modules: those to watch, by their names, of which the place in this mapping is the number.
        recorder: what reads tensors.
        keep: how many judged calls to keep; None for all.
        nested: whether keyword inputs are seen, and what is inside of lists, dicts and other structures.
    """
    if isinstance(recorder, NativeRecorder):
        return NativeFrameLog(modules, recorder, keep, nested)
    return PlainFrameLog(modules, recorder, keep, nested)

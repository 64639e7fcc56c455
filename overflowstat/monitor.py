"""Monitor: hooks on every module of a model, one frame a module call, a judgement of each."""

import sys
import threading
from collections import deque
from collections.abc import Collection, Sequence
from typing import Literal, NoReturn, get_args

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from . import capture
from .captured import CapturedBatch
from .errors import BatchLimitReached, NonFiniteError, warn_user
from .frames import Frame
from .hooks import ForwardHook, RootEntryHook, calls_in_progress, is_watched
from .measurement import Place, measure
from .pending import PendingFrame
from .recorder import NativeRecorder, Recorder, RecorderName, make_recorder
from .report import OwnStyle, Report, Style
from .sinks import Printer, Sink
from .validation import check_batch_numbers, check_methods, check_model, check_one_of, check_optional_count
from .weights import WeightPass

__all__ = ["CheckName", "Monitor"]

CheckName = Literal["module", "batch", "step"]
CHECKS = get_args(CheckName)


class Monitor:
    """Watches the numbers of a model and raises where they first go bad.

    After every module call the monitor reads the module's parameters, positional inputs and outputs, and keeps what it
    read as a `Frame`. The first frame that holds a NaN or an infinity ends the forward with `NonFiniteError`, after the
    last frames have been printed.

        >>> monitor = Monitor(model)  # watches until monitor.remove()
        >>> with Monitor(model):  # watches in this block
        ...     train()

    A *batch* is one forward of `model` itself, the root; the first is number 0. Batches that are traced print every
    frame and never raise. A batch that raised, for whatever reason, has ended: the next forward starts the next one.

    The monitor stays attached though nobody keeps it. Copies of the model, deep or pickled, are not watched. Threads
    may share the model.

    A forward that is captured into a CUDA graph is watched in each replay: `check()` then judges the last one since it
    was called before, and counts all of them as batches. Call it on the stream that replays. Needs the extension.

    Not seen: keyword inputs, and tensors inside of lists, dicts and other structures than tuples.

    Cost: one pass over every tensor that is shown; on CUDA one launch a module call and at most one wait a batch
    (`check`). All parameters are read together at the first call of a batch, and those that change before their module
    runs once more there, unless they are written to through `.data` or NumPy, which nothing shows.

    Args:
        model: any module without `nn.DataParallel` in it.
        max_frames_to_save: how many frames to keep for a report; None for all of them.
        trace_batch_nums: batches to print instead of judging them.
        abort_after_batch_num: raises `BatchLimitReached` when this batch has finished.
        recorder: "native", "torch", or "auto" for the first of the two that is usable; or one of your own.
        check: when numbers on a GPU are judged, which takes a wait for it. "module": in the hook of each module call.
            "batch": as they arrive, and what is missing at the end of the root's forward, so that the error leaves the
            call of the model, while later modules may have run. "step": as they arrive, and what is missing before the
            next optimizer step or forward of the root, and in `check()` and `remove()`. The report is the same. A model
            in host memory is judged in the hook of each module in any case, and so is a traced batch.
        style: how things are worded.
        sinks: where frames and reports go; by default they are printed.

    Raises:
        TypeError, ValueError: an argument is not as told above. The model is untouched then.
        NonFiniteError, BatchLimitReached: in the forward of the watched model, or where `check` has it judged. If
            something else raises after the numbers went bad, that exception gets a note and the NonFiniteError as its
            attribute `non_finite`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_frames_to_save: int | None = 21,
        trace_batch_nums: Collection[int] = (),
        abort_after_batch_num: int | None = None,
        recorder: RecorderName | Recorder = "auto",
        check: CheckName = "batch",
        style: Style | None = None,
        sinks: Sequence[Sink] | None = None,
    ) -> None:
        for sink in sinks or ():
            check_methods("sinks", sink, Sink)
        if style is not None:
            check_methods("style", style, Style)
        self.model = check_model(model)
        self.trace_batch_nums = check_batch_numbers("trace_batch_nums", trace_batch_nums)
        self.abort_after_batch_num = check_optional_count("abort_after_batch_num", abort_after_batch_num)
        self.frames: deque[Frame] = deque(maxlen=check_optional_count("max_frames_to_save", max_frames_to_save))
        self.batch_number = 0
        self.total_calls = 0
        self.detected_overflow = False
        self._check = check_one_of("check", check, CHECKS)
        self._recorder = make_recorder(recorder)
        self._style = style or OwnStyle()
        self._sinks = list(sinks) if sinks is not None else [Printer(self._style)]
        self._lock = threading.RLock()  # hooks of several threads share all that follows
        # Of each thread that is in the root's forward: the exceptions that were being handled when its calls began.
        self._root_calls_of: dict[int, list[BaseException | None]] = {}
        self._queue: deque[PendingFrame] = deque()  # frames not judged yet, in execution order
        self._captured: list[CapturedBatch] = []
        self._raised_in_batch: int | None = None
        self._weights: WeightPass | None = None
        self._start_batch()

        if is_watched(model):
            warn_user(
                f"{type(model).__name__} is watched by another monitor already, and every tensor will be read once "
                "more; call remove() on the first one if that is not meant"
            )
        self._modules = dict(model.named_modules())
        if isinstance(self._recorder, NativeRecorder):
            self._recorder.prepare(
                {p.device for m in self._modules.values() for p in m._parameters.values() if p is not None}
            )
        self._handles: list[RemovableHandle] = []
        try:
            self._attach()
        except Exception:
            self._detach()
            raise

    def _attach(self) -> None:
        entry = RootEntryHook(self.model, self._before_root)
        self._handles.append(self.model.register_forward_pre_hook(entry, prepend=True))
        for name, module in self._modules.items():
            # The root's hook is also called when its forward raises: that batch has ended too.
            is_root = module is self.model
            hook = ForwardHook(module, name, self._after_root if is_root else self._after_module)
            self._handles.append(module.register_forward_hook(hook, always_call=is_root))
        if self._check == "step":
            self._handles.append(register_optimizer_step_pre_hook(lambda *_: self.check()))

    def check(self) -> None:
        """Wait for all numbers that are still on their way, and raise if one of them is bad.

        Those of a CUDA graph are on their way when its replay is among the work of the current stream.
        """
        with self._lock:
            self._settle(wait=True)
            self._settle_replays()

    def remove(self) -> None:
        """Detach from the model, then `check()`. Frames and counts stay; calling it again does nothing."""
        self._detach()
        self.check()

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._weights = None

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._detach()
        if error is None:
            self.check()
        else:
            with self._lock:
                self._explain(error)

    def _start_batch(self) -> None:
        self._weights = None
        self._batch_has_frames = False

    def _end_batch(self) -> None:
        self.batch_number += 1
        self._start_batch()

    def _root_calls(self) -> list[BaseException | None]:
        return self._root_calls_of.setdefault(threading.get_ident(), [])

    def _before_root(self) -> None:
        with self._lock:
            calls = self._root_calls()
            if calls:  # a root that calls itself, or one that a KeyboardInterrupt left without its hook
                running = calls_in_progress(self.model) - 1
                if running < len(calls):
                    del calls[running:]
                    self._end_batch()
            if self._check == "step":
                self._settle(wait=True)
            calls.append(sys.exc_info()[1])

    def _after_root(self, root: nn.Module, name: str, args: object, output: object) -> None:
        with self._lock:
            # Called because the forward raised, then in the handling of that exception; or else as any other hook.
            # There is no call to end where this monitor was attached during it, or where _before_root raised.
            calls, exception = self._root_calls(), sys.exc_info()[1]
            if exception is not None and exception is not (calls[-1] if calls else None):
                if calls:
                    self._explain(exception)
                    self._leave_root()
                    self._end_batch()
                return
            captured = self._record(root, name, args, output)
            traced = self.batch_number in self.trace_batch_nums
            self._leave_root()
            if captured is None:
                self._end_batch()
            else:  # nothing has run, so that no batch has ended
                captured.has_root = captured.is_complete = True
                self._start_batch()
            self._settle(wait=self._check != "step" or traced)

    def _leave_root(self) -> None:
        calls = self._root_calls()
        if calls:
            calls.pop()
        if not calls:
            del self._root_calls_of[threading.get_ident()]

    def _after_module(self, module: nn.Module, name: str, args: object, output: object) -> None:
        with self._lock:
            self._record(module, name, args, output)
            self._settle(wait=self._check == "module" or self.batch_number in self.trace_batch_nums)

    def _record(self, module: nn.Module, name: str, args: object, output: object) -> CapturedBatch | None:
        """Put a frame of this call in the queue; what it shows is read as it is now.

        While a CUDA graph is captured the call will be run with its replays: then it is put with those of the graph,
        which are returned.
        """
        graph = self._recorder.capture()
        captured = None if graph is None else self._captured_batch(graph)
        if self._weights is None or self._weights.graph != graph:
            self._weights = WeightPass(self._modules.values(), self._recorder, graph)
        values = [*module.named_parameters(recurse=False), *capture.inputs(args), *capture.outputs(output)]
        lines = [
            (label, self._weights.find(value) if isinstance(value, Tensor) else capture.stand_in(value))
            for label, value in values
        ]
        unread = [i for i, (_, place) in enumerate(lines) if place is None]
        measurement = measure(
            self._recorder, [value for i in unread if isinstance(value := values[i][1], Tensor)], graph
        )
        places = {i: Place(measurement, k) for k, i in enumerate(unread)}
        call = PendingFrame(
            self.batch_number,
            name,
            type(module).__name__,
            tuple((label, places[i] if place is None else place) for i, (label, place) in enumerate(lines)),
            starts_batch=not (self._batch_has_frames if captured is None else captured.calls),
        )
        if captured is not None:
            captured.calls.append(call)
        else:
            self._queue.append(call)
            self._batch_has_frames = True
            self.total_calls += 1
        return captured

    def _captured_batch(self, graph: int) -> CapturedBatch:
        """Where the calls that are captured now belong."""
        if not self._captured or self._captured[-1].is_complete or self._captured[-1].graph != graph:
            self._captured.append(CapturedBatch(graph))
        return self._captured[-1]

    def _settle(self, wait: bool) -> None:
        """Judge frames in the order in which they ran: all of them, or as far as their numbers are there."""
        if len(self._queue) > 1 and self._queue[-1].ready() and self._queue[-1].frame().bad_lines:
            wait = True  # it is bad, as is seen already: only what ran before it is still to be judged
        while self._queue and (wait or self._queue[0].ready()):
            self._judge(self._queue.popleft().frame())
        self._stop_after_last_batch()

    def _settle_replays(self) -> None:
        """Judge the last replay of each captured forward that has been replayed since this was done before."""
        for captured in self._captured:
            replays = captured.new_replays()
            if replays == 0:
                continue
            if captured.has_root:
                self.batch_number += replays - 1
            self._raised_in_batch = None
            for frame in captured.frames(self.batch_number):
                self.total_calls += replays
                self._judge(frame)
            if captured.has_root:
                self._end_batch()
        self._captured = [captured for captured in self._captured if not captured.is_over]
        self._stop_after_last_batch()

    def _stop_after_last_batch(self) -> None:
        if self.abort_after_batch_num is not None and self.batch_number > self.abort_after_batch_num:
            raise BatchLimitReached(self._style.aborted(self.batch_number, self.abort_after_batch_num))

    def _judge(self, frame: Frame) -> None:
        """Keep the frame, tell the sinks, and raise if it is bad."""
        traced = frame.batch_number in self.trace_batch_nums
        if traced:
            self.frames.clear()
        else:
            self.frames.append(frame)
        for sink in self._sinks:
            sink.frame(frame, traced)
        if frame.bad_lines:
            self.detected_overflow = True
            if not traced and frame.batch_number != self._raised_in_batch:
                self._raise(frame)

    def _raise(self, bad: Frame) -> NoReturn:
        report = Report(bad.batch_number, tuple(self.frames), bad)
        self.frames.clear()
        self._raised_in_batch = bad.batch_number
        # What ran after it in this batch worked on bad numbers.
        self._queue = deque(pending for pending in self._queue if pending.batch_number != bad.batch_number)
        if self.batch_number == bad.batch_number and not self._root_calls_of:
            self._end_batch()  # or else the root's hook does
        for sink in self._sinks:
            sink.report(report)
        raise NonFiniteError(self._style.detected(report), report.batch_number, report.frames)

    def _explain(self, exception: BaseException) -> None:
        """The numbers may have gone bad before something else raised: then that exception says so, too."""
        try:
            self._settle(wait=True)
        except NonFiniteError as found:
            exception.non_finite = found  # type: ignore[attr-defined]
            if hasattr(exception, "add_note"):  # from Python 3.11 on
                exception.add_note(str(found))
        except BatchLimitReached:
            pass

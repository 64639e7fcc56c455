"""Monitor: hooks on every module of a model, one frame a module call, a judgement of each."""

import sys
from collections import deque
from collections.abc import Collection, Iterable
from typing import NoReturn

from torch import Tensor, nn

from . import capture
from .errors import BatchLimitReached, NonFiniteError, warn_user
from .frames import Frame, Line
from .hooks import ForwardHook, RootEntryHook, calls_in_progress, is_watched
from .recorder import RecorderName, make_recorder
from .report import OwnStyle, Report, Style
from .sinks import Printer, Sink
from .stats import measure
from .validation import check_batch_numbers, check_model, check_optional_count
from .weights import WeightPass

__all__ = ["Monitor"]


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

    The monitor stays attached though nobody keeps it. Copies of the model, deep or pickled, are not watched.

    Cost: one pass over every tensor that is shown; on CUDA one launch and one wait a module call. All parameters are
    read together at the first call of a batch, and those that change before their module runs once more there.

    Args:
        model: any module without `nn.DataParallel` in it.
        max_frames_to_save: how many frames to keep for a report; None for all of them.
        trace_batch_nums: batches to print instead of judging them.
        abort_after_batch_num: raises `BatchLimitReached` when this batch has finished.
        recorder: "native", "torch", or "auto" for the first of the two that is usable.
        style: how things are worded.
        sinks: where frames and reports go; by default they are printed.

    Raises:
        TypeError, ValueError: an argument is not as told above. The model is untouched then.
        NonFiniteError, BatchLimitReached: in the forward of the watched model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_frames_to_save: int | None = 21,
        trace_batch_nums: Collection[int] = (),
        abort_after_batch_num: int | None = None,
        recorder: RecorderName = "auto",
        style: Style | None = None,
        sinks: Iterable[Sink] | None = None,
    ) -> None:
        self.model = check_model(model)
        self.trace_batch_nums = check_batch_numbers("trace_batch_nums", trace_batch_nums)
        self.abort_after_batch_num = check_optional_count("abort_after_batch_num", abort_after_batch_num)
        self.frames: deque[Frame] = deque(maxlen=check_optional_count("max_frames_to_save", max_frames_to_save))
        self.batch_number = 0
        self.total_calls = 0
        self.detected_overflow = False
        self._recorder = make_recorder(recorder)
        self._style = style or OwnStyle()
        self._sinks = list(sinks) if sinks is not None else [Printer(self._style)]
        self._root_calls: list[BaseException | None] = []  # the exception that was being handled when each began
        self._weights: WeightPass | None = None
        self._start_batch()

        if is_watched(model):
            warn_user(
                f"{type(model).__name__} is watched by another monitor already, and every tensor will be read once "
                "more; call remove() on the first one if that is not meant"
            )
        self._handles = [model.register_forward_pre_hook(RootEntryHook(model, self._before_root), prepend=True)]
        for name, module in model.named_modules():
            # The root's hook is also called when its forward raises: that batch has ended too.
            is_root = module is model
            hook = ForwardHook(module, name, self._after_root if is_root else self._after_module)
            self._handles.append(module.register_forward_hook(hook, always_call=is_root))

    def remove(self) -> None:
        """Detach from the model. Frames and counts stay; calling it again does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._weights = None

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _start_batch(self) -> None:
        self._weights = None
        self._batch_has_frames = False
        self._batch_has_raised = False

    def _end_batch(self) -> None:
        self.batch_number += 1
        self._start_batch()

    def _before_root(self) -> None:
        if self._root_calls:  # a root that calls itself, or one that a KeyboardInterrupt left without its hook
            running = calls_in_progress(self.model) - 1
            if running < len(self._root_calls):
                del self._root_calls[running:]
                self._end_batch()
        self._root_calls.append(sys.exc_info()[1])

    def _after_root(self, root: nn.Module, name: str, args: object, output: object) -> None:
        handled_before = self._root_calls.pop() if self._root_calls else None  # none: attached during the forward
        # Called because the forward raised, then in the handling of that exception; or else as any other hook.
        if sys.exc_info()[1] is not handled_before:
            self._end_batch()
            return
        frame = self._make_frame(root, name, args, output)
        already_raised = self._batch_has_raised
        self._end_batch()
        self._judge(frame, already_raised)

    def _after_module(self, module: nn.Module, name: str, args: object, output: object) -> None:
        self._judge(self._make_frame(module, name, args, output), self._batch_has_raised)

    def _make_frame(self, module: nn.Module, name: str, args: object, output: object) -> Frame:
        if self._weights is None:
            self._weights = WeightPass(self.model.modules(), self._recorder)
        values = [*module.named_parameters(recurse=False), *capture.inputs(args), *capture.outputs(output)]
        known = [self._weights.find(v) if isinstance(v, Tensor) else capture.stand_in(v) for _, v in values]
        unread = [v for (_, v), content in zip(values, known, strict=True) if content is None]
        read = iter(measure(self._recorder, [v for v in unread if isinstance(v, Tensor)]))
        lines = tuple(
            Line(label, next(read) if content is None else content)
            for (label, _), content in zip(values, known, strict=True)
        )
        frame = Frame(self.batch_number, name, type(module).__name__, lines, starts_batch=not self._batch_has_frames)
        self._batch_has_frames = True
        self.total_calls += 1
        return frame

    def _judge(self, frame: Frame, already_raised: bool) -> None:
        """Keep the frame, tell the sinks, and raise if it is bad or the last one wanted."""
        traced = frame.batch_number in self.trace_batch_nums
        if traced:
            self.frames.clear()
        else:
            self.frames.append(frame)
        for sink in self._sinks:
            sink.frame(frame, traced)
        if frame.bad_lines:
            self.detected_overflow = True
            if not traced and not already_raised:
                self._raise(frame)
        if self.abort_after_batch_num is not None and self.batch_number > self.abort_after_batch_num:
            raise BatchLimitReached(self._style.aborted(self.batch_number, self.abort_after_batch_num))

    def _raise(self, bad: Frame) -> NoReturn:
        report = Report(bad.batch_number, tuple(self.frames), bad)
        self.frames.clear()
        if self.batch_number == bad.batch_number:
            # The root's hook ends this batch; where the root is not running nothing else will.
            self._batch_has_raised = True
            if not self._root_calls:
                self._end_batch()
        for sink in self._sinks:
            sink.report(report)
        raise NonFiniteError(self._style.detected(report), report.batch_number, report.frames)

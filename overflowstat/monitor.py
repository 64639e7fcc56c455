"""Monitor: hooks on every module of a model, one frame a module call, a judgement of each."""

import os
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from . import capture
from .agreement import make_agreement
from .attachment import Attachment
from .calls import StageCall, stage_call
from .captured import CapturedBatch
from .compiled.calls import CompiledCalls
from .detections import Detection
from .dynamo import is_making_a_program, not_compiled
from .errors import AgreementError, BatchLimitReached, NonFiniteError, warn_user
from .frame_log import Counters
from .frames import Frame, Line
from .gradients import GradientWatch
from .headroom import Headroom, headroom_of
from .hooks import is_in_backward, is_watched
from .investigator import Investigator
from .judge import Judge
from .merge import MergedFrame, merge_frames
from .modules import ModuleTree
from .native_frame_log import make_frame_log
from .policy import Policy
from .recorder import NativeRecorder, Recorder, RecorderName, is_capturing, make_recorder
from .report import OwnStyle, Report, Style
from .reporter import ON_DETECT, OnDetect, Reporter
from .sinks import Printer, Sink
from .stats import tensor_stats
from .threads_in_root import ThreadsInRoot
from .trace_file import TraceFile
from .unseen import Unseen
from .validation import (
    check_batch_numbers,
    check_bool,
    check_methods,
    check_model,
    check_one_of,
    check_optional_bool,
    check_optional_count,
    check_optional_share,
    check_positive,
    check_tensor,
)
from .verdict import Verdict

__all__ = ["BatchEndsName", "CheckName", "Monitor", "OnDetect", "WeightsName"]

CheckName = Literal["module", "batch", "step"]
WeightsName = Literal["forward", "on_change"]
BatchEndsName = Literal["forward", "step"]
CHECKS = get_args(CheckName)
WEIGHTS = get_args(WeightsName)
BATCH_ENDS = get_args(BatchEndsName)


class Monitor:
    """Watches the numbers of a model and raises where they first go bad.

    After every module call the monitor reads the module's parameters, inputs and outputs, and keeps what it read as a
    `Frame`. The first frame that holds a NaN or an infinity ends the forward with `NonFiniteError`, after the
    last frames have been printed.

        >>> monitor = Monitor(model)  # watches until monitor.remove()
        >>> with Monitor(model):  # watches in this block
        ...     train()

    A *batch* is one forward of `model` itself, the root, or ends with `step()`; the first is number 0. Batches that are
    traced print every frame and never raise. A batch that raised, for whatever reason, has ended: the next forward
    starts the next one.

    What activation checkpointing runs once more in the backward is seen as frames that say so, and is part of no batch.

    A model that torch.compile compiles, or has compiled, is watched inside of its graphs (docs/compiled.md): they read
    what their modules are given and give, and are judged when they have ended.

    The monitor stays attached though nobody keeps it. Copies of the model, deep or pickled, are not watched.

    Threads may share the model. Calls that they make at once count as one batch up to the first that ends, of which one
    detection is told; it is raised on the thread on which the numbers went bad.

    A forward that is captured into a CUDA graph is watched in each replay: `check()` then judges the last one since it
    was called before, and counts all of them as batches. Call it on the stream that replays. Needs the extension.

    Cost: one pass over every tensor that is shown and was not read before in the batch (`reuse_unchanged`); on CUDA one
    launch a module call and at most one wait a batch (`check`). All parameters are read together at the first call of a
    batch, and those that change before their module runs once more there. `counters()` tells what it came to.

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
        reuse_unchanged: whether a tensor that is met again in a batch, the same object at the same version, as a
            module's output that is the next one's input, is shown as it was read. Not seen are writes that change no
            version: through `.data`, NumPy, raw kernels, in-place collectives. By default on where there is no
            torch.distributed.
        weights: "forward": read once a batch. "on_change": only those whose version or storage has changed, and all
            after an optimizer step; for generation, where weights would be most of what is read.
        every_n: watch one batch in so many, and those that are traced.
        batch_ends: "forward": with each forward of `model`, and with `step()`. "step": with `step()` alone, or where
            the forward raises; for training steps that call the model several times, or other modules after it.
        nested: see keyword inputs, as `input[name]`, and what is inside of lists, dicts, dataclasses, `ModelOutput`,
            caches of keys and values, and other structures that torch knows: `output[logits]`, `output.field`,
            `input[past].layers[3].keys`. A thousand values of each, eight levels deep; a line says what was left out.
            Also weights that are no parameters any more, and, as `out_proj.weight`, those of a child that has never
            been called, since its parent may use them itself.
        buffers: show a module's buffers as its weights are shown, running statistics for one.
        gradients: also see gradients: those that reach what modules give, and what they take from elsewhere than a
            module, as they come in the backward, and those of all weights when it ends; as frames of lines `grad
            output`, `grad input[0]`, `grad weight`. The first bad one in this order ends the backward, or where numbers
            come late, is raised at its end; with a verdict which module's backward made it, why where the numbers prove
            it, and in torch's anomaly mode by which operation, of which line of the forward (with `check_nan=False`, or
            torch raises first). Where `torch.amp.GradScaler` has multiplied the loss, the report tells that it will
            skip the step and nothing is raised, unless an optimizer takes it all the same. `check` and all that follows
            hold for these, too. Nothing in the graph is changed, and no tensor kept. Not seen are backwards in CUDA
            graphs, what `torch.autograd.grad` gives of weights, and of a module's output that is a view, and is later
            written to, the gradient before that. Cost: a pass over each gradient, and a third of a millisecond of
            Python a module call; in anomaly mode a pass over what each node makes and gets, and a wait for it.
        policy: what is watched, and where numbers that are not finite are meant.
        on_detect: "raise" a `NonFiniteError`; "warn" and go on, once for each place, with a count of the batches that
            first went bad there when the monitor is removed; or call this with the `Report`, once for each place, whose
            exceptions reach the caller of the model. Later frames of a batch that went bad are not reported.
        max_reports: how many reports go to the sinks at most; None for all.
        agree: where several ranks run, have all of them raise at the end of the same batch, what was found first in the
            order of execution, so that none waits for one that has raised; each must run as many batches. No collective
            is issued: the ranks meet at the store by which they found each other, once a batch that is watched (with
            `gradients` also before the next forward, unless `step()` ends batches), for less than a millisecond beyond
            the wait for the last one. A number is how many seconds that may take; True is 600. Needs `check="batch"`
            and `on_detect="raise"`.
        group: the ranks that agree, or are merged; None for all. Those of a report are those of the default group.
        verdict: say of a detection which module made the numbers, and why, in the report, the exception and its
            attribute `verdict`.
        drill: for that, run the forward that made them once more, which tells the operation and the line: that of the
            smallest module in progress that was given finite numbers, or else of the whole model. The user's code runs
            twice then, with the same random numbers if it is the whole; tensors that it writes to are put back, other
            objects are not, and where it is given some that it may write to, as a cache, it is not run. By default on
            where only one process runs.
        warn_at: warn, once for each place, where the largest finite magnitude is this share of its dtype's limit or
            more (above 0, at most 1), before anything is inf. Costs one compare a line. Not of integers, nor of lines
            for which the policy allows anything; a mask of the lowest finite number is one to exclude or allow.
        detail: also count zeros and subnormals and find the smallest magnitude that is not 0, in the same pass, and
            show them at the end of a line, as "(50 % zero, 12 % subnormal, smallest 5.96e-08)"; and warn, once for each
            place, where half or more of what is not zero is subnormal in its dtype, so that the tensor underflows as a
            whole; of gradients, too. Not of lines for which the policy allows anything. In host memory it costs nothing
            where all is normal, and up to as much again where zeros or subnormals are many. A recorder of
            your own needs a method detailed().
        style: how things are worded.
        sinks: where frames and reports go; by default they are printed. One that has an attribute `every_frame` which
            is true is given all frames, others those that are traced or bad. See `overflowstat.sinks`.
        trace_file: also write all frames and reports to this file, or to the next name that is free, see `TraceFile`;
            the attribute `trace_file` tells which one it is.

    Raises:
        TypeError, ValueError: an argument is not as told above. The model is untouched then.
        TraceError: `trace_file` cannot be written. Likewise.
        AgreementError: with `agree`, at the end of a batch: a rank did not come to it in time, or left it by an
            exception of its own, or the group was destroyed.
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
        reuse_unchanged: bool | None = None,
        weights: WeightsName = "forward",
        every_n: int = 1,
        batch_ends: BatchEndsName = "forward",
        nested: bool = True,
        buffers: bool = False,
        gradients: bool = False,
        policy: Policy | None = None,
        on_detect: OnDetect = "raise",
        max_reports: int | None = None,
        agree: bool | float = False,
        group: "dist.ProcessGroup | None" = None,
        verdict: bool = True,
        drill: bool | None = None,
        warn_at: float | None = None,
        detail: bool = False,
        style: Style | None = None,
        sinks: Sequence[Sink] | None = None,
        trace_file: str | os.PathLike[str] | None = None,
    ) -> None:
        for sink in sinks or ():
            check_methods("sinks", sink, Sink)
        if style is not None:
            check_methods("style", style, Style)
        self.model = check_model(model)
        self.trace_batch_nums = check_batch_numbers("trace_batch_nums", trace_batch_nums)
        self.abort_after_batch_num = check_optional_count("abort_after_batch_num", abort_after_batch_num)
        self.batch_number = 0
        self._keep = check_optional_count("max_frames_to_save", max_frames_to_save)
        self._check = check_one_of("check", check, CHECKS)
        self._reuse = check_optional_bool("reuse_unchanged", reuse_unchanged)
        self._weights = check_one_of("weights", weights, WEIGHTS)
        self._every_n = check_positive("every_n", every_n)
        self._forward_ends_batch = check_one_of("batch_ends", batch_ends, BATCH_ENDS) == "forward"
        if policy is not None and not isinstance(policy, Policy):
            raise TypeError(f"policy={policy!r}: must be an overflowstat.Policy, not {type(policy).__name__}")
        self._style = style or OwnStyle()
        self._reporter = Reporter(
            self._style,
            list(sinks) if sinks is not None else [Printer(self._style)],
            on_detect if callable(on_detect) else check_one_of("on_detect", on_detect, ON_DETECT),
            check_optional_count("max_reports", max_reports),
        )
        warn_at, detail = check_optional_share("warn_at", warn_at), check_bool("detail", detail)
        self._group = group
        self._agreement = make_agreement(self.model, agree, group)
        if self._agreement is not None and (self._check != "batch" or not self._reporter.raises):
            raise ValueError(f'agree={agree!r}: needs check="batch" and on_detect="raise"')
        recorder = make_recorder(recorder, detail)
        drill = check_optional_bool("drill", drill)
        self._investigator = (
            Investigator(model, recorder, drill, self._every_n) if check_bool("verdict", verdict) else None
        )
        self._lock = threading.RLock()  # hooks of several threads share all that follows
        self._in_root = ThreadsInRoot(model)
        self._captured: list[CapturedBatch] = []
        self._captured_calls = 0
        self._is_dry_run = self._has_told_of_programs = False

        if is_watched(model):
            warn_user(
                f"{type(model).__name__} is watched by another monitor already, and every tensor will be read once "
                "more; call remove() on the first one if that is not meant"
            )
        self._log = make_frame_log(
            recorder,
            self._keep,
            nested=check_bool("nested", nested),
            buffers=check_bool("buffers", buffers),
            policy=policy,
            warn_at=warn_at,
        )
        self._judge = Judge(
            model,
            self._log,
            self._in_root,
            self._reporter,
            investigator=self._investigator,
            agreement=self._agreement,
            keep=self._keep,
            warn_at=warn_at,
            detail=detail,
            is_traced=lambda batch_number: batch_number in self.trace_batch_nums,
            apart=self._apart,
            end_batch=self._end_bad_batch,
        )
        self._sees: dict[str, Any] = {"recorder": recorder, "nested": nested, "buffers": buffers, "policy": policy}
        self._modules = ModuleTree(model, policy.watches if policy is not None else lambda name, module: True)
        self._unseen = Unseen(self._modules)
        self._gradients: GradientWatch | None = None
        if check_bool("gradients", gradients):
            self._gradients = GradientWatch(self, self._modules, recorder, policy, self._keep, self._lock)
        self._compiled = CompiledCalls(
            self._modules, self._log, self._after_module, nested, isinstance(recorder, NativeRecorder), self._lock
        )
        self._attachment = Attachment(
            self._modules,
            self._log,
            before_root=self._before_root,
            after_root=self._after_root,
            after_module=self._after_module,
            before_step=self._before_optimizer_step,
            after_step=self._after_optimizer_step if self._weights == "on_change" else None,
            compiled=self._compiled,
            gradients=self._gradients,
        )
        self._trace_file = None if trace_file is None else TraceFile(trace_file)
        if self._trace_file is not None:
            self._reporter.add(self._trace_file)
        self._reporter.begin(type(model).__name__)
        self._start_batch()
        self.enable()
        if isinstance(recorder, NativeRecorder):
            recorder.prepare({device for module in self._modules.numbers for device in capture.devices(module)})

    @property
    def detected_overflow(self) -> bool:
        """Whether anything bad was ever seen, in a traced batch too."""
        return self._judge.has_seen_bad

    @property
    def frames(self) -> deque[Frame]:
        """The frames that the next report would show; at most `max_frames_to_save`."""
        return deque(self._log.kept(), self._keep)

    @property
    def total_calls(self) -> int:
        """Module calls seen."""
        return self._log.calls + self._captured_calls

    @property
    def detections(self) -> list[Detection]:
        """What was detected, each place once, with the number of batches in which it was the first that was bad."""
        return self._reporter.detections.all()

    @property
    def trace_file(self) -> str | None:
        """The file that frames are written to; None if they are not."""
        return None if self._trace_file is None else self._trace_file.path

    def counters(self) -> Counters:
        """What watching has cost so far; of gradients `tensors` and `bytes_read` only."""
        found, gradients = self._log.counters(), self._gradients
        if gradients is None:
            return found
        return found._replace(
            tensors=found.tensors + gradients.tensors, bytes_read=found.bytes_read + gradients.bytes_read
        )

    def headroom(self) -> Headroom:
        """Of the kept frames, the lines that are nearest to the limit of their dtype; `print` it for a table."""
        return headroom_of(self._log.kept())

    def enable(self) -> None:
        """Attach to the model again after `disable()`; does nothing if it is attached."""
        self._attachment.attach()

    def disable(self) -> None:
        """Detach from the model until `enable()`: no hook of this monitor is left, and the model costs what it did.

        Numbers that are still on their way are judged as ever. A forward in progress is seen up to here.
        """
        self._attachment.detach()

    def forget_weights(self) -> None:
        """Have all weights read again, with `weights="on_change"`: they were written to by what changes no version,
        as `weight.data.copy_(...)` does."""
        self._log.forget_weights()

    def check(self) -> None:
        """Wait for all numbers that are still on their way, and raise if one of them is bad.

        Those of a CUDA graph are on their way when its replay is among the work of the current stream.
        """
        with self._lock:
            self._collect_compiled()
            self._settle(wait=True)
            self._settle_replays()
            if self._gradients is not None:
                self._gradients.settle()
            self._unseen.tell_of_idle_root(self._log.calls)
            self._tell_of_unseen()
            self._reporter.flush()
            if self._agreement is not None and (found := self._agreement.take()) is not None:
                raise found

    def step(self) -> None:
        """End a batch where the model's own forward is not what is called: a training step calls its children, or the
        model is an `nn.ModuleList` of several.

        Does nothing if no module was called since the last batch ended, as after a forward of the model itself. Raises
        as the end of that does.
        """
        with self._lock:
            self._end_step()
            self._tell_of_unseen()

    def _end_step(self) -> None:
        """As `step` does, also where it is no wonder that no module has been called yet, as before a training."""
        with self._lock:
            self._unseen.something_ends_batches()
            self._collect_compiled()
            if self._log.is_begun and not is_capturing():
                traced, ended = self._is_traced, self.batch_number
                self._end_batch()
                self._settle(wait=self._check != "step" or traced, ended=ended)
                self._reporter.flush()
            self._attachment.follow_changes()
            self._configure_batch()

    def judge(self, name: str, tensor: Tensor) -> bool:
        """Judge a tensor that no module gave, as a loss that was computed outside of the model.

        It is the line `value` of a frame with this name, the last of the batch that runs, or else of the one that ended
        last, watched or not. What is detected is told and raised as ever, once a batch. No policy allows it anything.

        Returns whether it holds a NaN or an infinity. Cost: a pass over it, and on CUDA a wait for it.
        """
        with self._lock:
            self._settle(wait=True)
            number = max(0, self.batch_number - (not self._log.is_begun))
            line = Line("value", tensor_stats(check_tensor("tensor", tensor)))
            frame = Frame(number, name, type(tensor).__name__, (line,), starts_batch=False)
            if self._judge.apart_from_modules(frame):
                kept = self._log.kept()
                before = kept if self._keep is None else kept[max(0, len(kept) + 1 - self._keep) :]
                if self._judge.raises_at_once and self._log.is_begun:
                    self._end_batch()
                self._judge.report(frame, before, tensor, None, may_raise=True)
            return line.is_bad

    def merge(self, frames: Sequence[Frame] | None = None) -> list[MergedFrame]:
        """Frames of all ranks of `group`, each of which calls this: a line is what all of them hold together, as the
        shards of a weight, or a batch that is split, and names the ranks on which it is bad.

        Args:
            frames: as those of an error, or that a sink was given; by default the `frames` that are kept.

        Cost: see `merge_frames`.
        """
        return merge_frames(list(self.frames) if frames is None else frames, self._group)

    def drill(self, *args: Any, **kwargs: Any) -> Verdict | None:
        """Run the model on a batch, judge every module as it is called, and say what makes numbers bad; None if all
        are finite.

        For what was found too late to be run again, as with `check="step"`. No gradients are recorded, and nothing is
        counted or told to the sinks; but the user's code runs, and what it changes stays changed. Raises what it
        raises.
        """
        found: list[Report] = []
        is_attached = self._attachment.is_attached
        self.disable()
        try:
            with torch.no_grad(), self._another(found.append):
                self.model(*args, **kwargs)
        finally:
            if is_attached:
                self.enable()
        return found[0].verdict if found else None

    def _another(self, on_detect: OnDetect) -> "Monitor":
        """That sees the same of the model, and judges each module as it is called."""
        return Monitor(self.model, check="module", drill=True, on_detect=on_detect, sinks=[], **self._sees)

    def remove(self) -> None:
        """Detach from the model, `check()`, and end what sinks write. Frames and counts stay.

        Calling it again does nothing.
        """
        is_attached = self._attachment.is_attached
        self._attachment.detach()
        try:
            self.check()
        finally:
            with self._lock:
                self._reporter.close()
        if is_attached and self._agreement is not None:
            self._agreement.leave(self.batch_number, "monitor.remove()")
        if is_attached:
            self._unseen.tell_of_modules(self.total_calls)
        repeated = [detection.text for detection in self.detections if detection.batches > 1]
        if is_attached and repeated and self._reporter.warns:
            warn_user("bad numbers were met again in " + "; ".join(repeated))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A model may hold its monitor: its copies, deep or pickled, are not watched, and have None in its place."""
        return type(None), ()

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.remove()
        else:
            self._attachment.detach()
            with self._lock:
                try:
                    self._explain(error)
                finally:
                    self._reporter.close()

    def _before_optimizer_step(self, optimizer: Optimizer) -> None:
        with self._lock:
            if self._check == "step":
                self._collect_compiled()
                self._settle(wait=True)
                self._settle_replays()
            if self._gradients is not None:
                self._gradients.before_step(optimizer)
            self._reporter.flush()
            self._unseen.tell_of_idle_root(self._log.calls)
            self._unseen.tell_of_trained_modules(self.total_calls, optimizer)

    def _after_optimizer_step(self, optimizer: Optimizer) -> None:
        self.forget_weights()

    def _start_batch(self) -> None:
        self._log.start_batch(self.batch_number, keep_weights=self._weights == "on_change")
        self._configure_batch()

    def _configure_batch(self) -> None:
        """By what may have been changed since the one before ended."""
        self._is_traced = self.batch_number in self.trace_batch_nums
        self._log.configure(
            is_watching=self._is_traced or self.batch_number % self._every_n == 0,
            is_told=self._is_traced or self._reporter.tells_all,
            always_look=self._is_traced or self._check == "module",
            reuse=not (dist.is_available() and dist.is_initialized()) if self._reuse is None else self._reuse,
        )

    def _end_batch(self) -> None:
        self.batch_number += 1
        self._start_batch()

    def _before_root(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        if is_in_backward():
            return
        called_as = stage_call()
        if called_as is StageCall.STAGE and self._agreement is not None and self._forward_ends_batch:
            raise AgreementError(
                "stages of a pipeline cannot agree after each forward, whose end the next stage waits for: "
                'Monitor(..., agree=True, batch_ends="step"), and monitor.step() after schedule.step(...)'
            )
        is_written_down = is_making_a_program()
        if called_as is StageCall.SHAPES or is_written_down:
            if is_written_down and not self._has_told_of_programs:
                self._has_told_of_programs = True
                name = type(self._modules.root).__name__
                warn_user(
                    f"what torch.export, make_fx or AOTAutograd makes of {name} is not watched; what "
                    "torch.export.unflatten makes of an exported program can be"
                )
            self._is_dry_run = True
            self._log.configure(is_watching=False, is_told=False, always_look=False, reuse=False)
            return
        self._is_dry_run = False  # an export that raises does not call the hook that ends it
        with self._lock:
            self._unseen.something_ends_batches()
            self._in_root.forget_told()
            if self._in_root.is_in_one:
                if self._in_root.drop_left():
                    self._end_batch()
            else:
                self._attachment.follow_changes()
                self._configure_batch()
                self._compiled.begin_batch()
            if self._check == "step":
                self._settle(wait=True)
                if self._gradients is not None:
                    self._gradients.settle(only_ended=True)
            if self._agreement is not None and not self._in_root.is_in_one:
                self._agreement.begin_batch()
            if not self._in_root.is_in_one and self._investigator is not None:
                self._investigator.root_begins(self.batch_number, args, kwargs)
            self._in_root.begin()

    def _after_root(self, root: nn.Module, args: object, kwargs: Mapping[str, object], output: object) -> None:
        if self._is_dry_run:
            self._is_dry_run = False
            self._configure_batch()
            return
        with self._lock:
            # Called because the forward raised, then in the handling of that exception; or else as any other hook.
            # There is no call to end where this monitor was attached during it, or where _before_root raised.
            exception = sys.exc_info()[1]
            if is_in_backward():
                # Checkpointing ends a recompute by an exception of its own, when it has what it wants.
                if exception is None and self._log.call(0, root, args, kwargs, output):
                    self._after_module()
                return
            if exception is not None and self._in_root.was_raised_in_one(exception):
                if self._in_root.is_in_one:
                    self._compiled.root_raised(self.batch_number)
                    try:
                        self._explain(exception)
                    finally:
                        self._in_root.end()
                        self._end_batch()
                        self._forget_root_call()
                return
            captured, traced, ended = None, self._is_traced, None
            if self._compiled.root_was_called(self.batch_number):
                self._unseen.modules_were_told_of()
            calls_before = self._log.calls
            try:
                self._log.call(0, root, args, kwargs, output)
                self._unseen.root_was_called(self._log.calls - calls_before)
                captured = self._take_captured()
            finally:
                self._in_root.end()
                if captured is None:
                    if self._forward_ends_batch:
                        ended = self.batch_number
                        self._end_batch()
                else:  # nothing has run, so that no batch has ended
                    captured.has_root = captured.is_complete = True
                    self._start_batch()
            try:
                self._settle(wait=self._check != "step" or traced, ended=ended)
            finally:
                self._forget_root_call()
                self._reporter.flush()

    def _forget_root_call(self) -> None:
        """That has ended on this thread, and is judged."""
        self._in_root.forget_told()
        if self._investigator is not None:
            self._investigator.root_ends()

    @not_compiled
    def _after_module(self) -> None:
        """There are calls to look at."""
        with self._lock:
            self._take_captured()
            self._settle(wait=self._check == "module" or self._is_traced)

    def _take_captured(self) -> CapturedBatch | None:
        """Put calls that were captured into a CUDA graph, and will run in its replays, with the others of the graph.

        Gives those of the last one.
        """
        batch = None
        while (found := self._log.take_captured()) is not None:
            graph, call = found
            if not self._captured or self._captured[-1].is_complete or self._captured[-1].graph != graph:
                self._captured.append(CapturedBatch(graph))
            batch = self._captured[-1]
            batch.calls.append(call)
        return batch

    def _settle(self, wait: bool, ended: int | None = None) -> None:
        """Judge frames in the order in which they ran: all of them, or as far as their numbers are there.

        Where that ends a batch, it has this number.
        """
        self._judge.look_at_what_was_left()
        wait = wait and not is_capturing()  # when nothing may be waited for
        while (frame := self._log.next(wait)) is not None:
            self._judge.frame(frame)
        if self._agreement is not None and ended is not None and ended % self._every_n == 0:
            # Where step() ends batches it comes after the backward; and the next forward of a pipeline's stage is what
            # another stage waits for.
            follow = self._gradients is not None and self._forward_ends_batch
            self._agreement.end_batch(gradients_follow=follow)
        self._stop_after_last_batch()

    def _collect_compiled(self) -> None:
        """What graphs have left that no module call was around: compiled functions that call modules of the model, and
        replays of a CUDA graph that they are in."""
        if not self._in_root.is_in_one:
            if self._compiled.collect(0):
                self._after_module()
            self._compiled.tell(self.batch_number)

    def _tell_of_unseen(self) -> None:
        """What was captured is seen when it is replayed."""
        if self._attachment.is_attached and not self._in_root.is_in_one and not self._captured:
            self._unseen.tell_of_modules(self.total_calls)

    def _settle_replays(self) -> None:
        """Judge the last replay of each captured forward that has been replayed since this was done before."""
        for batch in self._captured:
            replays, calls = batch.new_replays()
            if replays == 0:
                continue
            if batch.has_root:
                self.batch_number += replays - 1
            self._judge.next_replay()
            for call in calls:
                self._captured_calls += replays
                self._judge.frame(self._log.judge_captured(call, self.batch_number, call is batch.calls[0]))
            if batch.has_root:
                self._end_batch()
        self._captured = [batch for batch in self._captured if not batch.is_over]
        self._stop_after_last_batch()

    def _stop_after_last_batch(self) -> None:
        if self.abort_after_batch_num is not None and self.batch_number > self.abort_after_batch_num:
            raise BatchLimitReached(self._style.aborted(self.batch_number, self.abort_after_batch_num))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """In which nothing that runs is watched."""
        self._log.configure(is_watching=False, is_told=False, always_look=False, reuse=False)
        try:
            yield
        finally:
            self._configure_batch()

    def _end_bad_batch(self, number: int) -> None:
        if self.batch_number == number:
            self._end_batch()

    def _gradient_batch(self, has_run: bool) -> int | None:
        """For gradients.py, as those that follow: see there."""
        number = self.batch_number - (has_run and not self._log.is_begun)
        if self._is_dry_run:
            return None
        return number if number in self.trace_batch_nums or number % self._every_n == 0 else None

    def _waits_for_gradients(self, batch_number: int, at_end: bool) -> bool:
        is_traced = batch_number in self.trace_batch_nums
        return is_traced or self._check == "module" or (at_end and self._check == "batch")

    def _tells_all_gradients(self, batch_number: int) -> bool:
        return self._judge.wants_all or batch_number in self.trace_batch_nums

    def _judge_gradient(self, frame: Frame) -> bool:
        return self._judge.apart_from_modules(frame)

    def _detect_gradient(
        self, bad: Frame, before: list[Frame], tensor: Tensor | None, verdict: Verdict | None, is_skipped: bool
    ) -> None:
        self._judge.report(bad, before, tensor, verdict, may_raise=not is_skipped)

    def _explain(self, exception: BaseException) -> None:
        """The numbers may have gone bad before something else raised: then that exception says so, too."""
        try:
            self._settle(wait=True)
            if self._gradients is not None:
                self._gradients.settle()
        except NonFiniteError as found:
            _note(exception, found)
        except BatchLimitReached:
            pass
        if self._agreement is not None:
            reason = f"{type(exception).__name__}: {exception}".partition("\n")[0]
            kept = self._agreement.leave(self.batch_number, reason)
            if kept is not None:
                _note(exception, kept)
        self._reporter.flush()


def _note(exception: BaseException, found: NonFiniteError) -> None:
    exception.non_finite = found  # type: ignore[attr-defined]
    if hasattr(exception, "add_note"):  # from Python 3.11 on
        exception.add_note(str(found))

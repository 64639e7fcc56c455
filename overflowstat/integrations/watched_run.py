"""One monitor for one training run, told by the trainer's events which step its batches are part of."""

from __future__ import annotations

import inspect
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..detections import Detection
from ..errors import warn_user
from ..frames import Frame
from ..monitor import BatchEndsName, Monitor
from ..report import OwnStyle, Report, Style
from ..sinks import Sink
from ..validation import check_batch_numbers, check_bool, check_methods, check_optional_positive, check_positive

__all__ = ["BadLoss", "RunOptions", "WatchedRun", "WatchesRuns", "check_options"]

PHASES_KEPT = 16  # numbers are judged one step late at most


class BadLoss(NamedTuple):
    """The first loss of a run that was not finite."""

    step: int
    """The optimizer's, the first one being 1."""
    value: float


@dataclass(frozen=True)
class RunOptions:
    """What the callbacks take, checked as far as that goes without a model.

    Raises:
        TypeError, ValueError: an argument is not as told, or `monitor` has one that `Monitor` does not know or take.
    """

    trace_steps: Collection[int]
    """Optimizer steps whose batches are traced, by the trainer's `global_step` after them: the first one is 1."""
    stop_at_step: int | None
    """End the training after this one, as the trainer itself would."""
    evaluation: bool
    """Whether forwards of an evaluation are watched."""
    check_loss: bool
    """Whether the loss of each step is judged."""
    monitor: dict[str, Any]
    """Options of `Monitor`."""

    def __post_init__(self) -> None:
        if not isinstance(self.trace_steps, Collection) or isinstance(self.trace_steps, (str, bytes)):
            raise TypeError(f"trace_steps={self.trace_steps!r}: must be a list of steps")
        for step in self.trace_steps:
            check_positive("trace_steps: step", step)
        check_optional_positive("stop_at_step", self.stop_at_step)
        check_bool("evaluation", self.evaluation)
        check_bool("check_loss", self.check_loss)
        check_options("OverflowStatCallback", Monitor, self.monitor)
        for sink in self.monitor.get("sinks") or ():
            check_methods("sinks", sink, Sink)
        # Of a module that nothing is known of, and without what would write to a file. It is not removed, which other
        # ranks would be told.
        Monitor(nn.Identity(), **{**self.monitor, "sinks": [], "trace_file": None}).disable()

    def is_over(self, steps: int) -> bool:
        """Whether training ends after so many."""
        return self.stop_at_step is not None and steps >= self.stop_at_step


def check_options(name: str, taker: Callable[..., object], options: dict[str, Any]) -> None:
    """Raises TypeError, as a call of `name` would, for what is no argument of `taker`, or its first one."""
    known = list(inspect.signature(taker).parameters)[1:]
    for option in options:
        if option not in known:
            raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")


class WatchedRun:
    """Watches a model until it ends.

    Args:
        model: what is watched.
        options: of the callback.
        batch_ends: of a monitor that is not told otherwise.

    Attributes:
        monitor: of this run alone.
        first_bad_loss: None as long as each was finite.

    Raises:
        TypeError, ValueError: see `Monitor`.
    """

    def __init__(self, model: nn.Module, options: RunOptions, batch_ends: BatchEndsName) -> None:
        self._options = options
        self._step = 0
        self._phases = _Phases()
        self._traced = _TracedBatches(
            check_batch_numbers("trace_batch_nums", options.monitor.get("trace_batch_nums", ()))
        )
        self.first_bad_loss: BadLoss | None = None
        arguments = {"batch_ends": batch_ends, **options.monitor, "trace_batch_nums": self._traced}
        arguments["style"] = _StyleWithPhase(options.monitor.get("style") or OwnStyle(), self._phases)
        self._step_ends_batch = arguments["batch_ends"] == "step"
        self.monitor = Monitor(model, **arguments)

    @property
    def detections(self) -> list[Detection]:
        return self.monitor.detections

    def begin_step(self, step: int) -> None:
        """What follows is part of this optimizer step, of which it may be another batch."""
        self._step = step
        if not self._options.evaluation:
            self.monitor.enable()
        self._begin(f"{step}, training", step in self._options.trace_steps)

    def begin_evaluation(self, what: str, steps: int) -> None:
        """What follows, until the next step begins, is an evaluation after so many, called `what`."""
        self._begin(f"{what} after step {steps}" if steps else f"{what} before step 1", False)
        if not self._options.evaluation:
            self.monitor.disable()

    def end_batch(self) -> None:
        """For a monitor that has to be told."""
        if self._step_ends_batch:
            self.monitor.step()

    def _begin(self, phase: str, is_traced: bool) -> None:
        self._end_step()  # if modules were called since that is over
        batch = self.monitor.batch_number
        self._phases.begin(batch, phase)
        self._traced.switch(batch, is_traced)
        self._end_step()  # which makes the monitor look whether the next one is traced

    def _end_step(self) -> None:
        """As `end_batch`, where nothing need have been called."""
        if self._step_ends_batch:
            self.monitor._end_step()

    def see_loss(self, loss: object) -> None:
        """Judge the loss of the batch that runs, or else of the one that ended last; what is no tensor is none.

        Told as a detection if no module of the batch gave bad numbers, which then raises as others do; or else, the
        first time, by a warning that names the step. Cost: on CUDA a wait.
        """
        if not self._options.check_loss or not isinstance(loss, Tensor):
            return
        loss = loss.detach()
        value = float(loss.double().sum())
        is_first = self.first_bad_loss is None and not math.isfinite(value)
        if is_first:
            self.first_bad_loss = BadLoss(self._step, value)
        told = len(self.detections)
        self.monitor.judge("loss", loss)
        if is_first and len(self.detections) == told:
            warn_user(f"the loss is {value}, for the first time, in step {self._step}")

    def end(self, error: BaseException | None) -> None:
        """Detach from the model, and judge what still is to be: raises, or where there is an exception, adds to it."""
        self.monitor.__exit__(type(error), error, None)


class WatchesRuns:
    """What the callbacks have in common: the same arguments, and one run at a time.

    Args:
        trace_steps, stop_at_step, evaluation, check_loss: see `RunOptions`.
        options: all those of `Monitor`.
    """

    def __init__(
        self,
        *,
        trace_steps: Collection[int] = (),
        stop_at_step: int | None = None,
        evaluation: bool = True,
        check_loss: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self._options = RunOptions(trace_steps, stop_at_step, evaluation, check_loss, options)
        self._run: WatchedRun | None = None
        self._detections: list[Detection] = []
        self._first_bad_loss: BadLoss | None = None

    @property
    def monitor(self) -> Monitor | None:
        """Of the run in progress, if one is."""
        return None if self._run is None else self._run.monitor

    @property
    def detections(self) -> list[Detection]:
        """Of that, or else of the last run; see `Monitor`."""
        return self._detections if self._run is None else self._run.detections

    @property
    def first_bad_loss(self) -> BadLoss | None:
        """Of that, or else of the last run."""
        return self._first_bad_loss if self._run is None else self._run.first_bad_loss

    def _end_run(self, error: BaseException | None = None) -> None:
        """If there is one."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.end(error)
        finally:
            self._detections, self._first_bad_loss = run.detections, run.first_bad_loss

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": None}  # a copy watches nothing


class _Phases:
    """Which batches are part of what."""

    def __init__(self) -> None:
        self._begun: deque[tuple[int, str]] = deque(maxlen=PHASES_KEPT)

    def begin(self, batch_number: int, phase: str) -> None:
        """From this batch on."""
        if not self._begun or self._begun[-1][1] != phase:
            self._begun.append((batch_number, phase))

    def of(self, batch_number: int) -> str:
        """ "" where it is not known."""
        return next((phase for begin, phase in reversed(self._begun) if begin <= batch_number), "")


class _TracedBatches(Collection[int]):
    """Those that were asked for by number, and all of each step that is traced."""

    def __init__(self, asked_for: Collection[int]) -> None:
        self._asked_for = asked_for
        self._ranges: list[range] = []

    def switch(self, batch_number: int, is_traced: bool) -> None:
        """From this batch on, all are traced, or only those that were asked for."""
        if self._ranges and self._ranges[-1].stop == sys.maxsize:
            self._ranges[-1] = range(self._ranges[-1].start, batch_number)
        if is_traced:
            self._ranges.append(range(batch_number, sys.maxsize))

    def __contains__(self, number: object) -> bool:
        return number in self._asked_for or any(number in batches for batches in self._ranges)

    def __iter__(self) -> Iterator[int]:
        return iter(self._asked_for)

    def __len__(self) -> int:
        return len(self._asked_for)


class _StyleWithPhase:
    """Another style, whose reports end with the step."""

    def __init__(self, style: Style, phases: _Phases) -> None:
        self._style = style
        self._phases = phases

    def notices(self, frame: Frame) -> list[str]:
        return self._style.notices(frame)

    def frame(self, frame: Frame) -> str:
        return self._style.frame(frame)

    def report(self, report: Report) -> str:
        return self._with_phase(self._style.report(report), report)

    def detected(self, report: Report) -> str:
        return self._with_phase(self._style.detected(report), report)

    def aborted(self, batches: int, limit: int) -> str:
        return self._style.aborted(batches, limit)

    def _with_phase(self, text: str, report: Report) -> str:
        if not (phase := self._phases.of(report.batch_number)):
            return text
        words = text.rstrip("\n")
        return f"{words}\n  {'step':<10}  {phase}{text[len(words) :]}"

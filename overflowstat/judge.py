"""What becomes of a frame: the sinks are told, and where it is bad the cause is looked for, reported and raised."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from .agreement import Agreement
from .detections import Found
from .frame_log import FrameLog
from .frames import Frame
from .investigator import Investigator
from .near import NearLimit
from .origin import first_judged
from .ranks import Process
from .recorder import is_capturing
from .report import Report
from .reporter import Reporter
from .subnormal import Subnormals
from .threads_in_root import ThreadsInRoot
from .verdict import Verdict
from .wholly_bad import wholly_bad_rows

__all__ = ["Judge"]


class Judge:
    """Of one monitor, in whose lock it is called. A batch that went bad is told of once.

    Args:
        model: for the device that a report names.
        log: where the frames come from.
        in_root: threads that are in a call of the model.
        reporter: tells what is found.
        investigator: finds the cause; None where nobody asks.
        agreement: keeps what is to be raised until all ranks are told; None where it is raised at once.
        keep: how many frames a report has; None for all.
        warn_at: see `NearLimit`.
        detail: whether to warn of what is mostly subnormal.
        is_traced: whether a batch of this number is, and is not judged.
        apart: in which the model may run again, unseen.
        end_batch: called with the number of a batch that ends by what is raised outside of a call of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        log: FrameLog,
        in_root: ThreadsInRoot,
        reporter: Reporter,
        *,
        investigator: Investigator | None,
        agreement: Agreement | None,
        keep: int | None,
        warn_at: float | None,
        detail: bool,
        is_traced: Callable[[int], bool],
        apart: Callable[[], AbstractContextManager[None]],
        end_batch: Callable[[int], None],
    ) -> None:
        self._model = model
        self._log = log
        self._in_root = in_root
        self._reporter = reporter
        self._investigator = investigator
        self._agreement = agreement
        self._keep = keep
        self._near = NearLimit(warn_at)
        self._subnormals = Subnormals() if detail else None
        self._is_traced = is_traced
        self._apart = apart
        self._end_batch = end_batch
        self._left_to: dict[int, Found] = {}  # of each thread, what another one found of its calls
        self._bad_batch: int | None = None  # that was told of
        self._last_bad_batch: int | None = None
        self._judged_in_batch = 0
        self.has_seen_bad = False
        """In a batch that is traced, too."""

    @property
    def raises_at_once(self) -> bool:
        return self._reporter.raises and self._agreement is None

    @property
    def wants_all(self) -> bool:
        """Whether frames are needed that are neither bad nor traced."""
        return self._reporter.tells_all or self._subnormals is not None

    def next_replay(self) -> None:
        """A batch of a CUDA graph, whose number may be that of one before."""
        self._bad_batch = None

    def frame(self, frame: Frame) -> None:
        """Of a forward, in the order in which they ran. Raises what is to be raised."""
        traced = self._is_traced(frame.batch_number)
        if traced:
            self._log.clear_kept()
        self._judged_in_batch = 0 if frame.starts_batch else self._judged_in_batch + 1
        self._reporter.frame(frame, traced)
        if frame.bad_lines:
            self.has_seen_bad = True
            last_bad_batch, self._last_bad_batch = self._last_bad_batch, frame.batch_number
            was_told = frame.batch_number == self._bad_batch or self._in_root.was_told(self._log.thread())
            if not traced and not was_told:
                self._detect(frame, last_bad_batch)
        else:
            self._near.warn(frame)
            if self._subnormals is not None:
                self._subnormals.warn(frame)

    def _detect(self, bad: Frame, last_bad_batch: int | None) -> None:
        tensor = None if is_capturing() else self._log.tensor(bad.lines.index(bad.bad_lines[0]))
        rows = None if tensor is None else wholly_bad_rows(tensor)
        judged = None if is_capturing() else self._log.tensor(bad.lines.index(first_judged(bad)))
        known = None if judged is None else weakref.ref(judged)
        found = Found(bad, self._log.kept()[:-1], rows, self._log.pending == 0, last_bad_batch, known)
        thread = self._log.thread()
        self._in_root.tell(thread)
        report = self._report(found) if thread is None or not self._in_root.will_look(thread) else None
        self._log.clear_kept()
        self._bad_batch = bad.batch_number
        self._log.drop_batch(bad.batch_number)  # what ran after it worked on bad numbers
        if self.raises_at_once and not self._in_root.are_any:
            self._end_batch(bad.batch_number)  # or else the root's hook does
        if report is not None:
            self._tell(report)
        elif thread is not None:
            self._left_to[thread] = found

    def look_at_what_was_left(self) -> None:
        """To threads that will not look any more, or to this one."""
        for thread in list(self._left_to):
            if not self._in_root.will_look(thread):
                self._tell(self._report(self._left_to.pop(thread)))

    def apart_from_modules(self, frame: Frame) -> bool:
        """One of gradients, or of a value that no module gave: whether it is to be reported."""
        traced = self._is_traced(frame.batch_number)
        self._reporter.frame(frame, traced)
        self.has_seen_bad = self.has_seen_bad or bool(frame.bad_lines)
        if self._subnormals is not None and not frame.bad_lines:
            self._subnormals.warn(frame)
        return bool(frame.bad_lines) and not traced and frame.batch_number != self._bad_batch

    def report(
        self, bad: Frame, before: Sequence[Frame], tensor: Tensor | None, verdict: Verdict | None, may_raise: bool
    ) -> None:
        """Such a one, with the frames before it, the tensor of its first bad line, and what is known of the cause."""
        rows = None if tensor is None else wholly_bad_rows(tensor)
        self._bad_batch = bad.batch_number
        self._tell(self._made(bad, before, rows, None if self._investigator is None else verdict), may_raise)

    def _report(self, found: Found) -> Report:
        return self._made(found.bad, found.before, found.wholly_bad_rows, self._verdict(found))

    def _made(
        self, bad: Frame, before: Sequence[Frame], rows: tuple[int, int] | None, verdict: Verdict | None
    ) -> Report:
        frames = () if self._keep == 0 else (*before, bad)
        return Report(bad.batch_number, frames, bad, rows, verdict, Process.of(self._model))

    def _verdict(self, found: Found) -> Verdict | None:
        if self._investigator is None or not self._reporter.would_tell(found.bad):
            return None
        with self._apart():
            return self._investigator.verdict(found)

    def _tell(self, report: Report, may_raise: bool = True) -> None:
        """And raise, now or where all ranks do."""
        error = self._reporter.report(report, may_raise)
        if error is None:
            return
        if self._agreement is None:
            raise error
        line = report.bad.lines.index(report.bad.bad_lines[0])
        self._agreement.keep((report.batch_number, report.bad.is_backward, self._judged_in_batch, line), error)

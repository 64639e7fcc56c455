"""The log of module calls that csrc/frame_log.cpp keeps, and the choice between it and that in Python."""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from . import capture
from .frame_log import CapturedCall, Counters, FrameLog, rules_of
from .frames import Frame, Line
from .hooks import IN_COPIES, NOT_SCRIPTED, refuse_replica
from .measurement import Measurement, measure, measured_content
from .plain_frame_log import PlainFrameLog
from .policy import Policy, Rule
from .recorder import NativeRecorder, Recorder
from .row import NOTHING, NonFinite, Row
from .stats import TensorStats

__all__ = ["NativeFrameLog", "make_frame_log"]

NOT_SHOWN = 0xFF  # as csrc/frame_log.h has it


class NativeFrameLog:
    """`FrameLog` in C++, for tensors that the extension can read; all others go through a `Measurement`.

    Cost of a call: a microsecond where the caches have what it needs, several between the modules of a model
    (benchmarks/hook.py), and the reading of tensors that have not been read yet.
    """

    def __init__(
        self,
        recorder: NativeRecorder,
        keep: int | None,
        nested: bool,
        buffers: bool,
        policy: Policy | None,
        warn_at: float | None,
    ) -> None:
        self._policy = policy
        self._given: Any = None
        self._names: list[tuple[str, weakref.ref[nn.Module], str]] = []
        self._nested = nested
        self._make_hook = recorder.extension.make_hook
        self._log = recorder.extension.FrameLog(
            keep=-1 if keep is None else keep,
            buffers=buffers,
            warn_at=warn_at or 0.0,
            detail=recorder.detail,
            measure=functools.partial(measure, recorder),
            works_on=recorder.works_on,
            capture=recorder.capture,
            items=capture.items if nested else None,
        )

    def add_module(self, number: int, name: str, module: nn.Module) -> None:
        self._names.append((name, weakref.ref(module), type(module).__name__))
        find_rule = rules_of(self._policy, name, module)
        code = None if find_rule is None else lambda label: _code(find_rule(label))
        self._log.add_module(module, capture.weight_names(module) if self._nested else (), code)

    def drop_module(self, number: int) -> None:
        self._log.drop_module(number)

    def set_children(self, number: int, children: Sequence[tuple[str, int]]) -> None:
        # C++ has names in UTF-8, which has none for halves of surrogate pairs.
        named = [(name.encode("utf-8", "backslashreplace").decode(), child) for name, child in children]
        self._log.set_children(number, named if self._nested else ())

    def hook(self, number: int, module: nn.Module, look: Callable[[], None]) -> Callable[..., None]:
        make_hook: Callable[..., Callable[..., None]] = self._make_hook
        return make_hook(self._log, number, module, look, refuse_replica, IN_COPIES, NOT_SCRIPTED)

    def call(self, number: int, module: nn.Module, args: object, kwargs: Mapping[str, object], output: object) -> bool:
        return bool(self._log.call(number, module, args, kwargs, output))

    def add(self, number: int, module: nn.Module, labels: Sequence[str], read: Measurement, calls: int) -> bool:
        return bool(self._log.add(number, module, labels, read, calls))

    def start_batch(self, number: int, keep_weights: bool) -> None:
        self._log.start_batch(number, keep_weights)

    def configure(self, is_watching: bool, is_told: bool, always_look: bool, reuse: bool) -> None:
        self._log.configure(is_watching, is_told, always_look, reuse)

    def forget_weights(self) -> None:
        self._log.forget_weights()

    def next(self, wait: bool) -> Frame | None:
        call = self._log.next(wait)
        if call is None:
            return None
        self._given = call
        return self._frame(call)

    def tensor(self, line: int) -> Tensor | None:
        found: Tensor | None = None if self._given is None else self._given.tensor(line)
        return found

    def thread(self) -> int | None:
        return None if self._given is None else int(self._given.thread)

    def take_captured(self) -> tuple[int, CapturedCall] | None:
        found: tuple[int, CapturedCall] | None = self._log.take_captured()
        return found

    def judge_captured(self, call: Any, batch_number: int, starts_batch: bool) -> Frame:
        self._given = None  # the tensors are what the graph makes of them
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
    def is_begun(self) -> bool:
        return bool(self._log.is_begun)

    @property
    def calls(self) -> int:
        return int(self._log.calls)

    def counters(self) -> Counters:
        return Counters(**self._log.counters())

    def _frame(self, call: Any) -> Frame:
        batch_number, i, starts_batch, is_recompute, calls, lines = self._log.frame(call)
        name, reference, class_name = self._names[i]
        module = reference()
        if module is not None:
            class_name = type(module).__name__  # which a lazy module changes
        contents = tuple(
            Line(label, _content(content), is_judged, NonFinite(allowed) if allowed else NOTHING)
            for label, content, is_judged, allowed in lines
        )
        return Frame(batch_number, name, class_name, contents, starts_batch, is_recompute, calls)


def _code(rule: Rule) -> int:
    """As csrc/frame_log.h has it."""
    return rule.allowed.value if rule.is_shown else NOT_SHOWN


def _content(content: Any) -> TensorStats | str:
    """Of what csrc/bindings.cpp gives for a line."""
    if isinstance(content, str):
        return content
    if isinstance(content[0], Measurement):
        in_python: TensorStats | str = content[0].content(content[1])
        return in_python
    row, sizes, strides, dtype = content
    return measured_content(row if isinstance(row, str) else Row(*row), (sizes, strides, dtype))


def make_frame_log(
    recorder: Recorder,
    keep: int | None,
    *,
    nested: bool = True,
    buffers: bool = False,
    policy: Policy | None = None,
    warn_at: float | None = None,
) -> FrameLog:
    """The one that goes with a recorder.

    Args:
        recorder: what reads tensors.
        keep: how many judged calls to keep; None for all.
        nested: whether all is seen that a call touches: keyword inputs, what is inside of lists, dicts and other
            structures, weights that are no parameters or are those of a child that is not called.
        buffers: whether these are shown as weights are.
        policy: which lines are shown, and what they may hold; None for all, and nothing that is not finite.
        warn_at: `next` also gives calls that are good with a judged line this near to its dtype's limit, once for
            each place. So it does with one that is mostly subnormal, where the recorder gives detail.
    """
    if isinstance(recorder, NativeRecorder):
        return NativeFrameLog(recorder, keep, nested, buffers, policy, warn_at)
    return PlainFrameLog(recorder, keep, nested, buffers, policy, warn_at)

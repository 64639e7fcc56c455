"""Whether a module made the numbers that are not finite, or was given them: told from frames and calls in progress."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from . import capture
from .bad_tensors import kinds_in, tensors_in
from .calls import Call
from .frames import Frame, Line
from .recorder import Recorder
from .row import NOTHING, NonFinite, is_new
from .stats import TensorStats

__all__ = ["Origin", "find_origin", "is_weight"]

Where = Literal["weight", "outside", "passed on", "made here", "made between", "overwritten", "unknown"]

_INPUT_OR_OUTPUT = re.compile(r"(input|output)($|[.\[])")


@dataclass(frozen=True, slots=True)
class Origin:
    """Of the first bad line of a batch."""

    where: Where
    """- weight: it is one of the module's own weights.
    - outside: the model was given it.
    - passed on: a module gave it that may, by the policy; or was given it where it may be, and gives it on.
    - made here: in the module that shows it.
    - made between: in the forward of a module that calls it, after the last of its children before.
    - overwritten: what was given to it is written over, and no longer tells what it was.
    - unknown: its call is over, so that what was around it is not to be had.
    """
    line: Line
    maker: str | None = None
    """Qualified name of the module that made it, as far as it is known."""
    call: Call | None = None
    """In which it was made, if that is in progress."""
    given_as: str = ""
    """The label of the input or weight that it came as: the model's, or that of the module that gives it on."""


def find_origin(
    bad: Frame,
    frames: Sequence[Frame],
    calls: Sequence[Call],
    is_current: bool,
    names: Mapping[nn.Module, str],
    recorder: Recorder,
) -> Origin:
    """Where the first bad frame of a batch has its numbers from.

    Args:
        bad: this frame.
        frames: those of its batch before it.
        calls: those in progress that it is in, the innermost first.
        is_current: whether the first of these is its own.
        names: qualified names of the modules.
        recorder: reads what the calls were given.
    """
    line = next(line for line in bad.bad_lines if line.is_judged)
    if is_weight(bad, line):
        return Origin("weight", line, bad.module)
    own = calls[0] if is_current else None
    around = calls[1:] if is_current else calls
    kinds = _kinds_of(line)
    if not line.label.startswith("input"):
        allowed = [each for each in bad.lines if each.allowed and not each.label.startswith("output")]
        source = next((each for each in allowed if not is_new(kinds, _borne(each))), None)
        if source is not None:
            return Origin("passed on", line, bad.module, given_as=source.label)
        return Origin("made here", line, bad.module, own)
    if giver := _allowed_giver(line, frames):
        return Origin("passed on", line, giver)
    overwritten = own is not None and _writes_over_input(own)
    if not is_current:
        # All that is known of what is around it is what the outermost was given.
        around = calls[-1:]
    given_as = ""
    for call in around:
        given_as, given = _given(call, recorder, kinds)
        if is_new(kinds, given):
            if overwritten or not is_current:
                return Origin("overwritten" if overwritten else "unknown", line, None, call)
            return Origin("made between", line, names.get(call.module), call)
    if own is not None and not around:
        given_as = line.label
    # A module that is called without the model may have been given what others have made.
    is_in_root = bool(calls) and names.get(calls[-1].module) == ""
    return Origin("outside", line, None, None, given_as) if is_in_root else Origin("unknown", line)


def is_weight(frame: Frame, line: Line) -> bool:
    """Weights come before inputs and outputs, whatever their names are."""
    if not _INPUT_OR_OUTPUT.match(line.label):
        return True
    labels = [each.label for each in frame.lines]
    return line.label in labels[: max((i for i, x in enumerate(labels) if not _INPUT_OR_OUTPUT.match(x)), default=0)]


def _borne(line: Line) -> NonFinite:
    return line.content.non_finite if isinstance(line.content, TensorStats) else NOTHING


def _kinds_of(line: Line) -> NonFinite:
    return _borne(line) & ~line.allowed


def _allowed_giver(line: Line, frames: Sequence[Frame]) -> str | None:
    """The last module that gave the very same numbers, and may. Of no other does a first bad line come."""
    numbers = repr(line.content)  # NaN is not equal to itself
    for frame in reversed(frames):
        if any(shown.label.startswith("output") and repr(shown.content) == numbers for shown in frame.lines):
            return frame.module
    return None


def _writes_over_input(call: Call) -> bool:
    given = {id(tensor) for _, tensor in _inputs(call)}
    made = tensors_in(call.result)
    return any(id(tensor) in given or (tensor._base is not None and id(tensor._base) in given) for tensor in made)


def _given(call: Call, recorder: Recorder, kinds: NonFinite) -> tuple[str, NonFinite]:
    """(label of the first input of a call that bears some of these kinds, all kinds that its inputs bear)"""
    label, found = "", NOTHING
    for name, tensor in _inputs(call):
        borne = kinds_in(recorder, tensor)
        if borne & kinds and not label:
            label = name
        found |= borne
    return label, found


def _inputs(call: Call) -> Iterator[tuple[str, Tensor]]:
    for label, value in capture.inputs(call.args, call.kwargs, nested=True):
        if capture.is_tensor(value):
            yield label, value

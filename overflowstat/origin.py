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
from .provenance import storage_of
from .recorder import Recorder
from .row import NOTHING, NonFinite, is_new
from .stats import TensorStats

__all__ = ["Origin", "find_origin", "first_judged", "inputs_of", "is_weight"]

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
    given: Tensor | None = None
    """The tensor of that label, if it is the model's."""
    is_certain: bool = True
    """Else it was given such numbers, and whether these are the ones, only running the call again can tell."""


def find_origin(
    bad: Frame,
    frames: Sequence[Frame],
    calls: Sequence[Call],
    is_current: bool,
    names: Mapping[nn.Module, str],
    recorder: Recorder,
    tensor: Tensor | None = None,
) -> Origin:
    """Where the first bad frame of a batch has its numbers from.

    Args:
        bad: this frame.
        frames: those of its batch before it.
        calls: those in progress that it is in, the innermost first.
        is_current: whether the first of these is its own.
        names: qualified names of the modules.
        recorder: reads what the calls were given.
        tensor: the one of the first bad line, if it is still there.
    """
    line = first_judged(bad)
    if is_weight(bad, line):
        return Origin("weight", line, bad.module)
    own = calls[0] if is_current else None
    around = calls[1:] if is_current else calls
    kinds = _kinds_of(line)
    if not line.label.startswith("input"):
        allowed = [each for each in bad.lines if each.allowed and not each.label.startswith("output")]
        source = next((each for each in allowed if not is_new(kinds, _borne(each))), None)
        if source is not None:
            return Origin("passed on", line, bad.module, own, source.label, is_certain=False)
        return Origin("made here", line, bad.module, own)
    if giver := _allowed_giver(line, frames):
        return Origin("passed on", line, giver)
    overwritten = own is not None and _writes_over_input(own)
    if not is_current:
        # All that is known of what is around it is what the outermost was given.
        around = calls[-1:]
    given_as, given_by = "", None
    for call in around:
        given_as, given, given_by = _given(call, recorder, kinds, tensor)
        if is_new(kinds, given):
            if overwritten or not is_current:
                return Origin("overwritten" if overwritten else "unknown", line, None, call)
            return Origin("made between", line, names.get(call.module), call)
    # A module that is called without the model may have been given what others have made.
    if not calls or names.get(calls[-1].module) != "":
        return Origin("unknown", line)
    if own is not None and not around:
        given_as, given_by = line.label, tensor
    is_certain = tensor is not None and given_by is not None and storage_of(tensor) == storage_of(given_by)
    return Origin("outside", line, None, calls[-1], given_as, given_by, is_certain)


def first_judged(bad: Frame) -> Line:
    """The line by which a frame is bad."""
    return next(line for line in bad.bad_lines if line.is_judged)


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
    given = {id(tensor) for _, tensor in inputs_of(call)}
    made = tensors_in(call.result)
    return any(id(tensor) in given or (tensor._base is not None and id(tensor._base) in given) for tensor in made)


def _given(
    call: Call, recorder: Recorder, kinds: NonFinite, sought: Tensor | None
) -> tuple[str, NonFinite, Tensor | None]:
    """(label of an input of a call, all kinds that its inputs bear, the tensor of this label)

    The label is that of the tensor which is sought, or of the first that bears some of these kinds, or of any that is
    bad, in this order.
    """
    storage = None if sought is None else storage_of(sought)
    best: tuple[int, str, Tensor | None] = (0, "", None)
    found = NOTHING
    for label, tensor in inputs_of(call):
        if borne := kinds_in(recorder, tensor):
            found |= borne
            rank = 3 if storage_of(tensor) == storage else 2 if borne & kinds else 1
            best = max(best, (rank, label, tensor), key=lambda each: each[0])
    return best[1], found, best[2]


def inputs_of(call: Call) -> Iterator[tuple[str, Tensor]]:
    for label, value in capture.inputs(call.args, call.kwargs, nested=True):
        if capture.is_tensor(value):
            yield label, value

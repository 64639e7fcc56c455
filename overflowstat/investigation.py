"""From a detection to its verdict."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from .advice import advise, may_float32_cure, where_float32_cures
from .calls import Call, Source
from .drill import Drilled, drill
from .frames import Frame, Line
from .operations import Birth
from .origin import Origin, find_origin, is_weight
from .recorder import Recorder
from .root_call import RootCall
from .row import NOTHING, NonFinite
from .run_state import RunState
from .stats import TensorStats, apart_from_the_run
from .verdict import Kind, Operand, Verdict
from .wording import limit_of, limit_text, module_text, short_name

__all__ = ["FAILED", "Scene", "investigate"]

FAILED = "the search for it failed"


@dataclass(frozen=True)
class Scene:
    """What there is to look at when numbers are found to be bad."""

    bad: Frame
    frames: Sequence[Frame]
    """Those of its batch before it, as far as they were kept."""
    calls: Sequence[Call]
    """Those in progress that it is in, the innermost first, up to the root's."""
    is_current: bool
    """Whether the first of these is its own."""
    names: Mapping[nn.Module, str]
    recorder: Recorder
    why_no_drill: str
    """Why nothing is to be run again; empty if it may."""
    root_call: RootCall | None
    """The one that it is in, if the root is in progress."""
    was_finite_in: int | None
    """The batch before this one in which all weights were read, and were finite."""

    def module(self, name: str) -> nn.Module:
        return next(module for module, each in self.names.items() if each == name)


def investigate(scene: Scene) -> Verdict:
    """What can be said of the cause of a detection. Raises nothing: the detection is what matters.

    Cost: a pass over the inputs of calls in progress, and where something may be run again what `drill` costs.
    """
    try:
        return _investigate(scene)
    except Exception as error:  # of tensors or code of a kind that was not thought of
        bad = scene.bad
        line = next(line for line in bad.bad_lines if line.is_judged)
        text = f"  {'cause':<10}  not known: {FAILED}: {type(error).__name__}: {error}"
        return Verdict(bad.batch_number, bad.module, bad.class_name, line.label, False, "unknown", text=text)


def _investigate(scene: Scene) -> Verdict:
    bad = scene.bad
    with apart_from_the_run():
        origin = find_origin(bad, scene.frames, scene.calls, scene.is_current, scene.names, scene.recorder)
    if origin.where == "outside" and scene.root_call is not None and scene.root_call.has_written_to_inputs():
        origin = replace(origin, where="overwritten")
    drilled = _drilled(scene, origin)
    birth = drilled.birth
    maker = bad.module if origin.maker is None else origin.maker
    if birth is not None:
        maker = scene.names.get(birth.module, maker)
    kind, why = _kind(origin, birth)
    source = _source(scene, origin, birth)
    advice = _advice(scene, origin, birth, maker)
    class_name = type(scene.module(maker)).__name__ if maker in scene.names.values() else bad.class_name
    said = [
        *_made(scene, origin, maker, class_name, birth),
        *_by(scene, origin, drilled, source),
        ("kind", f"{kind}: {why}" if why else kind),
        *([("try", advice)] if advice else []),
    ]
    return Verdict(
        bad.batch_number,
        maker,
        class_name,
        origin.line.label,
        produced=birth is not None or origin.where in ("made here", "made between"),
        kind=kind,
        operation=birth.operation if birth else None,
        source=source.place if source else None,
        operands=birth.operands if birth else (),
        advice=advice,
        text="\n".join(f"  {what:<10}  {text}" for what, text in said),
    )


def _drilled(scene: Scene, origin: Origin) -> Drilled:
    if origin.where in ("weight", "outside", "passed on"):
        return Drilled()
    if scene.why_no_drill:
        return Drilled(reason=scene.why_no_drill)
    if origin.where == "overwritten" and origin.call is None:
        return Drilled(reason="what it was given is written over")
    found = Drilled(reason="the call is over, and what it was given is gone; monitor.drill(batch) runs it")
    target = scene.calls[0].module if scene.is_current else scene.module(scene.bad.module)
    for call, state in _candidates(scene, origin):
        found = drill(call, target, scene.recorder, state)
        if found.birth is not None or found.given is not None:
            break
    return found


def _candidates(scene: Scene, origin: Origin) -> Iterator[tuple[Call, RunState]]:
    """What to run again, and from which state: the least that has made it; then the whole, with its random numbers."""
    root = scene.calls[-1] if scene.calls else None
    call = origin.call
    if call is not None and call is not root:
        yield call, _state(scene, call)
    if root is not None:
        yield root, _state(scene, root)


def _state(scene: Scene, call: Call) -> RunState:
    """When it began, if that is known; else the present one."""
    if scene.root_call is not None and call is scene.calls[-1]:
        return scene.root_call.state
    return RunState.now()


def _kind(origin: Origin, birth: Birth | None) -> tuple[Kind, str]:
    if birth is not None:
        return birth.cause
    if origin.where == "weight":
        return "bad-weight", ""
    if origin.where == "outside" or origin.given_as:
        return "bad-input", ""
    return "unknown", ""


def _advice(scene: Scene, origin: Origin, birth: Birth | None, maker: str) -> str | None:
    if birth is not None:
        cure = None
        if may_float32_cure(birth):
            # From the module that made them on outwards.
            names = [scene.names[call.module] for call in scene.calls]
            calls = list(scene.calls[names.index(maker) :] if maker in names else scene.calls[-1:])
            states = [_state(scene, call) for call in calls]
            cure = where_float32_cures(calls, scene.names, scene.recorder, states)
        return advise(birth, cure)
    if origin.where == "weight":
        return "overflowstat.check_weights(model) lists all that are bad"
    if origin.where == "outside" and _kinds(origin.line) == NonFinite.NEGINF:
        return f'if it is a mask: policy=Policy(allow={{":{origin.line.label}": "-inf"}})'
    return None


def _kinds(line: Line) -> NonFinite:
    return line.content.non_finite if isinstance(line.content, TensorStats) else NOTHING


def _source(scene: Scene, origin: Origin, birth: Birth | None) -> Source | None:
    if birth is not None:
        return birth.source
    if origin.where == "made here" and origin.call is not None:
        # The line that called a module of torch's own; which one of a forward of the user's, nothing has told.
        is_torchs = type(origin.call.module).__module__.split(".")[0] == "torch"
        return next((call.source for call in scene.calls[1:] if call.source and is_torchs), None)
    return None


def _made(scene: Scene, origin: Origin, maker: str, class_name: str, birth: Birth | None) -> Iterator[tuple[str, str]]:
    bad = scene.bad
    where = module_text(maker, class_name)
    if origin.where == "weight":
        since = scene.was_finite_in
        when = "it was so when it was first read" if since is None else f"it was finite in batch {since}"
        yield "weight", f"{origin.line.label} was bad before it was used: {when}"
    elif origin.where == "outside":
        yield "given", f"it came from outside of the model, which got it as {origin.given_as}"
    elif origin.where == "passed on" and origin.given_as:
        yield "given", f"it came as {origin.given_as}, where it is allowed"
    elif origin.where == "passed on":
        yield "given", f"{where} gave it, where it is allowed"
    elif origin.where == "made here" and maker == bad.module:
        yield "made here", f"{_what_is_finite(bad)}{_largest(bad)}"
        if last := _last_child(scene, bad.module):
            yield "after", f"all of its children, of which {_numbers(last)} was the last"
    elif origin.where == "made between" or birth is not None:
        yield "made in", f"{where}, in its own forward; what that was given is finite"
        if last := _last_child(scene, maker):
            yield "after", _numbers(last)
    elif origin.where == "overwritten":
        yield "made", "here or before: what it was given is written over"
    else:
        yield "made", "between modules, or outside of the model"


def _by(scene: Scene, origin: Origin, drilled: Drilled, source: Source | None) -> Iterator[tuple[str, str]]:
    if drilled.birth is not None:
        line = f", {source.place}: {source.code}" if source else ""
        yield "by", f"{drilled.birth.operation}{line}"
        operands = [f"{each.name} {_range(each.content)}" for each in drilled.birth.operands[:-1] if _is_shown(each)]
        if operands:
            yield "given", ", ".join(operands)
    elif drilled.given is not None:
        yield "by", "what is not finite as it stands: a constant, or a tensor that no line shows"
    else:
        if source is not None:
            yield "called at", f"{source.place}: {source.code}"
        if drilled.reason:
            yield "by", f"not known: {drilled.reason}"


def _what_is_finite(frame: Frame) -> str:
    weights = [line for line in frame.lines if is_weight(frame, line)]
    inputs = [line for line in frame.lines if line.label.startswith("input")]
    there = [what for what, lines in (("inputs", inputs), ("weights", weights)) if lines]
    allowed = [line.label for line in weights + inputs if line.allowed and _kinds(line)]
    but = f", but for what is allowed in {', '.join(allowed)}" if allowed else ""
    return f"its {' and '.join(there)} are finite{but}" if there else "it has no inputs or weights that a line shows"


def _largest(frame: Frame) -> str:
    """How near to its limit what a module was given is."""
    found = [
        (line.content.finite_abs_max / limit_of(line.content.dtype), line.label, line.content)
        for line in frame.lines
        if not line.label.startswith("output") and isinstance(line.content, TensorStats) and _is_real(line.content)
    ]
    if not found:
        return ""
    share, label, stats = max(found, key=lambda each: each[0])
    limit = limit_text(stats.dtype)
    percent = f", {share:.0%} of {limit}" if share >= 0.01 else f" of {limit}"
    return f"; largest {stats.finite_abs_max:.3g} in {label}{percent}"


def _is_real(stats: TensorStats) -> bool:
    return stats.dtype.is_floating_point and stats.finite_abs_max == stats.finite_abs_max


def _last_child(scene: Scene, maker: str) -> Frame | None:
    """The last module that a maker has called and that has returned, of the frames that were kept.

    Frames come as calls return, so that it is the last one in the maker, but for those in calls that go on.
    """
    going_on = [scene.names[call.module] for call in scene.calls if scene.names[call.module] != maker]
    for frame in reversed(scene.frames):
        if any(_is_in(frame.module, name) for name in going_on if _is_in(name, maker)):
            continue
        if _is_in(frame.module, maker):
            return frame
    return None


def _is_in(name: str, parent: str) -> bool:
    return name.startswith(f"{parent}.") if parent else name != ""


def _numbers(frame: Frame) -> str:
    shown = [f"{line.label} {_range(line.content)}" for line in frame.lines if not is_weight(frame, line)]
    return f"{frame.module} ({frame.class_name}): {', '.join(shown)}"


def _range(content: TensorStats | str) -> str:
    if isinstance(content, str):
        return content
    if content.numel == 0:
        return "empty"
    largest = [f"up to {content.finite_abs_max:.3g}"] if content.finite_abs_max == content.finite_abs_max else []
    bad = [f"{count} {what}" for count, what in ((content.nan_count, "nan"), (content.inf_count, "inf")) if count]
    return f"{' and '.join(largest + bad)} ({short_name(content.dtype)})"


def _is_shown(operand: Operand) -> bool:
    return isinstance(operand.content, TensorStats) or operand.name in ("other", "exponent", "value", "p", "eps")

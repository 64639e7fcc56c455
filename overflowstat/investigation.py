"""From a detection to its verdict."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from .advice import Cure, advise, may_float32_cure, where_float32_cures
from .calls import Call, Source
from .drill import FAILED, Drilled, Seen, drill
from .findings import Findings, Held, Scene
from .frames import Frame
from .headroom import Growth, growth
from .operations import Birth, Entry
from .origin import Origin, find_origin, first_judged, inputs_of
from .provenance import storage_of
from .rerun import holds_containers
from .row import NOTHING, NonFinite
from .run_state import RunState
from .stats import TensorStats, apart_from_the_run
from .verdict import Kind, Verdict
from .verdict_text import verdict_text

__all__ = ["FAILED", "investigate"]

OVERFLOWS = ("cast-overflow", "arithmetic-overflow", "accumulation-overflow")


def investigate(scene: Scene) -> Verdict:
    """What can be said of the cause of a detection. Raises nothing: the detection is what matters.

    Cost: a pass over the inputs of calls in progress, and where something may be run again what `drill` costs.
    """
    try:
        return _verdict(scene, _find(scene))
    except Exception as error:  # of tensors or code of a kind that was not thought of
        bad = scene.bad
        text = f"  {'cause':<10}  not known: {FAILED}: {type(error).__name__}: {error}"
        label = first_judged(bad).label
        return Verdict(bad.batch_number, bad.module, bad.class_name, label, False, "unknown", text=text)


def _verdict(scene: Scene, found: Findings) -> Verdict:
    where = found.origin.where if found.origin.is_certain else "unknown"
    is_given = found.kind in ("bad-weight", "bad-input")
    made = found.birth or (None if is_given else found.entry)
    source = None if is_given else found.source
    return Verdict(
        scene.bad.batch_number,
        found.maker,
        found.class_name,
        found.origin.line.label,
        produced=found.birth is not None or (where in ("made here", "made between") and not is_given),
        kind=found.kind,
        operation=made.operation if made else None,
        source=source.place if source else None,
        operands=found.birth.operands if found.birth else (),
        advice=found.advice,
        text=verdict_text(scene, found),
    )


def _find(scene: Scene) -> Findings:
    bad, names = scene.bad, scene.names
    with apart_from_the_run():
        origin = find_origin(bad, scene.frames, scene.calls, scene.is_current, names, scene.recorder, scene.tensor)
    origin = _doubted(scene, origin)
    drilled = _drilled(scene, origin)
    origin, birth, entry = _resolved(scene, origin, drilled)
    held = _holder(scene, entry.tensor) if entry is not None and entry.tensor is not None else None
    kind, why = _kind(origin, birth, entry, held)
    maker = bad.module if origin.maker is None else origin.maker
    if birth is not None:
        maker = names.get(birth.module, maker)
    elif kind == "bad-weight" and held is not None:
        maker = held.module
    known = {name: module for module, name in names.items()}
    cure, is_autocast = _cure(scene, birth, maker)
    return Findings(
        origin,
        birth,
        entry,
        held,
        drilled.reason,
        maker,
        type(known[maker]).__name__ if maker in known else bad.class_name,
        kind,
        why,
        _source(scene, origin, birth, entry),
        _last_child(scene, maker),
        _growth(scene, kind),
        _was_finite_in(scene, origin),
        _advice(scene, origin, birth, entry, cure, is_autocast),
    )


def _doubted(scene: Scene, origin: Origin) -> Origin:
    """What the model was given is not what it is now, if it was written over; and that need not show."""
    if origin.where != "outside" or scene.root_call is None:
        return origin
    if origin.given is not None and scene.root_call.is_as_it_was(origin.given):
        return origin
    if _has_changed(scene):
        return replace(origin, where="overwritten", call=None, is_certain=True)
    return replace(origin, is_certain=False)


def _has_changed(scene: Scene) -> bool:
    """Whether what the model was given is no longer what it was."""
    root = scene.calls[-1]
    return scene.root_call is not None and scene.root_call.has_changed(root.args, root.kwargs)


def _drilled(scene: Scene, origin: Origin) -> Drilled:
    if origin.is_certain and origin.where in ("weight", "outside", "passed on"):
        return Drilled()
    if scene.why_no_drill:
        return Drilled(reason=scene.why_no_drill)
    if origin.where == "overwritten" and origin.call is None:
        return Drilled(reason="what it was given is written over")
    found = Drilled(reason="the call is over, and what it was given is gone; monitor.drill(batch) runs it")
    line = origin.line
    kinds = line.content.non_finite & ~line.allowed if isinstance(line.content, TensorStats) else NOTHING
    module = scene.calls[0].module if scene.is_current else scene.module(scene.bad.module)
    for call, state, has_its_numbers in _candidates(scene, origin):
        if call is scene.calls[-1] and _has_changed(scene):
            found = Drilled(reason="what the model was given is written over")
            break
        found = drill(call, Seen(module, line.label, kinds), scene.recorder, state)
        if found.origin is not None and (has_its_numbers or not found.has_drawn):
            return found
    if found.origin is not None:
        return Drilled(reason="it draws random numbers, and those that it had are gone")
    return found


def _candidates(scene: Scene, origin: Origin) -> Iterator[tuple[Call, RunState, bool]]:
    """What to run again, from which state, and whether that has the random numbers which it had.

    The least that has made it; then the whole. What is given a list, as a cache may be one, may have put something in:
    then the whole only, of which that shows.
    """
    root = scene.calls[-1] if scene.calls else None
    call = origin.call
    if call is not None and call is not root and not (_is_root(scene, root) and holds_containers(call)):
        yield call, RunState.now(), False
    if root is not None:
        yield root, _state(scene, root), _is_root(scene, root)


def _state(scene: Scene, call: Call) -> RunState:
    """When it began, if that is known; else the present one."""
    return scene.root_call.state if scene.root_call is not None and _is_root(scene, call) else RunState.now()


def _is_root(scene: Scene, call: Call | None) -> bool:
    return scene.root_call is not None and call is scene.calls[-1] and scene.names[call.module] == ""


def _resolved(scene: Scene, origin: Origin, drilled: Drilled) -> tuple[Origin, Birth | None, Entry | None]:
    """Where the numbers are from, after all that was seen."""
    found = drilled.origin
    birth = found if isinstance(found, Birth) else None
    entry = found if isinstance(found, Entry) else None
    if entry is not None and entry.tensor is not None:
        own = _input_label(scene.calls[0], entry.tensor) if scene.is_current else ""
        models = _input_label(scene.calls[-1], entry.tensor) if _is_root(scene, scene.calls[-1]) else ""
        if own or models:
            is_passed_on = own and origin.where in ("passed on", "made here")
            where = "overwritten" if entry.is_written else "passed on" if is_passed_on else "outside"
            given_as = own if is_passed_on else models or own
            return replace(origin, where=where, given_as=given_as, is_certain=True), None, entry  # type: ignore[arg-type]
    if found is None or origin.is_certain:
        return origin, birth, entry
    where = "made between" if origin.where == "outside" else "made here"
    maker = origin.maker if origin.where != "outside" or origin.call is None else scene.names.get(origin.call.module)
    return replace(origin, where=where, maker=maker, is_certain=True), birth, entry  # type: ignore[arg-type]


def _input_label(call: Call, tensor: Tensor) -> str:
    """As which a call was given this tensor, or a part of it."""
    storage = storage_of(tensor)
    return next((label for label, given in inputs_of(call) if storage_of(given) == storage), "")


def _holder(scene: Scene, tensor: Tensor) -> Held | None:
    storage = storage_of(tensor)
    for module, name in scene.names.items():
        weights, buffers, others = module._parameters, module._buffers, module.__dict__
        for what, table in (("weight", weights), ("buffer", buffers), ("attribute", others)):
            for key, value in table.items():
                if isinstance(value, Tensor) and storage_of(value) == storage:
                    return Held(name, type(module).__name__, key, what)
    return None


def _kind(origin: Origin, birth: Birth | None, entry: Entry | None, held: Held | None) -> tuple[Kind, str]:
    if birth is not None:
        return birth.cause
    if origin.where == "weight":
        return "bad-weight", ""
    if origin.is_certain and (origin.where == "outside" or (origin.where == "passed on" and origin.given_as)):
        return "bad-input", ""
    if entry is None:
        return "unknown", ""
    if entry.tensor is None:
        return "unknown", f"the constant {entry.operand.content} is written there as it stands"
    if held is not None and held.what != "attribute" and not entry.is_written:
        return "bad-weight", ""
    return "unknown", ""


def _source(scene: Scene, origin: Origin, birth: Birth | None, entry: Entry | None) -> Source | None:
    if birth is not None or entry is not None:
        return birth.source if birth is not None else entry.source if entry is not None else None
    if origin.where == "made here" and origin.is_certain and origin.call is not None:
        # The line that called a module of torch's own; which one of a forward of the user's, nothing has told.
        is_torchs = type(origin.call.module).__module__.split(".")[0] == "torch"
        return next((call.source for call in scene.calls[1:] if call.source and is_torchs), None)
    return None


def _cure(scene: Scene, birth: Birth | None, maker: str) -> tuple[Cure, bool]:
    """What computing in float32 helps; and whether autocast is on."""
    if birth is None or not may_float32_cure(birth):
        return Cure(), False
    # From the module that made them on outwards.
    names = [scene.names[call.module] for call in scene.calls]
    calls = list(scene.calls[names.index(maker) :] if maker in names else scene.calls[-1:])
    states = [_state(scene, call) for call in calls]
    is_autocast = any(is_on for _, is_on, _ in states[-1].autocast) if states else False
    return where_float32_cures(calls, scene.names, scene.recorder, states), is_autocast


def _advice(
    scene: Scene, origin: Origin, birth: Birth | None, entry: Entry | None, cure: Cure, is_autocast: bool
) -> str | None:
    if birth is not None:
        return advise(birth, cure, is_autocast)
    if origin.where == "weight":
        return "overflowstat.check_weights(model) lists all that are bad"
    content = origin.line.content
    kinds = content.non_finite if isinstance(content, TensorStats) else NOTHING
    if origin.where == "outside" and origin.is_certain and kinds == NonFinite.NEGINF:
        return f'if it is a mask: policy=Policy(allow={{":{origin.line.label}": "-inf"}})'
    if entry is not None and entry.tensor is None:
        kind = str(entry.operand.content)
        return f'if it is meant: policy=Policy(allow={{"{scene.bad.module}:{origin.line.label}": "{kind}"}})'
    return None


def _growth(scene: Scene, kind: Kind) -> Growth | None:
    return growth([*scene.frames, scene.bad]) if kind in OVERFLOWS else None


def _was_finite_in(scene: Scene, origin: Origin) -> int | None:
    if origin.where != "weight":
        return None
    for frame in reversed(scene.kept):
        for line in frame.lines:
            is_it = frame.module == scene.bad.module and line.label == origin.line.label
            if is_it and isinstance(line.content, TensorStats) and not line.content.non_finite:
                return frame.batch_number
    return None


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

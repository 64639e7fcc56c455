"""The words of a verdict: each line is known, or it is not there."""

from collections.abc import Iterator

from .findings import Findings, Scene
from .frames import Frame, Line
from .operations import Entry
from .origin import is_weight
from .row import NOTHING, NonFinite
from .stats import TensorStats
from .verdict import Operand
from .wording import limit_of, limit_text, module_text, short_name

__all__ = ["verdict_text"]

# Operands that are numbers and tell something; others are dimensions and the like.
NUMBERS = ("other", "exponent", "value", "p", "eps")


def verdict_text(scene: Scene, found: Findings) -> str:
    said = [*_made(scene, found), *_by(found)]
    said.append(("kind", f"{found.kind}: {found.why}" if found.why else found.kind))
    if found.growth is not None:
        said.append(("growth", found.growth.text))
    if found.advice is not None:
        said.append(("try", found.advice))
    return "\n".join(f"  {what:<10}  {text}" for what, text in said)


def _made(scene: Scene, found: Findings) -> Iterator[tuple[str, str]]:
    bad, origin = scene.bad, found.origin
    where = module_text(found.maker, found.class_name)
    if origin.where == "weight":
        yield "weight", f"{origin.line.label} was bad before it was used: {_since(scene, found)}"
    elif found.held is not None and found.kind == "bad-weight":
        yield "given", f"{where} holds it: {found.held.what} {found.held.name} was bad before it was used"
    elif origin.where == "outside" and origin.is_certain:
        yield "given", f"it came from outside of the model, which got it as {origin.given_as}"
    elif origin.where == "passed on" and origin.given_as and origin.is_certain:
        yield "given", f"it came as {origin.given_as}, where it is allowed"
    elif origin.where == "passed on" and origin.is_certain:
        yield "given", f"{where} gave it, where it is allowed"
    elif not origin.is_certain:
        of_what = "the model" if origin.where == "outside" else where
        yield "given or", f"made here or before: {of_what} was given such numbers as {origin.given_as}, too"
    elif origin.where == "made here" and found.maker == bad.module:
        yield "made here", f"{_what_is_finite(bad)}{_largest(bad)}"
        if found.last_child is not None:
            yield "after", f"{_numbers(found.last_child)}; the last of its children"
    elif origin.where == "made between" or found.birth is not None:
        yield "made in", f"{where}, in its own forward; what that was given is finite"
        if found.last_child is not None:
            yield "after", _numbers(found.last_child)
    elif origin.where == "overwritten":
        yield "made", "here or before: what it was given is written over"
    else:
        merged = f", or in a module between the {bad.calls} calls that are shown as one" if bad.calls > 1 else ""
        yield "made", f"between modules, or outside of the model{merged}"


def _since(scene: Scene, found: Findings) -> str:
    if found.was_finite_in == scene.bad.batch_number:
        return "it was finite earlier in this batch"
    if found.was_finite_in is not None:
        return f"it was finite in batch {found.was_finite_in}"
    if scene.quiet_batch is not None:
        return f"in batch {scene.quiet_batch} no weight of a module that was called was bad"
    return "it was so when it was first read"


def _by(found: Findings) -> Iterator[tuple[str, str]]:
    source = found.source
    line = f", {source.place}: {source.code}" if source else ""
    if found.birth is not None:
        yield "by", f"{found.birth.operation}{line}"
        operands = [f"{each.name} {_range(each.content)}" for each in found.birth.operands[:-1] if _is_shown(each)]
        if operands:
            yield "given", ", ".join(operands)
    elif found.entry is not None:
        if found.entry.operation is not None:
            is_given = found.kind in ("bad-weight", "bad-input")
            yield "first used" if is_given else "by", f"{found.entry.operation}{line}"
        if found.entry.tensor is not None:
            yield "bad before", _bad_before(found, found.entry)
    else:
        if source is not None:
            yield "called at", f"{source.place}: {source.code}"
        if found.why_not_run:
            yield "by", f"not known: {found.why_not_run}"


def _bad_before(found: Findings, entry: Entry) -> str:
    numbers = _range(entry.operand.content)
    if found.held is not None:
        text = (
            f"{found.held.what} {found.held.name} of {module_text(found.held.module, found.held.class_name)}: {numbers}"
        )
    elif found.origin.given_as:
        text = f"{found.origin.given_as}: {numbers}"
    elif entry.operation is None:
        text = f"what it gives, which no operation of torch has made: {numbers}"
    else:
        text = f"{entry.operand.name}, which no line shows: {numbers}"
    return f"{text}; but this call writes to it, and may have made it so" if entry.is_written else text


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
    near = f", {share:.0%} of {limit_text(stats.dtype)}" if share >= 0.01 else ""
    return f"; largest {stats.finite_abs_max:.3g} in {label}{near}"


def _is_real(stats: TensorStats) -> bool:
    return stats.dtype.is_floating_point and stats.finite_abs_max == stats.finite_abs_max


def _numbers(frame: Frame) -> str:
    shown = [f"{line.label} {_range(line.content)}" for line in frame.lines if not is_weight(frame, line)]
    return f"{frame.module} ({frame.class_name}): {', '.join(shown)}"


def _range(content: TensorStats | str) -> str:
    if isinstance(content, str):
        return content
    if content.numel == 0:
        return "empty"
    largest = [f"up to {content.finite_abs_max:.3g}"] if content.finite_abs_max == content.finite_abs_max else []
    bad = [f"{count} {kind}" for count, kind in content.bad_counts]
    return f"{' and '.join(largest + bad)} ({short_name(content.dtype)})"


def _is_shown(operand: Operand) -> bool:
    return isinstance(operand.content, TensorStats) or operand.name in NUMBERS


def _kinds(line: Line) -> NonFinite:
    return line.content.non_finite if isinstance(line.content, TensorStats) else NOTHING

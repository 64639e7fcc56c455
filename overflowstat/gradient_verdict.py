"""What is said of a bad gradient: whose backward made it, by which operation, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .backward_roots import Edge
from .frames import Frame, Line
from .gradient_births import GradientBirth
from .gradient_cause import SUM, advise_gradient, cause_of_one, only_operation
from .gradient_graph import GradientGraph, Parent, Tap
from .investigation import FAILED
from .modules import ModuleTree
from .names import submodule
from .pending import PendingFrame
from .policy import Rule
from .stats import TensorStats
from .verdict import Kind, Operand, Verdict
from .wording import module_text, short_name

__all__ = ["BadGradient", "GradientVerdicts", "in_place_of_advice"]

Rules = Callable[[int, str], Rule]

# Lines of the forward that are read whatever the monitor is asked to see.
_READ_IN_ANY_CASE = re.compile(r"output(\[\d+\])?|input\[\d+\]")
_ANOMALY_MODE = "torch.autograd.set_detect_anomaly(True, check_nan=False) around it tells the operation, line and cause"


@dataclass(frozen=True)
class BadGradient:
    """The first of a backward."""

    frame: Frame
    line: Line
    tap: Tap | None
    """The tensor that it is of; None for a weight."""
    weight: Tensor | None
    was_bad: bool
    """Whether the weight's was bad already, and has been added to."""
    read: Mapping[Tap, tuple[PendingFrame, int]]
    """All that came before it, with the lines of the frames."""
    roots: Sequence[Edge]
    """What the backward began with; empty where that is over."""
    birth: GradientBirth | None
    """In anomaly mode."""
    is_followed: bool
    """Whether all that the nodes made and got was read, of those that tell of it."""


@dataclass(frozen=True)
class _Origin:
    """Where it may have been made."""

    parents: Sequence[Parent] | None
    """The nodes that have given it; None where they could not be looked for any more."""
    makers: frozenset[str]
    """Modules, in their own forward."""
    is_from_outside: bool
    """It may be of what no module is known to have made in its forward."""
    of: tuple[Tap, ...]
    """The tensors whose gradients it was made of, as far as known."""
    operations: frozenset[str]
    """All nodes between, if those are known; else none."""


class GradientVerdicts:
    """Of one model.

    Args:
        modules: those that are watched.
        names: of them, by their numbers.
        graph: where their tensors lie.
        rules: (number of a module, label) -> what the policy says of a line.
    """

    def __init__(self, modules: ModuleTree, names: Mapping[int, str], graph: GradientGraph, rules: Rules) -> None:
        self._modules = modules
        self._names = names
        self._graph = graph
        self._rules = rules

    def verdict(self, bad: BadGradient) -> Verdict:
        """Raises nothing: the detection is what matters.

        Cost: a walk through the graph of the backward, and a wait for numbers that are still on their way.
        """
        try:
            return self._verdict(bad)
        except Exception as error:  # of tensors or nodes of a kind that was not thought of
            frame = bad.frame
            text = _line("cause", f"not known: {FAILED}: {type(error).__name__}: {error}")
            return Verdict(
                frame.batch_number, frame.module, frame.class_name, bad.line.label, False, "unknown", text=text
            )

    def _verdict(self, bad: BadGradient) -> Verdict:
        birth = bad.birth
        origin = self._of_weight(bad) if bad.tap is None else self._of_tensor(bad, bad.tap)
        if birth is not None:
            origin = replace(origin, makers=frozenset({birth.module}), is_from_outside=False)
        got = [_content(bad.read, tap) for tap in origin.of]
        is_made = len(origin.makers) == 1 and not origin.is_from_outside and not bad.was_bad
        is_seen = birth is not None or len(got) > 0
        is_given = any(isinstance(content, TensorStats) and content.is_bad for content in got)
        produced = is_made and is_seen and not is_given and not _is_of_no_node(bad, origin)
        kind, why, operation = _kind(bad, origin), "", None
        if produced:
            kind, why, operation = self._cause(bad, origin, got)
        maker = next(iter(origin.makers)) if produced else bad.frame.module
        advice = self._advice(bad, origin, got, kind)
        said = [
            *self._made(bad, origin, got, maker, produced),
            *_by(operation, birth if produced else None),
            ("kind", f"{kind}: {why}" if why else kind),
            *([("try", advice)] if advice else []),
        ]
        return Verdict(
            bad.frame.batch_number,
            maker,
            self._class_name(maker),
            bad.line.label,
            produced,
            kind,
            operation,
            source=birth.source if birth and produced else None,
            operands=birth.operands if birth and produced else (),
            advice=advice,
            text="\n".join(_line(what, text) for what, text in said),
        )

    def is_known_finite(self, tap: Tap) -> bool:
        """Whether the forward would have been found bad if the tensor itself were."""
        label = tap.place.label.removeprefix("grad ")
        rule = self._rules(tap.place.number, label)
        return _READ_IN_ANY_CASE.fullmatch(label) is not None and rule.is_shown and not rule.allowed

    def _of_tensor(self, bad: BadGradient, tap: Tap) -> _Origin:
        makers: set[str] = set()
        operations: set[str] = set()
        of: list[Tap] = []
        is_known = True
        # Through tensors whose gradients are not read to those whose are.
        around, met = [tap], {tap}
        while around:
            each = around.pop()
            makers.update(each.also_used_by)
            is_known = is_known and not each.also_used_by
            uses = [use for use in each.uses if use.of in bad.read or not use.of.is_shown]
            operations.update({SUM} if len(uses) > 1 else ())
            for use in uses:
                makers.add(use.module)
                operations |= use.operations
                if use.of in bad.read:
                    of.append(use.of)
                elif use.of not in met:
                    is_known = False  # some may be there twice
                    met.add(use.of)
                    around.append(use.of)
        parents = self._graph.parents(bad.roots, tap, None)
        is_outside = tap.leaves if parents is None else not all(parent.modules for parent in parents)
        is_outside = is_outside or any(each.leaves for each in met - {tap})
        known = frozenset(operations) if is_known and not is_outside else frozenset()
        return _Origin(parents, frozenset(makers), is_outside, tuple(of), known)

    def _of_weight(self, bad: BadGradient) -> _Origin:
        if bad.weight is None:
            return _Origin(None, frozenset(), False, (), frozenset())
        users = self._graph.users(bad.weight)
        parents = self._graph.parents(bad.roots, None, bad.weight)
        is_outside = not all(parent.modules for parent in parents or ())
        of = [tap for tap in bad.read if tap.place.name in users and tap.place.label.startswith("grad output")]
        operations = next(iter(users.values())) if len(users) == 1 and not is_outside else frozenset()
        return _Origin(parents, frozenset(users), is_outside, tuple(of), operations)

    def _cause(
        self, bad: BadGradient, origin: _Origin, got: Collection[TensorStats | str]
    ) -> tuple[Kind, str, str | None]:
        """With the operation."""
        if bad.birth is not None:
            return *bad.birth.cause, bad.birth.operation
        contents = [content for content in got if isinstance(content, TensorStats)]
        made = bad.line.content
        if not contents or len(contents) < len(got) or not isinstance(made, TensorStats):
            return "unknown", "", None
        largest = max(contents, key=lambda content: content.abs_max)
        is_input_finite = bad.tap is not None and self.is_known_finite(bad.tap)
        are_outputs_finite = all(map(self.is_known_finite, origin.of))
        cause = cause_of_one(
            origin.operations, largest, made, is_input_finite, are_outputs_finite, is_weights=bad.tap is None
        )
        return *(cause or ("unknown", "")), only_operation(origin.operations, largest, made)

    def _advice(self, bad: BadGradient, origin: _Origin, got: Collection[TensorStats | str], kind: Kind) -> str | None:
        if kind == "unknown" and bad.birth is None and origin.makers and not torch.is_anomaly_enabled():
            return _ANOMALY_MODE
        is_half = any(isinstance(c, TensorStats) and c.dtype == torch.float16 for c in (bad.line.content, *got))
        return advise_gradient(kind, is_half)

    def _made(
        self, bad: BadGradient, origin: _Origin, got: Collection[TensorStats | str], maker: str, produced: bool
    ) -> Iterator[tuple[str, str]]:
        if bad.was_bad:
            yield "given", "it was bad before this backward, which has added to it"
        elif _is_of_no_node(bad, origin):
            yield "made", "by a hook on it, or where several were added up: what all nodes gave is finite"
        elif produced:
            between = self._between(maker)
            largest = [content.abs_max for content in got if isinstance(content, TensorStats) and content.numel]
            finite = f", up to {max(largest):.3g}" if largest else ""
            where = module_text(maker, self._class_name(maker)) + between
            seen = "" if origin.parents else "; whether anything outside has used what it gave was not looked for"
            yield "made in", f"the backward of {where}; the gradients that reached it are finite{finite}{seen}"
        elif origin.is_from_outside and not origin.makers:
            yield "given", "it came so to the model, from the loss or what else has used what it gave"
        elif origin.makers:
            names = ", ".join(sorted(map(module_text, origin.makers)))
            others = ", or of what else has used it" if origin.is_from_outside else ""
            before = "" if got else ", or before: no gradient that reached it was read"
            yield "made in", f"the backward of {'one of ' * (len(origin.makers) > 1)}{names}{others}{before}"
        else:
            yield "made", "outside of the modules that are watched"

    def _class_name(self, name: str) -> str:
        modules = (m for m, number in self._modules.numbers.items() if self._names[number] == name)
        return next((type(module).__name__ for module in modules), "")

    def _between(self, name: str) -> str:
        """What there is to add of a module with children."""
        if not any(each != name and each.startswith(f"{name}." if name else "") for each in self._names.values()):
            return ""
        inside = submodule(self._modules.root, name).modules()
        is_all_watched = all(module in self._modules.numbers for module in inside)
        others = "" if is_all_watched else ", or a module there that is not watched"
        return f", in its own forward between its children{others}"


def in_place_of_advice(verdict: Verdict, what_follows: str) -> Verdict:
    """Tell of what will happen, in place of what to try."""
    lines = verdict.text.splitlines()
    if verdict.advice is not None:
        lines.remove(_line("try", verdict.advice))
    return replace(verdict, advice=what_follows, text="\n".join([*lines, _line("then", what_follows)]))


def _line(what: str, text: str) -> str:
    return f"  {what:<10}  {text}"


def _is_of_no_node(bad: BadGradient, origin: _Origin) -> bool:
    """In anomaly mode, when all nodes that gave it were looked at, and gave finite numbers."""
    if bad.birth is not None or not bad.is_followed or not origin.parents:
        return False
    return all(parent.is_followed for parent in origin.parents)


def _kind(bad: BadGradient, origin: _Origin) -> Kind:
    """Of one that no module is known to have made."""
    return "bad-input" if bad.was_bad or (origin.is_from_outside and not origin.makers) else "unknown"


def _by(operation: str | None, birth: GradientBirth | None) -> Iterator[tuple[str, str]]:
    if operation is not None:
        source = f", of {birth.source}" if birth is not None and birth.source else ""
        inside = f"; in it {birth.inside}" if birth is not None and birth.inside else ""
        yield "by", f"{operation}{source}{inside}"
    if birth is not None and birth.operands:
        yield "given", ", ".join(f"{each.name} {_range(each)}" for each in birth.operands[:-1])


def _range(operand: Operand) -> str:
    content = operand.content
    if isinstance(content, str) or content.numel == 0:
        return str(content) if isinstance(content, str) else "empty"
    return f"{content.abs_min:.3g} to {content.abs_max:.3g} ({short_name(content.dtype)})"


def _content(read: Mapping[Tap, tuple[PendingFrame, int]], tap: Tap) -> TensorStats | str:
    frame, line = read[tap]
    return frame.lines[line].arrived().content

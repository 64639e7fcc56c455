"""Reads gradients into frames: those that a node gets, and those of all weights in one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from . import capture
from .frame_log import SHOWN, rules_of
from .measurement import Place, measure
from .modules import ModuleTree
from .pending import PendingFrame, PendingLine
from .policy import Policy, Rule
from .recorder import Recorder
from .unchanged import Unchanged

__all__ = ["GradientReader", "ReadFrame"]

Labelled = list[tuple[str, Tensor]]


class ReadFrame(NamedTuple):
    pending: PendingFrame
    lines: list[int]
    """Of each gradient the first that is its own; the number of lines where it has none."""


class GradientReader:
    """Of one model."""

    def __init__(self, modules: ModuleTree, recorder: Recorder, policy: Policy | None) -> None:
        self._modules = modules
        self._recorder = recorder
        self._policy = policy
        self._finders: dict[int, Callable[[str], Rule] | None] = {}
        self._rules: dict[tuple[int, str], Rule] = {}
        self._known = Unchanged()
        self.names: dict[int, str] = {}
        """Of modules, by their numbers."""
        self.tensors = self.bytes_read = 0

    def add_module(self, number: int, name: str, module: nn.Module) -> None:
        self.names[number] = name
        self._finders[number] = rules_of(self._policy, name, module)

    def rule(self, number: int, label: str) -> Rule:
        """What the policy says of a line of a module."""
        if (number, label) not in self._rules:
            find = self._finders[number]
            self._rules[number, label] = SHOWN if find is None else find(label)
        return self._rules[number, label]

    def read(self, batch_number: int, number: int, class_name: str, labelled: Labelled) -> ReadFrame:
        """The frame of one module."""
        return self._read(batch_number, [(number, class_name, labelled)], remember=False)[0]

    def read_weights(self, batch_number: int, order: Mapping[int, int]) -> tuple[list[PendingFrame], set[int]]:
        """Frames of all that have changed since they were read before; and the weights, by their ids, whose gradients
        were bad already then, and have only been added to.

        Args:
            order: of modules, by their numbers; those that are not in it come last, in reverse order of the model.
        """
        groups: list[tuple[int, str, Labelled]] = []
        met: set[int] = set()
        were_bad: set[int] = set()
        for module, number in self._modules.numbers.items():
            own: Labelled = []
            for name, weight in module._parameters.items():
                if weight is None or id(weight) in met:
                    continue
                met.add(id(weight))
                gradient = weight.grad
                if gradient is not None and self._known.find(gradient) is None:
                    own.append((f"grad {name}", gradient))
                    if self._was_bad(gradient):
                        were_bad.add(id(weight))
            if own:
                groups.append((number, type(module).__name__, own))
        groups.sort(key=lambda group: (order.get(group[0], len(order)), -group[0]))
        read = self._read(batch_number, groups, remember=True)
        return [frame.pending for frame in read if frame.pending.lines], were_bad

    def _was_bad(self, gradient: Tensor) -> bool:
        """When it was read last, since when there was one write: that which a backward adds by."""
        known = self._known.last(gradient)
        if known is None or known.state.version is None or known.state.version + 1 != gradient._version:
            return False
        measurement, position = known.place
        return measurement.ready() and bool(measurement.non_finite(position))

    def _read(self, batch_number: int, groups: Sequence[tuple[int, str, Labelled]], remember: bool) -> list[ReadFrame]:
        """A frame for each (number of a module, its class, (label, gradient)...), all in one launch."""
        unread: list[Tensor] = []
        frames: list[tuple[int, str, list[tuple[str, Any, Rule]], list[int]]] = []
        for number, class_name, labelled in groups:
            lines: list[tuple[str, Any, Rule]] = []
            firsts: list[int] = []
            for label, gradient in labelled:
                rule = self.rule(number, label)
                firsts.append(len(lines))
                for part_label, part in capture.opened(label, gradient) if rule.is_shown else ():
                    lines.append((part_label, len(unread) if capture.is_tensor(part) else capture.stand_in(part), rule))
                    if capture.is_tensor(part):
                        unread.append(part)
            frames.append((number, class_name, lines, firsts))
        measurement = measure(self._recorder, unread)
        read = measurement.being_read()
        self.tensors += len(read)
        self.bytes_read += sum(map(measurement.size, read))
        for i in read if remember else ():
            self._known.insert(unread[i], Place(measurement, i), measurement.size(i))
        return [
            ReadFrame(
                PendingFrame(
                    batch_number,
                    self.names[number],
                    class_name,
                    tuple(
                        PendingLine(
                            label,
                            Place(measurement, content) if isinstance(content, int) else content,
                            True,
                            rule.allowed,
                        )
                        for label, content, rule in lines
                    ),
                    starts_batch=False,
                ),
                firsts,
            )
            for number, class_name, lines, firsts in frames
        ]

"""Where the tensors that modules take and give lie in autograd's graph, and who made the nodes between them.

What is known of a node is kept in its own `metadata`, where it goes when the node goes. No tensor is kept, and no node.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backward_roots import Edge
from .gradient_cause import AGAIN, REPEATABLE, SUM

__all__ = ["ACCUMULATE", "GradientGraph", "Parent", "Place", "Tap", "Use"]

ACCUMULATE = "torch::autograd::AccumulateGrad"
# They pass on numbers as they are.
HARMLESS = frozenset(
    f"{name}Backward{i}"
    for name in ("View", "UnsafeView", "Transpose", "T", "Permute", "Unsqueeze", "Squeeze", "Alias", "Clone", "Reshape")
    for i in range(5)
)
_keys = itertools.count()


class Place(NamedTuple):
    """A line of a module: `number` is the module's, `name` its qualified name."""

    number: int
    name: str
    class_name: str
    label: str


class Use(NamedTuple):
    """Nodes by which a tensor goes into another one."""

    module: str
    """In whose own forward they were made."""
    of: Tap
    """The other one."""
    operations: frozenset[str]
    """Those of `of` that lie before it, these included that lead elsewhere."""


@dataclass(eq=False)
class Tap:
    """A tensor that a module took or gave, where its gradient is read."""

    place: Place
    """Where it was met first: innermost, of modules that give it on."""
    batch_number: int
    made_in: int
    """The backward that has recomputed it, or -1."""
    is_shown: bool = False
    """Whether its gradient is read."""
    uses: list[Use] = field(default_factory=list)
    also_used_by: set[str] = field(default_factory=set)
    """Modules that had used it in their own forward before it was met."""
    leaves: bool = False
    """Whether the model gives it to its caller."""


class Parent(NamedTuple):
    """A node whose gradient goes to a tensor."""

    modules: frozenset[str]
    """In whose own forward it was made; empty where it was not made in one that is known."""
    is_followed: bool
    """Whether `on_node` is told of it."""


class _Known:
    """Of a node."""

    __slots__ = ("is_followed", "is_hooked", "taps", "walked_by")

    def __init__(self) -> None:
        self.taps: dict[int, Tap] = {}  # by the number of the node's output
        self.walked_by: set[str] = set()
        self.is_hooked = False
        self.is_followed = False


class GradientGraph:
    """The taps of one monitor.

    Args:
        on_gradients: called with taps and gradients by a node before it runs, from `register_prehook`: in place of
            hooks on tensors, since the node is that of the very version that a module gave, whatever is written later.
        on_node: called with the tap that a node leads on from, the name of its module, the traceback of its forward,
            and the gradients that it made and those that it got, when it has run; only where anomaly mode is on.
    """

    def __init__(
        self,
        on_gradients: Callable[[dict[int, Tap], tuple[Tensor | None, ...]], None],
        on_node: Callable[[Tap, str, list[str], Any, Any], None],
    ) -> None:
        self._key = f"overflowstat-{next(_keys)}"
        self._on_gradients = on_gradients
        self._on_node = on_node
        self._users: dict[int, tuple[weakref.ref[Tensor], dict[str, frozenset[str]]]] = {}  # of leaves, by their id

    def users(self, weight: Tensor) -> Mapping[str, frozenset[str]]:
        """The modules in whose own forward a leaf was used, with the operations there in all batches."""
        found = self._users.get(id(weight))
        return found[1] if found is not None and found[0]() is weight else {}

    def knows(self, node: Any) -> bool:
        """Whether a node was made in the forward of a module."""
        return self._key in node.metadata

    def tap_at(self, node: Any, number: int) -> Tap | None:
        """The tensor that is an output of a node."""
        known: _Known | None = node.metadata.get(self._key)
        return None if known is None else known.taps.get(number)

    def add_call(
        self,
        inputs: Iterable[tuple[Place, Tensor, bool]],
        outputs: Iterable[tuple[Place, Tensor, bool]],
        caller: str | None,
        batch_number: int,
    ) -> None:
        """A module has run, the innermost first.

        Args:
            inputs, outputs: those that have a node, each with whether its gradient is to be read.
            caller: the module around it, None for the root.
        """
        given = list(outputs)
        ends = {(tensor.grad_fn, tensor.output_nr) for _, tensor, _ in given}
        begun: list[tuple[str, Any, Tap]] = []
        for place, tensor, is_shown in given:
            tap, is_new = self._tap(place, tensor, is_shown, batch_number)
            tap.leaves = tap.leaves or caller is None
            if is_new:
                begun.append((place.name, tensor.grad_fn, tap))
        stops = set()
        for place, tensor, is_shown in inputs:
            end = (tensor.grad_fn, tensor.output_nr)
            if end in ends:  # given as it is, or written to
                continue
            if caller is None:
                stops.add(end)
                continue
            tap, is_new = self._tap(place, tensor, is_shown, batch_number)
            if is_new:
                begun.append((caller, tensor.grad_fn, tap))
        for module, node, tap in begun:
            self._walk(module, node, tap, stops)

    def _known(self, node: Any) -> _Known:
        metadata = node.metadata
        known: _Known | None = metadata.get(self._key)
        if known is None:
            known = metadata[self._key] = _Known()
        return known

    def parents(self, roots: Iterable[Edge], tap: Tap | None, leaf: Tensor | None) -> list[Parent] | None:
        """The nodes whose gradients go to a tensor, one for each way; None if it is not met on any way from the roots.

        Cost: a walk through the whole graph.
        """

        def is_it(node: Any, number: int) -> bool:
            if tap is None:
                return node.name() == ACCUMULATE and node.variable is leaf
            return self.tap_at(node, number) is tap

        outside = Parent(frozenset(), False)
        nodes = []
        met = set()
        found: list[Parent] = []
        for node, number in roots:
            if node not in met:
                met.add(node)
                nodes.append(node)
                if is_it(node, number):
                    found.append(outside)
        while nodes:
            node = nodes.pop()
            known: _Known | None = node.metadata.get(self._key)
            for following, number in node.next_functions:
                if following is None:
                    continue
                if is_it(following, number):
                    found.append(outside if known is None else Parent(frozenset(known.walked_by), known.is_followed))
                if following not in met:
                    met.add(following)
                    nodes.append(following)
        return found or None

    def _tap(self, place: Place, tensor: Tensor, is_shown: bool, batch_number: int) -> tuple[Tap, bool]:
        """And whether it was met for the first time."""
        known = self._known(tensor.grad_fn)
        tap = known.taps.get(tensor.output_nr)
        is_new = tap is None
        if tap is None:
            tap = Tap(place, batch_number, torch._C._current_graph_task_id())
            tap.also_used_by.update(known.walked_by)
            known.taps[tensor.output_nr] = tap
        if is_shown and not tap.is_shown:
            tap.place, tap.is_shown = place, True
            if not known.is_hooked:
                known.is_hooked = True
                taps, on_gradients = known.taps, self._on_gradients
                assert tensor.grad_fn is not None
                tensor.grad_fn.register_prehook(lambda gradients: on_gradients(taps, gradients))
        return tap, is_new

    def _walk(self, module: str, start: Any, tap: Tap, stops: set[Any]) -> None:
        """From a tap down to those next to it. Each node is met once, or once for each tap that leads to it."""
        nodes = [start]
        met = {start}
        names = set()
        reached: list[Tap] = []
        leaves: list[Tensor] = []
        while nodes:
            node = nodes.pop()
            known = self._known(node)
            if (name := node.name()) not in HARMLESS:
                if name in names and name not in REPEATABLE:
                    names.add(AGAIN)
                names.add(name)
            if not known.is_followed and torch.is_anomaly_enabled():
                known.is_followed = True
                self._hook_node(tap, module, node)
            known.walked_by.add(module)
            for following, number in node.next_functions:
                if following is None or (following, number) in stops:
                    continue
                if following.name() == ACCUMULATE:
                    leaves.append(following.variable)
                elif (found := self.tap_at(following, number)) is not None:
                    reached.append(found)
                elif following not in met:
                    met.add(following)
                    nodes.append(following)
                else:
                    names.add(SUM)
        operations = frozenset(names)
        for found in reached:
            found.uses.append(Use(module, tap, operations))
        for leaf in leaves:
            self._use(leaf, module, operations)

    def _use(self, leaf: Tensor, module: str, operations: frozenset[str]) -> None:
        key = id(leaf)
        found = self._users.get(key)
        if found is None or found[0]() is not leaf:
            users = self._users
            found = users[key] = weakref.ref(leaf, lambda _: users.pop(key, None)), {}
        found[1][module] = found[1].get(module, operations) | operations

    def _hook_node(self, tap: Tap, module: str, node: Any) -> None:
        on_node, traceback = self._on_node, node.metadata.get("traceback_", [])
        node.register_hook(lambda made, got: on_node(tap, module, traceback, made, got))

"""In anomaly mode, the nodes of a backward, each looked at: where gradients went bad, and which others have that.

A node is known by its own `metadata`, where what comes to it is noted until it runs. No node is kept, and no gradient.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from . import capture
from .bad_tensors import first_bad_tensor, kinds_in
from .cause import Cause
from .gradient_cause import cause_of_one
from .gradient_graph import ACCUMULATE
from .kept_tensors import KeptTensors
from .measurement import measure
from .operations import Birth, Operations
from .recorder import Recorder
from .row import NonFinite
from .run_state import RunState
from .stats import TensorStats
from .verdict import Operand

__all__ = ["GradientBirth", "GradientBirths"]

# Those that torch generates, which do nothing but compute; user code, collectives and checkpoints have others.
_COMPUTES_ONLY = re.compile(r"[A-Za-z0-9]+Backward\d+|torch::autograd::CopySlices")
_keys = itertools.count()


@dataclass(frozen=True, slots=True)
class GradientBirth:
    """A node that made bad gradients of finite ones."""

    module: str
    """In whose own forward the node was made."""
    operation: str
    """The node's name."""
    source: str | None
    """The line that made it."""
    cause: Cause
    inside: str | None
    """The operation of aten in it that gave the first bad number, if that is known."""
    operands: tuple[Operand, ...]
    """Of that."""
    task: int
    """Of the backward, which may be one inside of another."""


class GradientBirths:
    """Of one backward, with those that run inside of it.

    Args:
        recorder: reads what nodes make and get.
        model: the root.
        is_finite: whether the forward is known to have given finite numbers for an output of a node.
    """

    def __init__(self, recorder: Recorder, model: nn.Module, is_finite: Callable[[Any, int], bool]) -> None:
        self._key = f"overflowstat-births-{next(_keys)}"
        self._recorder = recorder
        self._model = model
        self._is_finite = is_finite
        self._of_leaves: dict[int, GradientBirth | None] = {}
        self.is_complete = True
        """Whether all gradients of all nodes that were followed could be read."""

    def of(self, node: Any, number: int) -> GradientBirth | None:
        """Of the bad gradient that has come to an output of a node which has not run yet; None if that is not known."""
        found: GradientBirth | None = node.metadata.get(self._key, {}).get(number)
        return found

    def of_leaf(self, leaf: Tensor) -> GradientBirth | None:
        return self._of_leaves.get(id(leaf))

    def follow(self, module: str, traceback: list[str], made: Sequence[Any], got: Sequence[Any]) -> None:
        """The node that has just run, while it still has what the forward saved for it.

        Cost: a pass over its gradients, and a wait for them. Where it made bad ones of finite ones it runs once more.
        """
        node: Any = torch._C._current_autograd_node()
        came: dict[int, GradientBirth | None] = node.metadata.pop(self._key, {})
        count = len(made)
        contents = self._read([*made, *got])
        bad = {i for i, parts in contents.items() if any(_is_bad(part) for part in parts)}
        if not any(i < count for i in bad):
            return
        if all(i < count for i in bad):
            birth = self._nested() if isinstance(node, BackwardCFunction) else None
            birth = birth or self._birth(node, module, traceback, count, contents, got)
        else:
            birth = next((came[i - count] for i in sorted(bad) if came.get(i - count) is not None), None)
        for i, (following, number) in enumerate(node.next_functions):
            if i not in bad or following is None:
                continue
            if following.name() == ACCUMULATE:
                self._of_leaves.setdefault(id(following.variable), birth)
            else:
                following.metadata.setdefault(self._key, {}).setdefault(number, birth)

    def _read(self, gradients: Sequence[Any]) -> dict[int, list[TensorStats | str]]:
        """What each holds, or its parts do."""
        parts: list[tuple[int, Tensor]] = []
        for i, gradient in enumerate(gradients):
            for _, part in capture.opened("", gradient) if capture.is_tensor(gradient) else ():
                if capture.is_tensor(part):
                    parts.append((i, part))
                else:
                    self.is_complete = False
        measurement = measure(self._recorder, [part for _, part in parts])
        found: dict[int, list[TensorStats | str]] = {}
        for position, (i, _) in enumerate(parts):
            content = measurement.content(position)
            self.is_complete = self.is_complete and isinstance(content, TensorStats)
            found.setdefault(i, []).append(content)
        return found

    def _nested(self) -> GradientBirth | None:
        """What a backward inside of this one has made, whose gradients the node of a reentrant checkpoint gives on.

        None where that is not one and the same for all that is no weight.
        """
        task, weights = torch._C._current_graph_task_id(), set(map(id, self._model.parameters()))
        births = {birth for leaf, birth in self._of_leaves.items() if leaf not in weights}
        only = births.pop() if len(births) == 1 else None
        return None if only is None or only.task == task else only

    def _birth(
        self,
        node: Any,
        module: str,
        traceback: list[str],
        count: int,
        contents: Mapping[int, Sequence[TensorStats | str]],
        got: Sequence[Any],
    ) -> GradientBirth:
        inside = self._inside(node, got)
        cause = Cause("unknown", "") if inside is None else inside.cause
        if inside is None:
            cause = self._cause(node, count, contents) or cause
        return GradientBirth(
            module,
            node.name(),
            _source(traceback),
            cause,
            None if inside is None else inside.operation,
            () if inside is None else inside.operands,
            torch._C._current_graph_task_id(),
        )

    def _inside(self, node: Any, got: Sequence[Any]) -> Birth | None:
        """The operation that does it, by running a node once more on what it got."""
        if isinstance(node, BackwardCFunction) or not _COMPUTES_ONLY.fullmatch(node.name()):
            return None
        kept = KeptTensors()
        operations = Operations(self._recorder, self._model, kept)
        try:
            with RunState.now().restored(), torch.no_grad(), operations:
                made = node(*got)
            bad = first_bad_tensor(self._recorder, made)
            if bad is None or operations.failure:
                return None
            origin = operations.origin_of(bad, kinds_in(self._recorder, bad))
            return origin if isinstance(origin, Birth) else None
        except Exception:  # of checkpoints, which give what was saved only once
            return None
        finally:
            kept.put_back()

    def _cause(self, node: Any, count: int, contents: Mapping[int, Sequence[TensorStats | str]]) -> Cause | None:
        """Where nothing in the node has made it: it was in what the forward had saved, or it cannot be run again."""
        name = node.name()
        saved = _bad_saved(self._recorder, node)
        if saved:
            following, number = node.next_functions[0]
            is_root = name == "SqrtBackward0" and NonFinite.NAN in saved.get("result", NonFinite.POSINF)
            if is_root and following is not None and self._is_finite(following, number):
                return Cause("domain", "sqrt has values from 0 on; of nan it gives nan, also where the gradient is 0")
            return Cause("unknown", f"the forward has saved for it what is not finite: {', '.join(saved)}")
        all_got = [part for i, parts in contents.items() if i >= count for part in parts]
        bad = [part for i, parts in contents.items() if i < count for part in parts if _is_bad(part)]
        if len(all_got) != 1 or not isinstance(all_got[0], TensorStats) or not isinstance(bad[0], TensorStats):
            return None
        return cause_of_one({name}, all_got[0], bad[0], is_input_finite=False, is_output_finite=False)


def _is_bad(content: TensorStats | str) -> bool:
    return isinstance(content, TensorStats) and content.is_bad


def _bad_saved(recorder: Recorder, node: Any) -> dict[str, NonFinite]:
    """What the forward saved for a node that is not finite, by its name."""
    found = {}
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
                kinds = kinds_in(recorder, value) if capture.is_tensor(value) else None
            except Exception:  # it is not to be had twice
                continue
            if kinds:
                found[name.removeprefix("_saved_")] = kinds
    return found


_TORCH = os.path.dirname(torch.__file__) + os.sep


def _source(traceback: list[str]) -> str | None:
    """The last line that is not torch's, of texts as `traceback.format_stack` makes them."""
    for text in reversed(traceback):
        parts = text.split('"', 2)
        if len(parts) == 3 and not parts[1].startswith(_TORCH):
            return f"{os.path.basename(parts[1])}:{parts[2].split(',')[1].replace('line', '').strip()}"
    return None

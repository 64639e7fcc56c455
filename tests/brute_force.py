"""What a monitor should find, the slow and obvious way: plain hooks that look at every value as they come by it.

Shares nothing with the package: another walk over structures, another reading of policies, the numbers by NumPy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from device_on_cpu import DTYPES
from expected_rows import expected_row
from torch import Tensor, nn
from wrapper import Wrapper


class Selector(NamedTuple):
    """As a policy takes it, and what it means."""

    text: str | type[nn.Module]
    has_module: Callable[[str, nn.Module], bool]
    has_label: Callable[[str], bool] | None

    def has(self, name: str, module: nn.Module, label: str) -> bool:
        return self.has_module(name, module) and (self.has_label is None or self.has_label(label))


class Line(NamedTuple):
    label: str
    content: str
    """What is known of a tensor, in words that compare."""
    bad: str
    """How many numbers in it are not finite, by kind, and where the first is; empty if it may hold them."""
    is_judged: bool


class Frame(NamedTuple):
    batch: int
    module: str
    class_name: str
    lines: tuple[Line, ...]

    @property
    def bad_lines(self) -> list[Line]:
        bad = [line for line in self.lines if line.bad]
        return bad if any(line.is_judged for line in bad) else []


class Detection(NamedTuple):
    frame: Frame
    before: list[tuple[int, str]]
    """(batch, module) of the frames that a report shows, the bad one last."""


def plain(x: Tensor) -> Tensor:
    """Without subclass and gradient."""
    return x.data.as_subclass(Tensor)


def opened(label: str, x: Tensor) -> list[tuple[str, Tensor | str]]:
    """(label, what holds numbers) of a tensor that may be one of those that hold others, as the documents tell."""
    if isinstance(x, Wrapper):
        return [line for name, part in x.parts.items() for line in opened(f"{label}.{name}", part)]
    if x.is_nested and x.layout == torch.jagged:
        return [(f"{label}.values", x.values()), (f"{label}.offsets", x.offsets())]  # type: ignore[attr-defined]
    if x.is_nested:
        return [(f"{label}.values", torch.cat([row.reshape(-1) for row in x.detach().unbind()]))]
    if x.layout == torch.sparse_coo:
        return [(f"{label}.values", x._values())]
    return [(f"{label}.values", x.values())] if x.layout == torch.sparse_csr else [(label, x)]


def unopened(x: Tensor) -> str:
    if type(x).__name__ in ("Wrapper", "NestedTensor"):
        return type(x).__name__
    return "nested" if x.is_nested else str(x.layout).removeprefix("torch.")


def word(x: Tensor) -> str:
    """Of a tensor whose numbers cannot be read."""
    if x.is_meta:
        return "meta"
    if x.dtype not in DTYPES:
        return str(x.dtype).removeprefix("torch.")
    return "empty here" if x.numel() and x.untyped_storage().nbytes() == 0 else ""


def row(x: Tensor) -> tuple[str, dict[str, int], Any]:
    """(what is known, counts by kind of number, coordinates of the first bad one)"""
    x = plain(x)
    if x._is_zerotensor():
        x = torch.zeros(x.shape, dtype=x.dtype)
    expected = expected_row(x.resolve_neg() if x.is_neg() else x)
    counts = {"nan": expected["nan_count"], "inf": expected["posinf_count"], "-inf": expected["neginf_count"]}
    return f"{tuple(x.shape)} {x.dtype} {sorted(expected.items())}", counts, expected["first_bad"]


def inside(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, (tuple, list)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return [(f"[{key}]", value[key]) for key in value]
    if type(value).__name__ == "Data":
        return [(".first", value.first), (".second", value.second)]
    return [("[0]", value.a), ("[1]", value.b)] if type(value).__name__ == "Pair" else None


def walk(label: str, value: Any, depth: int = 0) -> list[tuple[str, Any]]:
    if isinstance(value, Tensor):
        return [(label, value)]
    items = inside(value)
    if items and depth == 8:
        return [(label, "too deep")]
    return [found for suffix, item in items or () for found in walk(label + suffix, item, depth + 1)]


def in_tuples(label: str, value: Any, depth: int) -> list[tuple[str, Any]]:
    if not isinstance(value, tuple) or depth == 0:
        return [(label, value)]
    return [found for i, item in enumerate(value) for found in in_tuples(f"{label}[{i}]", item, depth - 1)]


class BruteForce:
    """Watches a case's model until it is asked what a monitor should have found."""

    def __init__(self, case: Any) -> None:
        self.case = case
        self.nested = case.options["nested"]
        self.frames: list[Frame] = []
        self.batch = 0
        self.called: set[nn.Module] = set()
        self.rows: list[tuple[int, int] | None] = []
        self.names: dict[nn.Module, str] = {}
        for name, module in case.model.named_modules():
            if module not in self.names and (module is case.model or self.may_watch(name, module)):
                self.names[module] = name
                module.register_forward_hook(self.hook, with_kwargs=True)
        self.weight_names = {module: self.usual_names(module) for module in self.names}

    def may_watch(self, name: str, module: nn.Module) -> bool:
        include = self.case.include is None or any(s.has_module(name, module) for s in self.case.include)
        return include and not any(s.has_label is None and s.has_module(name, module) for s in self.case.exclude)

    def is_selected(self, selector: Selector, module: nn.Module, label: str, is_childs: bool) -> bool:
        """By what the line is in its module, or, of a weight of a child, by what it would be in the child."""
        name = self.names[module]
        if selector.has(name, module, label):
            return True
        child_name, _, own_label = label.partition(".")
        child = module._modules[child_name] if is_childs else None
        return child is not None and selector.has(f"{name}.{child_name}".strip("."), child, own_label)

    def is_shown(self, module: nn.Module, label: str, is_childs: bool) -> bool:
        def has(selector: Selector) -> bool:
            return self.is_selected(selector, module, label, is_childs)

        include = self.case.include is None or any(map(has, self.case.include))
        return include and not any(map(has, self.case.exclude))

    def usual_names(self, module: nn.Module) -> list[str]:
        """In the order in which the module got them."""
        own = vars(module).items()
        return [name for name, value in own if name in ("weight", "bias") and isinstance(value, Tensor)]

    def weights(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        found: list[tuple[str, Tensor | None]] = list(module._parameters.items())
        if self.nested:
            found += [(name, vars(module)[name]) for name in self.weight_names[module]]
        if self.case.options["buffers"]:
            found += module._buffers.items()
        kept: list[tuple[str, Tensor]] = []
        for name, weight in found:
            if weight is not None and all(weight is not other for _, other in kept):
                kept.append((name, weight))
        return kept

    def is_watching(self) -> bool:
        return self.batch in self.case.options["trace_batch_nums"] or self.batch % self.case.options["every_n"] == 0

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.is_watching():
            with torch._C.DisableTorchFunctionSubclass():
                self.see(module, args, kwargs, output)

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.called.add(module)
        shown: list[tuple[str, Any, bool, bool]] = [(n, w, True, True) for n, w in self.weights(module)]
        if self.nested:
            for name, child in module._modules.items():
                if child in self.names and child not in self.called:
                    assert child is not None
                    shown += [(f"{name}.{n}", w, True, False) for n, w in self.weights(child)]
            for i, value in enumerate(args):
                shown += [(n, v, False, True) for n, v in walk(f"input[{i}]", value) or [(f"input[{i}]", value)]]
            for name, value in kwargs.items():
                shown += [(n, v, False, True) for n, v in walk(f"input[{name}]", value)]
            shown += [(n, v, False, True) for n, v in walk("output", output) or [("output", output)]]
            shown = [
                (name, part, is_weight, is_judged)
                for label, value, is_weight, is_judged in shown
                for name, part in (opened(label, value) if isinstance(value, Tensor) else [(label, value)])
            ]
        else:
            shown += [(n, v, False, True) for n, v in in_tuples("input", args, 1)]
            shown += [(n, v, False, True) for n, v in in_tuples("output", output, 2)]
        shown = [each for each in shown if self.is_shown(module, each[0], is_childs=not each[3])]
        is_real = any(isinstance(v, Tensor) and not v.is_meta for _, v, is_weight, _ in shown if not is_weight)
        lines = [
            self.line(module, label, "offloaded" if is_real and is_weight and value.is_meta else value, is_judged)
            for label, value, is_weight, is_judged in shown
        ]
        if lines or not self.case.has_policy:
            self.frames.append(Frame(self.batch, self.names[module], type(module).__name__, tuple(lines)))

    def line(self, module: nn.Module, label: str, value: Any, is_judged: bool) -> Line:
        if isinstance(value, str) and value in ("offloaded", "too deep"):
            return Line(label, value, "", is_judged)
        if not isinstance(value, Tensor):
            return Line(label, "None" if value is None else "not a tensor", "", is_judged)
        kind = unopened(value)
        if kind != "strided":
            return Line(label, kind, "", is_judged)
        if said := word(value):
            return Line(label, said, "", is_judged)
        content, counts, first = row(value)
        means = [kinds for s, kinds in self.case.allow if self.is_selected(s, module, label, is_childs=not is_judged)]
        allowed = {kind for kinds in means for kind in kinds}
        is_bad = any(count for kind, count in counts.items() if kind not in allowed)
        return Line(label, content, f"{counts} {first}" if is_bad else "", is_judged)

    def detections(self) -> list[Detection]:
        """The first bad frame of each batch that is not traced."""
        found: list[Detection] = []
        kept: deque[Frame] = deque(maxlen=self.case.options["max_frames_to_save"])
        batches = set()
        for frame in self.frames:
            kept.append(frame)
            if frame.batch in self.case.options["trace_batch_nums"]:
                kept.clear()
            elif frame.bad_lines and frame.batch not in batches:
                batches.add(frame.batch)
                found.append(Detection(frame, [(each.batch, each.module) for each in kept]))
                kept.clear()
        return found


def bits(value: Any) -> list[Any]:
    """All that there is to tell of a structure of tensors, bit for bit."""
    if not isinstance(value, Tensor):
        items = inside(value)
        if items is None:
            return [type(value), repr(value)]
        return [type(value), *([suffix, bits(item)] for suffix, item in items)]
    with torch._C.DisableTorchFunctionSubclass():
        is_plain = type(value).__name__ not in ("Wrapper", "NestedTensor") and not value.is_quantized
        state: list[Any] = [type(value), tuple(value.shape) if not value.is_nested else None, value.dtype]
        state += [value.requires_grad, value.is_inference() or value._version, value.is_conj(), value.is_neg()]
        if is_plain and value.layout == torch.strided and not value.is_nested:
            state.append(value.stride())
            if not word(value):
                state.append(raw(value))
        elif value.is_quantized:
            state.append(raw(value.int_repr()))
        else:
            state += [raw(part) for _, part in opened("", value) if isinstance(part, Tensor) and not word(part)]
    return state


def raw(x: Tensor) -> bytes:
    x = plain(x)
    if x._is_zerotensor():
        return b"zeros"
    whole = x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(whole.view(-1).view(torch.uint8).numpy())


def all_bits(values: Iterable[Any]) -> list[Any]:
    return [bits(value) for value in values]

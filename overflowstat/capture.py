"""The walk over what a hook is given: which tensors there are, and by which names. csrc/walk.h does the same."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

__all__ = ["MAX_DEPTH", "MAX_VALUES", "TOO_DEEP", "TOO_MANY", "inputs", "items", "outputs", "stand_in", "weights"]

# Of one input or output. What lies beyond is a line that says so.
MAX_DEPTH = 8
MAX_VALUES = 1000
TOO_DEEP = "too deep"
TOO_MANY = "too many"

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of each of a module's own, once. Not by parameters(), which models override."""
    met = set()
    for name, weight in module._parameters.items():
        if weight is not None and id(weight) not in met:
            met.add(id(weight))
            yield name, weight


def inputs(args: object, kwargs: Mapping[str, object] | None, nested: bool) -> Iterator[tuple[str, object]]:
    """(label, value) of each input: `input[i]`, and if `nested` also by keyword, `input[name]`, and what is inside."""
    if not nested:
        yield from _open_tuples(args, "input", depth=1)
        return
    for i, value in enumerate(args if isinstance(args, tuple) else ()):
        yield from _Walk().values(value, f"input[{i}]", depth=0)
    for name, value in (kwargs or {}).items():
        yield from _Walk().tensors(value, f"input[{name}]", depth=0)


def outputs(output: object, nested: bool) -> Iterator[tuple[str, object]]:
    """(label, value) of each output: `output`, `output[i]`, `output[i][j]`, and if `nested` whatever is inside."""
    if nested:
        yield from _Walk().values(output, "output", depth=0)
    else:
        yield from _open_tuples(output, "output", depth=2)


def stand_in(value: object) -> str:
    """What a line says in place of numbers for a value that is no tensor."""
    return value.text if isinstance(value, _LeftOut) else "None" if value is None else "not a tensor"


def items(value: Any) -> list[tuple[str, object]] | None:
    """What is in a structure, each with what is added to the structure's label; None for what is none.

    Structures are tuples, lists, mappings, dataclasses, caches of keys and values as transformers has them, and
    whatever is registered with torch.utils._pytree.
    """
    if isinstance(value, _PLAIN):
        return None
    try:
        return _items(value)
    except Exception:  # of a structure's own making
        return None


def _items(value: Any) -> list[tuple[str, object]] | None:
    kind = type(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return [(f".{name}", item) for name, item in zip(kind._fields, value, strict=False)]
    if isinstance(value, (tuple, list)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return [(f"[{key}]", item) for key, item in value.items()]
    if isinstance(value, nn.Module):
        return None
    if dataclasses.is_dataclass(kind):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(kind)]
    if any("Cache" in base.__name__ for base in kind.__mro__) and isinstance(getattr(value, "layers", None), list):
        return [
            (f".layers[{i}].{name}", getattr(layer, name, None))
            for i, layer in enumerate(value.layers)
            for name in ("keys", "values")
        ]
    if kind in _pytree.SUPPORTED_NODES:
        children, _ = _pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return [(f"[{i}]", child) for i, child in enumerate(children)]
    return None


class _LeftOut:
    """In place of what was not looked at."""

    def __init__(self, text: str) -> None:
        self.text = text


class _Walk:
    """Over one input or output."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def values(self, value: object, label: str, depth: int) -> Iterator[tuple[str, object]]:
        """The tensors; or the value itself if there is none."""
        found = False
        for shown in self.tensors(value, label, depth):
            found = True
            yield shown
        if not found:
            yield label, value

    def tensors(self, value: object, label: str, depth: int) -> Iterator[tuple[str, object]]:
        if isinstance(value, Tensor):
            yield label, value
            return
        inside = items(value)
        if inside and depth == MAX_DEPTH:
            yield label, _LeftOut(TOO_DEEP)
            return
        for suffix, item in inside or ():
            if self._left == 0:
                return
            self._left -= 1
            if self._left == 0:
                yield label + suffix, _LeftOut(TOO_MANY)
                return
            yield from self.tensors(item, label + suffix, depth + 1)


def _open_tuples(value: object, label: str, depth: int) -> Iterator[tuple[str, object]]:
    """Tuples are opened to this depth, as the reference does; all else is one value."""
    if depth > 0 and isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _open_tuples(item, f"{label}[{i}]", depth - 1)
    else:
        yield label, value

"""The walk over what a hook is given, in a form that torch.compile can trace: no generators, and no code of its own to
ask what an object is. capture.py tells what is seen."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..capture import MAX_DEPTH, TOO_DEEP
from ..dynamo import constant_where_traced

__all__ = ["Found", "given", "is_told_by"]

PLAIN = (Tensor, nn.Parameter)
NONE, NO_TENSOR = "None", "not a tensor"

Found = tuple[list[str], list[str], list[Tensor]]
"""Labels; for each of them what it is that is no tensor, empty for a tensor; the tensors."""

ONE_EACH = (["input[0]", "output"], ["", ""])


def given(args: object, kwargs: Mapping[str, object] | None, output: object, nested: bool) -> Found:
    """All that a module was given and gave."""
    # Most modules, whose walk is a third of what the trace of their hook takes.
    if not kwargs and isinstance(args, tuple) and len(args) == 1 and type(args[0]) is Tensor and type(output) is Tensor:
        return (*ONE_EACH, [args[0], output])
    found: Found = ([], [], [])
    if not nested:
        _open_tuples(args, "input", 1, found)
        _open_tuples(output, "output", 2, found)
        return found
    for i, value in enumerate(args if isinstance(args, tuple) else ()):
        _values(value, f"input[{i}]", found)
    for name, value in (kwargs or {}).items():
        _tensors(value, f"input[{name}]", 0, found)
    _values(output, "output", found)
    return found


def _values(value: object, label: str, found: Found) -> None:
    if isinstance(value, Tensor):
        _add(value, label, found)
        return
    before = len(found[0])
    _tensors(value, label, 0, found)
    if len(found[0]) == before:
        _add(value, label, found)


def _add(value: object, label: str, found: Found) -> None:
    labels, words, tensors = found
    labels.append(label)
    if isinstance(value, Tensor) and type(value) in PLAIN:
        words.append("")
        tensors.append(value)
    elif isinstance(value, Tensor):
        words.append(type(value).__name__)
    else:
        words.append(NONE if value is None else NO_TENSOR)


def _tensors(value: object, label: str, depth: int, found: Found) -> None:
    if isinstance(value, Tensor):
        _add(value, label, found)
    elif value is None or isinstance(value, (bool, int, float, str)):
        return
    elif depth == MAX_DEPTH:
        if isinstance(value, (tuple, list, Mapping)) and len(value) > 0:
            found[0].append(label)
            found[1].append(TOO_DEEP)
    elif isinstance(value, tuple) and hasattr(type(value), "_fields"):
        for name, item in zip(type(value)._fields, value, strict=False):  # type: ignore[attr-defined]
            _tensors(item, f"{label}.{name}", depth + 1, found)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            _tensors(item, f"{label}[{i}]", depth + 1, found)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _tensors(item, f"{label}[{name}]", depth + 1, found)
    elif isinstance(value, (nn.Module, type, torch.dtype, torch.device)):
        return
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _tensors(getattr(value, field.name, None), f"{label}.{field.name}", depth + 1, found)
    elif _opened_as(type(value)) == "cache" and isinstance(getattr(value, "layers", None), list):
        for i, layer in enumerate(value.layers):  # type: ignore[attr-defined]
            for name in ("keys", "values"):
                _tensors(getattr(layer, name, None), f"{label}.layers[{i}].{name}", depth + 1, found)
    elif _opened_as(type(value)) == "node":
        found[0].append(label)
        found[1].append(type(value).__name__)


def is_told_by(word: str) -> bool:
    """Whether this stands for what has no numbers that could be read."""
    return word in ("", NONE, NO_TENSOR, TOO_DEEP)


# Runs as it is where a graph is made, and what it says of a type is built in.
@constant_where_traced
def _opened_as(kind: type) -> str:
    if any("Cache" in base.__name__ for base in kind.__mro__):
        return "cache"
    return "node" if kind in _pytree.SUPPORTED_NODES else ""


def _open_tuples(value: object, label: str, depth: int, found: Found) -> None:
    if depth > 0 and isinstance(value, tuple):
        for i, item in enumerate(value):
            _open_tuples(item, f"{label}[{i}]", depth - 1, found)
    else:
        _add(value, label, found)

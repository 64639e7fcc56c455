"""The walk over what a hook is given: which tensors there are, and by which names. csrc/walk.h does the same."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from .dynamo import not_compiled

__all__ = [
    "MAX_DEPTH",
    "MAX_VALUES",
    "TOO_DEEP",
    "TOO_MANY",
    "inputs",
    "items",
    "opened",
    "outputs",
    "parts",
    "stand_in",
    "weight_names",
    "weights",
]

# Of one input or output. What lies beyond is a line that says so.
MAX_DEPTH = 8
MAX_VALUES = 1000
TOO_DEEP = "too deep"
TOO_MANY = "too many"

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """The names under which a module has its weights, or will have them though they are no parameters.

    Those of its parameters, which offloading, merging and sharding replace by plain tensors; and where such have come
    already, the names that are usual.
    """
    plain = (name for name in ("weight", "bias") if isinstance(module.__dict__.get(name), Tensor))
    return (*(name for name, weight in module._parameters.items() if weight is not None), *plain)


def weights(module: nn.Module, names: Sequence[str], buffers: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each of a module's own, once.

    Its parameters, not by parameters(), which models override; plain tensors in place of a parameter of these `names`;
    and, if asked for, its buffers.
    """
    found: list[tuple[str, Tensor]] = [(n, weight) for n, weight in module._parameters.items() if weight is not None]
    if len(found) < len(names):
        there = {name for name, _ in found}
        plain = ((name, module.__dict__.get(name)) for name in names if name not in there)
        found += [(name, weight) for name, weight in plain if isinstance(weight, Tensor)]
    if buffers:
        found += [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
    met = set()
    for name, weight in found:
        if id(weight) not in met:
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


def opened(label: str, value: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """(label, tensor) of each that holds the numbers of a tensor, as `parts` has them; else just this."""
    inside = parts(value) if isinstance(value, Tensor) and depth < MAX_DEPTH else None
    if inside is None:
        yield label, value
    for suffix, part in inside or ():
        yield from opened(label + suffix, part, depth + 1)


def parts(tensor: Tensor) -> list[tuple[str, Tensor]] | None:
    """What holds the numbers of a tensor that has none itself, each with what is added to its label; None for others.

    For a wrapper that is a class of its own (DTensor, quantized weights, jagged tensors) what it has here, as it tells
    by `__tensor_flatten__`: no collective, and no wait for one. For a sparse tensor its values. Nothing is copied.
    """
    kind = type(tensor)
    try:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                if kind.__name__ == "AsyncCollectiveTensor":  # which may still be on its way
                    return None
                names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
                inside = [(name, part) for name in names if isinstance(part := getattr(tensor, name), Tensor)]
                return [("" if len(inside) == 1 else f".{name.lstrip('_')}", part) for name, part in inside]
            if tensor.layout == torch.sparse_coo:
                return [(".values", tensor._values())]
            if tensor.layout in _COMPRESSED:
                return [(".values", tensor.values())]
            if tensor.is_nested:
                storage = tensor.untyped_storage()
                return [(".values", torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage))]
    except Exception:  # of a class that does not tell, or on a device that is gone
        pass
    return None


def stand_in(value: object) -> str:
    """What a line says in place of numbers for a value that is no tensor."""
    return value.text if isinstance(value, _LeftOut) else "None" if value is None else "not a tensor"


@not_compiled
def items(value: Any) -> list[tuple[str, object]] | None:
    """What is in a structure, each with what is added to the structure's label; None for what is none.

    For a tensor, its `parts`. Structures are tuples, lists, mappings, dataclasses, caches of keys and values as
    transformers has them, and whatever is registered with torch.utils._pytree.
    """
    if isinstance(value, _PLAIN):
        return None
    if isinstance(value, Tensor):
        return cast("list[tuple[str, object]] | None", parts(value))
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

"""The walk over what a hook is given: which tensors there are, and by which names. csrc/walk.h does the same."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

from .dynamo import not_compiled

__all__ = [
    "EMPTY_HERE",
    "MAX_DEPTH",
    "MAX_VALUES",
    "NOT_VISIBLE",
    "TOO_DEEP",
    "TOO_MANY",
    "devices",
    "inputs",
    "is_tensor",
    "is_wrapper",
    "items",
    "opened",
    "outputs",
    "parts",
    "stand_in",
    "weight_names",
    "weights",
    "without_padding",
]

# Of one input or output. What lies beyond is a line that says so.
MAX_DEPTH = 8
MAX_VALUES = 1000
TOO_DEEP = "too deep"
TOO_MANY = "too many"
# In place of a tensor.
EMPTY_HERE = "empty here"
NOT_VISIBLE = "not visible"

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_OWN = "overflowstat_own_numbers"
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """By its type: objects may say of themselves what they like, as mocks and proxies do. None of their code is run."""
    return issubclass(type(value), Tensor)


def text(name: object) -> str:
    """A key or a name as it can be shown: what UTF-8 does not have as a code, what has no text by its class."""
    try:
        return str(name).encode("utf-8", "backslashreplace").decode()
    except Exception:  # of the key's own making
        return f"<{type(name).__name__}>"


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """The names under which a module has its weights, or will have them though they are no parameters.

    Those of its parameters, which offloading, merging and sharding replace by plain tensors; and where such have come
    already, the names that are usual. Also those of objects of TorchScript, in which packed weights are.
    """
    own = module.__dict__.items()
    plain = (name for name, value in own if is_tensor(value) and name in ("weight", "bias"))
    weights = tuple(name for name, weight in module._parameters.items() if weight is not None)
    if isinstance(module, torch.jit.ScriptModule):  # which is such an object, and has its parameters in it
        return weights
    packed = (name for name, value in own if isinstance(value, torch.ScriptObject))
    return (*weights, *plain, *packed)


def weights(module: nn.Module, names: Sequence[str], buffers: bool) -> Iterator[tuple[str, Tensor | None]]:
    """(name, tensor) of each of a module's own, once; (name, None) of one that is not visible.

    Its parameters, not by parameters(), which models override; plain tensors and buffers in place of a parameter of
    these `names`; and, if asked for, all its buffers.
    """
    found: list[tuple[str, Any]] = [(name, weight) for name, weight in module._parameters.items() if weight is not None]
    replaced = [name for name in names if name not in module._parameters]
    found += [shown for name in replaced for shown in _replacement(module, name)]
    if buffers:
        found += [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
    met = set()
    for name, weight in found:
        if weight is None or id(weight) not in met:
            met.add(id(weight))
            yield name, weight if weight is None else _held_here(weight)


def _held_here(weight: Any) -> Any:
    """DeepSpeed's ZeRO-3 leaves a parameter without elements while it is not gathered, and keeps this process's part of
    it as its attribute `ds_tensor`."""
    if not is_tensor(weight) or is_wrapper(weight):
        return weight
    with torch._C.DisableTorchFunction():
        if weight.numel() != 0:
            return weight
    part = weight.__dict__.get("ds_tensor")
    return without_padding(weight, part) if is_tensor(part) else weight


def without_padding(weight: Tensor, part: Tensor) -> Tensor:
    """Of a part in ZeRO-3 what is of the weight. All parts are of one size, and what that adds nobody has written to.

    The part keeps what is given, so that it is the same tensor each time. One that is away, on a disk, is left out.
    """
    whole, size = (held.__dict__.get("ds_numel") for held in (weight, part))
    if not (isinstance(whole, int) and isinstance(size, int) and dist.is_available() and dist.is_initialized()):
        return part
    here = min(max(0, whole - size * dist.get_rank(weight.__dict__.get("ds_process_group"))), size)
    if part.numel() != size:
        return weight
    if here == size:
        return part
    known = part.__dict__.get(_OWN)
    if known is None or known.numel() != here or _address(known) != _address(part):
        known = part.__dict__[_OWN] = part.detach().view(-1)[:here]
    return cast(Tensor, known)


def _address(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())  # an empty one has none of its own


def _replacement(module: nn.Module, name: str) -> list[tuple[str, Any]]:
    """What is where a parameter was, as `weights` gives it; nothing if that has become None or is parametrized."""
    value = next((members[name] for members in (module.__dict__, module._buffers) if name in members), ...)
    if value is None or is_tensor(value):
        return [] if value is None else [(name, value)]
    parametrized = module._modules.get("parametrizations")
    return [] if isinstance(parametrized, nn.ModuleDict) and name in parametrized else [(name, None)]


def devices(module: nn.Module) -> set[torch.device]:
    """Where a module's parameters and buffers are, as far as they tell."""
    own = [weight for _, weight in weights(module, (), buffers=True)]
    found = [part for weight in own for _, part in opened("", weight)]
    with torch._C.DisableTorchFunction():
        return {part.device for part in found if is_tensor(part) and not is_wrapper(part)}


def inputs(args: object, kwargs: Mapping[str, object] | None, nested: bool) -> Iterator[tuple[str, object]]:
    """(label, value) of each input: `input[i]`, and if `nested` also by keyword, `input[name]`, and what is inside."""
    if not nested:
        yield from _open_tuples(args, "input", depth=1)
        return
    for i, value in enumerate(args if isinstance(args, tuple) else ()):
        yield from _Walk().values(value, f"input[{i}]", depth=0)
    for name, value in (kwargs or {}).items():
        yield from _Walk().tensors(value, f"input[{text(name)}]", depth=0)


def outputs(output: object, nested: bool) -> Iterator[tuple[str, object]]:
    """(label, value) of each output: `output`, `output[i]`, `output[i][j]`, and if `nested` whatever is inside."""
    if nested:
        yield from _Walk().values(output, "output", depth=0)
    else:
        yield from _open_tuples(output, "output", depth=2)


def opened(label: str, value: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """(label, tensor) of each that holds the numbers of a tensor, as `parts` has them; else just this."""
    inside = parts(value) if is_tensor(value) and depth < MAX_DEPTH else None
    if inside is None:
        yield label, value
    for suffix, part in inside or ():
        if isinstance(part, str):
            yield label + suffix, _LeftOut(part)
        else:
            yield from opened(label + suffix, part, depth + 1)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it is of a class that does operations itself, and may have its numbers elsewhere."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def parts(tensor: Tensor) -> list[tuple[str, Tensor | str]] | None:
    """What holds the numbers of a tensor that has none itself, each with what is added to its label; None for others.

    For a wrapper that is a class of its own (DTensor, quantized weights, jagged tensors) what it has here, as it tells
    by `__tensor_flatten__`: no collective is called, but the result of one is waited for. For a sparse tensor its
    values, for a nested one those of all its parts, or of each where others lie between them. Inside torch.func's
    transforms the tensor that is transformed, with the dimension that vmap hides. A word in place of what is not there.
    Nothing is copied.
    """
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            inside = _parts(tensor)
    except Exception:  # of a class that does not tell, or on a device that is gone
        return None
    if inside is not None and len(inside) > MAX_VALUES:
        inside[MAX_VALUES - 1 :] = [(inside[MAX_VALUES - 1][0], TOO_MANY)]
    return inside


def _parts(tensor: Tensor) -> list[tuple[str, Tensor | str]] | None:
    if is_wrapper(tensor):
        if type(tensor).__name__ == "AsyncCollectiveTensor":  # by the module that is next it would be waited for
            with torch._C._DisableTorchDispatch():
                return [("", tensor.trigger_wait())]  # type: ignore[attr-defined]
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inside = [(name, part) for name in names if is_tensor(part := getattr(tensor, name))]
        if len(inside) == 1:
            is_elsewhere = _has_no_elements(inside[0][1]) and not _has_no_elements(tensor)
            return [("", EMPTY_HERE if is_elsewhere else inside[0][1])]
        return [(f".{name.lstrip('_')}", part) for name, part in inside] or None
    with torch._C._DisableTorchDispatch():  # no mode is told of it; a wrapper may need its own dispatch to answer
        return _parts_in_torch(tensor)


def _parts_in_torch(tensor: Tensor) -> list[tuple[str, Tensor | str]] | None:
    if torch._C._functorch.is_batchedtensor(tensor) or torch._C._functorch.is_gradtrackingtensor(tensor):
        return [("", torch._C._functorch.get_unwrapped(tensor))]
    if tensor.layout == torch.sparse_coo:
        return [(".values", tensor._values())]
    if tensor.layout in _COMPRESSED:
        return [(".values", tensor.values())]
    if tensor.is_nested:
        if tensor.is_contiguous():
            memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
            count = tensor.numel()
            return [(".values", memory[:count] if memory.numel() >= count else EMPTY_HERE)]
        return [(f"[{i}]", part) for i, part in enumerate(tensor.unbind())]
    return None


def _has_no_elements(tensor: Tensor) -> bool:
    try:
        return tensor.numel() == 0
    except Exception:  # of a wrapper that does not tell
        return True


def stand_in(value: object) -> str:
    """What a line says in place of numbers for a value that is no tensor."""
    return value.text if type(value) is _LeftOut else "None" if value is None else "not a tensor"


@not_compiled
def items(value: Any) -> list[tuple[str, object]] | None:
    """What is in a structure, each with what is added to the structure's label; None for what is none. MAX_VALUES of
    it, since it may have any number or make them as they are asked for.

    For a tensor, its `parts`. Structures are tuples, lists, mappings, dataclasses, caches of keys and values as
    transformers has them, and whatever is registered with torch.utils._pytree.
    """
    if is_tensor(value):
        return cast("list[tuple[str, object]] | None", parts(value))
    try:
        return None if isinstance(value, _PLAIN) else _items(value)
    except Exception:  # of a structure's own making
        return None


def _items(value: Any) -> list[tuple[str, object]] | None:
    kind = type(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return [(f".{name}", item) for name, item in zip(kind._fields, value, strict=False)]
    if isinstance(value, (tuple, list)):
        return [(f"[{i}]", item) for i, item in enumerate(islice(value, MAX_VALUES))]
    if isinstance(value, Mapping):
        return [(f"[{text(key)}]", item) for key, item in islice(value.items(), MAX_VALUES)]
    if isinstance(value, nn.Module):
        return None
    if dataclasses.is_dataclass(kind):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(kind)]
    if any("Cache" in base.__name__ for base in kind.__mro__) and isinstance(getattr(value, "layers", None), list):
        return [
            (f".layers[{i}].{name}", getattr(layer, name, None))
            for i, layer in enumerate(value.layers[:MAX_VALUES])
            for name in ("keys", "values")
        ]
    if kind in _pytree.SUPPORTED_NODES:
        children, _ = _pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return [(f"[{i}]", child) for i, child in enumerate(islice(children, MAX_VALUES))]
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
        if is_tensor(value):
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

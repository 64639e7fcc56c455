"""One of every kind of tensor that a hook may meet, each with what a line should say of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from special_tensors import NOT_FINITE, NUMBERS, from_codes, part, random_codes, strided_views
from torch import Tensor, nn
from wrapper import Wrapper

__all__ = ["KINDS", "Kind", "Made", "numbers", "quiet"]

# What the lines of a value should show: (what is added to its label, the plain tensor that it is, or a word).
Shown = list[tuple[str, "Tensor | str"]]
Made = tuple[Tensor, Shown]
Call = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Kind:
    make: Callable[[bool], Made]
    """Of whether a NaN is in it."""
    can_be_bad: bool = True
    within: Callable[[Call, Tensor], Any] = lambda call, value: call(value)
    """Calls it with the value, as a transform of torch.func does."""


@contextmanager
def quiet() -> Iterator[None]:
    """Sparse, nested and quantized tensors are prototypes or leaving, and say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def numbers(dtype: torch.dtype, count: int, bad: bool) -> Tensor:
    """Of all magnitudes; the last one is a NaN if `bad`."""
    codes = random_codes(dtype, count, np.random.default_rng(3))
    if bad:
        codes[-1] = NOT_FINITE[part(dtype)][-1]
    return from_codes(codes, dtype)


def floats(bad: bool, *shape: int) -> Tensor:
    return numbers(torch.float32, int(np.prod(shape)), bad).view(shape)


class Tagged(Tensor):
    """A subclass that changes nothing but its type."""


class Untouchable(Tensor):
    """A subclass that lets no operation near it, not even a question for its shape."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} is not allowed here")


class Untold(Wrapper):
    __tensor_flatten__ = None  # type: ignore[assignment]


class ToldWrongly(Wrapper):
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["no_such_part"], None


class HasNone(Wrapper):
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [], None


class Itself(Wrapper):
    """Holds itself, as far as it tells."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        self.again = self
        return ["again"], None


class Quantized8(Tensor):
    """Integers and a scale, as torchao keeps a quantized weight."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Quantized8:
        made: Quantized8 = Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)
        made.int_data, made.scale = data, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["int_data", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def plain(x: Any) -> Any:
            return x.int_data * x.scale if isinstance(x, Quantized8) else x

        if func is torch.ops.aten.detach.default:
            return Quantized8(args[0].int_data, args[0].scale)
        return func(*torch.utils._pytree.tree_map(plain, args), **(kwargs or {}))

    int_data: Tensor
    scale: Tensor


def same(make: Callable[[bool], Tensor]) -> Kind:
    """The value is the plain tensor itself."""

    def made(bad: bool) -> Made:
        value = make(bad)
        return value, [("", value)]

    return Kind(made)


def only_good(kind: Kind) -> Kind:
    return Kind(kind.make, False, kind.within)


def word(make: Callable[[], Tensor], said: str, suffix: str = "") -> Kind:
    return Kind(lambda bad: (make(), [(suffix, said)]), can_be_bad=False)


def of(make: Callable[[bool], tuple[Tensor, Tensor]], suffix: str = "") -> Kind:
    """(value, the plain tensor that is seen of it)"""

    def made(bad: bool) -> Made:
        value, plain = make(bad)
        return value, [(suffix, plain)]

    return Kind(made)


def strided(name: str) -> Kind:
    """A view of NaNs, between which its own elements are finite."""

    def made(bad: bool) -> Made:
        like = strided_views(torch.float32)[name]
        view = torch.full((3 * 6 * 7 * 8 * 9,), math.nan).as_strided(like.shape, like.stride(), like.storage_offset())
        for place in np.ndindex(*like.shape):
            view[place].fill_(sum(place) - 5.5)
        if bad:
            view[(-1,) * view.dim()].fill_(math.nan)
        return view, [("", view)]

    return Kind(made, can_be_bad=name != "empty")


def requires_grad(bad: bool) -> tuple[Tensor, Tensor]:
    leaf = floats(bad, 3, 4).requires_grad_()
    return leaf, leaf.detach()


def not_a_leaf(bad: bool) -> tuple[Tensor, Tensor]:
    made = floats(bad, 3, 4).requires_grad_() * 1
    return made, made.detach()


def of_inference(bad: bool) -> Tensor:
    with torch.inference_mode():
        return floats(bad, 3, 4).clone()


def coo(bad: bool) -> tuple[Tensor, Tensor]:
    values = floats(bad, 3)
    with quiet():
        return torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [2, 0, 1]]), values, (4, 4)).coalesce(), values


def uncoalesced(bad: bool) -> tuple[Tensor, Tensor]:
    values = floats(bad, 3)
    return torch.sparse_coo_tensor(torch.tensor([[1, 1, 1]]), values, (4,)), values


def hybrid(bad: bool) -> tuple[Tensor, Tensor]:
    values = floats(bad, 2, 5)
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3, 5)), values


def sparse_with_grad(bad: bool) -> tuple[Tensor, Tensor]:
    value, plain = coo(bad)
    return value.requires_grad_(), plain


def compressed(layout: str) -> Callable[[bool], tuple[Tensor, Tensor]]:
    def made(bad: bool) -> tuple[Tensor, Tensor]:
        values = floats(bad, 2)
        dense = torch.zeros(4, 4)
        dense[0, 1], dense[2, 3] = values
        with quiet():
            if layout in ("bsr", "bsc"):
                value = getattr(dense, f"to_sparse_{layout}")((2, 2))
                blocks = torch.zeros(2, 2, 2)
                blocks[0, 0, 1], blocks[1, 0, 1] = values
                return value, blocks
            return getattr(dense, f"to_sparse_{layout}")(), values

    return made


def nested(bad: bool) -> tuple[Tensor, Tensor]:
    with quiet():
        return torch.nested.nested_tensor([torch.ones(2, 3), floats(bad, 4, 3)]), torch.cat(
            [torch.ones(6), floats(bad, 12)]
        )


def nested_in_more(bad: bool) -> tuple[Tensor, Tensor]:
    """What comes after its parts is not in it."""
    memory = torch.cat([floats(bad, 6), torch.full((5,), math.nan)])
    sizes, strides, offsets = torch.tensor([[2, 2], [1, 2]]), torch.tensor([[2, 1], [2, 1]]), torch.tensor([0, 4])
    with quiet():
        return torch._nested_view_from_buffer(memory, sizes, strides, offsets), memory[:6]


def nested_freed() -> Tensor:
    value, _ = nested(False)
    value.untyped_storage().resize_(0)
    return value


def nested_chunk(bad: bool) -> Made:
    """What is between its parts is not in it."""
    with quiet():
        whole = torch.nested.nested_tensor([torch.full((2, 6), float("nan")), torch.full((3, 6), float("nan"))])
        part = whole.chunk(3, -1)[1]
        for rows in part.unbind():
            rows.fill_(2.0)
        if bad:
            part.unbind()[1][2, 1] = float("nan")
        return part, [("[0]", torch.full((2, 2), 2.0)), ("[1]", part.unbind()[1])]


def jagged(bad: bool) -> Made:
    values = torch.cat([torch.ones(2, 3), floats(bad, 4, 3)])
    with quiet():
        value = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 6]))
    return value, [(".values", values), (".offsets", torch.tensor([0, 2, 6]))]


def int8_and_scale(bad: bool) -> Made:
    data, scale = torch.tensor([[-128, 3], [5, 7]], dtype=torch.int8), numbers(torch.float32, 2, bad).view(2, 1)
    return Quantized8(data, scale), [(".int_data", data), (".scale", scale)]


def wrapped(bad: bool) -> tuple[Tensor, Tensor]:
    inner = floats(bad, 3, 4)
    return Wrapper(inner), inner


def twice_wrapped(bad: bool) -> Made:
    value, shown = int8_and_scale(bad)
    return Wrapper(Wrapper(value)), shown


def wrapped_sparse(bad: bool) -> tuple[Tensor, Tensor]:
    value, plain = coo(bad)
    return Wrapper(value), plain


def async_wrapper(bad: bool) -> tuple[Tensor, Tensor]:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    plain = floats(bad, 3)
    made: Tensor = AsyncCollectiveTensor(plain)
    return made, plain


def wide_wrapper(bad: bool) -> Made:
    parts = [torch.ones(1)] * 1500
    return Wrapper(*parts), [*((f".part{i}", parts[i]) for i in range(999)), (".part999", "too many")]


def freed(count: int = 0) -> Tensor:
    value = torch.ones(3, 4)
    value.untyped_storage().resize_(count)
    return value


def on_subclass(kind: type[Tensor]) -> Callable[[bool], tuple[Tensor, Tensor]]:
    def made(bad: bool) -> tuple[Tensor, Tensor]:
        plain = floats(bad, 3, 4)
        return plain.as_subclass(kind), plain

    return made


def under_vmap(call: Call, value: Tensor) -> Any:
    return torch.func.vmap(lambda x: (call(x), x)[1])(value)


def under_two_vmaps(call: Call, value: Tensor) -> Any:
    return torch.func.vmap(torch.func.vmap(lambda x: (call(x), x)[1]), in_dims=1)(value)


def under_grad(call: Call, value: Tensor) -> Any:
    return torch.func.grad(lambda x: (call(x), x.sum())[1])(value)


def under_hessian(call: Call, value: Tensor) -> Any:
    return torch.func.grad(lambda y: torch.func.grad(lambda x: (call(x), (x * x).sum())[1])(y).sum())(value)


def under_vmap_of_grad(call: Call, value: Tensor) -> Any:
    return torch.func.vmap(torch.func.grad(lambda x: (call(x), x.sum())[1]))(value)


def under_jvp(call: Call, value: Tensor) -> Any:
    return torch.func.jvp(lambda x: (call(x), x * 1)[1], (value,), (torch.ones_like(value),))


def functional(within: Callable[[Call, Tensor], Any]) -> Kind:
    return Kind(same(lambda bad: floats(bad, 3, 4)).make, within=within)


def quantized(per_channel: bool) -> Tensor:
    with quiet():
        if per_channel:
            scales, zeros = torch.tensor([0.1, 0.2]), torch.zeros(2, dtype=torch.long)
            return torch.quantize_per_channel(torch.ones(2, 3), scales, zeros, 0, torch.qint8)
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *NUMBERS,
]
EMPTY_SHAPES = [(0,), (3, 0), (0, 4, 2), (2, 0, 3)]
KINDS: dict[str, Kind] = {
    **{
        str(dtype): Kind(same(lambda bad, dtype=dtype: numbers(dtype, 12, bad).view(3, 4)).make, dtype in NUMBERS)  # type: ignore[misc]
        for dtype in DTYPES
    },
    **{
        f"empty {shape} {dtype}": only_good(same(lambda bad, s=shape, d=dtype: torch.empty(s, dtype=d)))  # type: ignore[misc]
        for shape in EMPTY_SHAPES
        for dtype in (torch.float32, torch.bool, torch.complex64)
    },
    **{f"view, {name}": strided(name) for name in strided_views(torch.float32)},
    "scalar": same(lambda bad: numbers(torch.float32, 1, bad)[0]),
    "expanded": same(lambda bad: floats(bad, 3, 1).expand(3, 1000)),
    "conjugated": same(lambda bad: numbers(torch.complex64, 6, bad).conj()),
    "negated": same(lambda bad: numbers(torch.complex64, 6, bad).conj().imag),
    "channels last": same(lambda bad: floats(bad, 2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "channels last 3d": same(lambda bad: floats(bad, 2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d)),
    "requires grad": of(requires_grad),
    "not a leaf": of(not_a_leaf),
    "parameter": of(lambda bad: (nn.Parameter(p := floats(bad, 3, 4)), p)),
    "of inference mode": same(of_inference),
    "sparse coo": of(coo, ".values"),
    "sparse coo, uncoalesced": of(uncoalesced, ".values"),
    "sparse coo, hybrid": of(hybrid, ".values"),
    "sparse coo, requires grad": of(sparse_with_grad, ".values"),
    "sparse coo, empty": only_good(of(lambda bad: (torch.zeros(3, 3).to_sparse(), torch.empty(0)), ".values")),
    **{f"sparse {layout}": of(compressed(layout), ".values") for layout in ("csr", "csc", "bsr", "bsc")},
    "nested": of(nested, ".values"),
    "nested, a chunk": Kind(nested_chunk),
    "nested, in more memory": of(nested_in_more, ".values"),
    "nested, freed": word(nested_freed, "empty here", ".values"),
    "jagged": Kind(jagged),
    "quantized": word(lambda: quantized(False), "quint8"),
    "quantized by channel": word(lambda: quantized(True), "qint8"),
    "mkldnn": word(lambda: torch.ones(3).to_mkldnn(), "_mkldnn"),
    "meta": word(lambda: torch.empty(3, 4, device="meta"), "meta"),
    "lazy": word(lambda: nn.UninitializedParameter(), "uninitialized"),
    "subclass": of(on_subclass(Tagged)),
    "subclass that refuses": of(on_subclass(Untouchable)),
    "wrapper": of(wrapped),
    "wrapper in wrappers": Kind(twice_wrapped),
    "wrapper of sparse": of(wrapped_sparse, ".values"),
    "wrapper of meta": word(lambda: Wrapper(torch.empty(3, device="meta")), "meta"),
    "wrapper of freed": word(lambda: Wrapper(freed()), "empty here"),
    "wrapper of many": only_good(Kind(wide_wrapper)),
    "int8 and scale": Kind(int8_and_scale),
    "wrapper that does not tell": word(lambda: Untold(torch.ones(3)), "Untold"),
    "wrapper that tells wrongly": word(lambda: ToldWrongly(torch.ones(3)), "ToldWrongly"),
    "wrapper of nothing": word(lambda: HasNone(torch.ones(3)), "HasNone"),
    "wrapper of itself": word(lambda: Itself(torch.ones(3)), "Itself"),
    "wrapper that refuses to tell its device": word(
        lambda: Untold(torch.ones(3), dispatch_device=True, dispatch_layout=True), "Untold"
    ),
    "wrapper that refuses to tell its size": word(
        lambda: Untold(torch.ones(3), dispatch_sizes_strides_policy="sizes"), "Untold"
    ),
    "result of a collective": of(async_wrapper),
    "vmap": functional(under_vmap),
    "vmap of vmap": functional(under_two_vmaps),
    "grad": functional(under_grad),
    "grad of grad": functional(under_hessian),
    "vmap of grad": functional(under_vmap_of_grad),
    "jvp": functional(under_jvp),
    "freed": word(freed, "empty here"),
    "freed in part": word(lambda: freed(16), "empty here"),
}
if hasattr(torch, "float4_e2m1fn_x2"):
    KINDS["float4"] = word(lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1fn_x2")

"""Random modules with random signatures, that call each other and hand on random structures of every kind of tensor.

Everything comes from one seed: two cases of the same seed do the same, down to the last bit.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from brute_force import Selector
from device_on_cpu import DTYPES
from special_tensors import with_bad
from torch import Tensor, nn
from torch.utils import _pytree
from transformers.utils.generic import ModelOutput
from wrapper import Wrapper

T = TypeVar("T")
CAN_COMPUTE = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64]
REAL = [dtype for dtype in CAN_COMPUTE if dtype.is_floating_point]


class Boom(Exception):
    """A module's own."""


@dataclass
class Data:
    first: Any
    second: Any


class Typed(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output(ModelOutput):
    logits: Any = None
    states: Any = None


class Pair:
    """Only torch.utils._pytree knows what is in it."""

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


_pytree.register_pytree_node(Pair, lambda pair: ([pair.a, pair.b], None), lambda children, _: Pair(*children))


class Counting(Tensor):
    """Counts what is done with tensors of it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counting.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Maker:
    """Where all that is random in a case comes from."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.calls_left = 0
        self.leaves: list[Tensor] = []  # that have gradients
        self.badness = self.choice([0.0, 0.0, 0.01, 0.05, 0.3])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is drawn in this block is drawn once more after it."""
        states = self.random.getstate(), self.numpy.bit_generator.state, self.torch.get_state()
        calls_left, leaves, counted = self.calls_left, len(self.leaves), Counting.calls
        try:
            yield
        finally:
            self.random.setstate(states[0])
            self.numpy.bit_generator.state = states[1]
            self.torch.set_state(states[2])
            self.calls_left, Counting.calls = calls_left, counted
            del self.leaves[leaves:]

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def choice(self, of: list[T]) -> T:
        return self.random.choice(of)

    def count(self, most: int) -> int:
        return self.random.randint(0, most)

    def plain(self, dtype: torch.dtype, count: int) -> Tensor:
        bad = [self.count(max(0, count - 1)) for _ in range(self.count(3) + 1)] if self.chance(self.badness) else []
        return with_bad(dtype, count, bad, self.numpy)

    def shape(self) -> list[int]:
        sizes = [0, 1, 1, 2, 3, 5, 17] if self.chance(0.2) else [1, 2, 3, 5]
        return [self.choice(sizes) for _ in range(self.count(3))]

    def strided(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.choice(DTYPES)
        shape = self.shape()
        dense = self.plain(dtype, int(np.prod(shape, dtype=int))).view(shape)
        if self.chance(0.02):
            dense = self.plain(dtype, 20000).view(100, 200)
        return self.view(dense)

    def view(self, x: Tensor) -> Tensor:
        for _ in range(self.count(2)):
            d = self.count(x.dim() - 1) if x.dim() else -1
            kind = self.count(8)
            if kind == 0 and x.dim():
                x = x.transpose(0, d)
            elif kind == 1 and x.dim():
                start = self.count(x.shape[d])
                x = x.narrow(d, start, x.shape[d] - start)
            elif kind == 2 and x.dim():
                x = x[(slice(None),) * d + (slice(self.count(1), None, 2),)]
            elif kind == 3:
                x = x.unsqueeze(0).expand(self.choice([1, 2, 4]), *x.shape)
            elif kind == 4 and x.is_contiguous() and x.numel() > 8:
                x = x.as_strided((3, 4), (2, 1))
            elif kind == 5 and x.dtype in (torch.complex64, torch.complex128):
                x = x.conj().imag if self.chance(0.5) else x.conj()
            elif kind == 6 and x.dtype in (torch.float16, torch.float32, torch.float64):
                x = torch._neg_view(x)
            elif kind == 7 and x.dim() and x.shape[d]:
                x = x.select(d, self.count(x.shape[d] - 1))
        return x

    def odd(self) -> Tensor:
        """A tensor that is not just numbers in memory."""
        kind = self.count(12)
        dtype = self.choice(REAL)
        rows = self.plain(dtype, 6).view(3, 2)
        if kind == 0:
            return torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), rows, (4, 2), check_invariants=False)
        if kind == 1:
            args = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]), self.plain(dtype, 3)
            return torch.sparse_csr_tensor(*args, (2, 2), check_invariants=False)
        if kind == 2:
            return torch.nested.nested_tensor([rows, rows[:1]], dtype=dtype)
        if kind == 3:
            return torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 1, 3]))
        if kind == 4:
            good = torch.randn(3, 2, generator=self.torch)
            if self.chance(0.5):
                return torch.quantize_per_tensor(good, 0.1, 0, self.choice([torch.qint8, torch.quint8]))
            return torch.quantize_per_channel(good, torch.ones(3), torch.zeros(3), 0, torch.qint8)
        if kind == 5:
            return self.strided().as_subclass(Counting)
        if kind == 6:
            return Wrapper(rows, self.strided())
        if kind == 7:
            return Wrapper(torch.ones(2), Wrapper(self.strided(), rows))
        if kind == 8:
            return torch.empty(self.shape(), dtype=self.choice(DTYPES), device="meta")
        if kind == 9:
            return torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        if kind == 10:
            freed = torch.ones(5, dtype=dtype)
            freed.untyped_storage().resize_(0)
            return freed
        if kind == 11:
            return torch._efficientzerotensor(3)
        with torch.inference_mode():
            return self.strided().clone() if self.chance(0.5) else self.strided()

    def tensor(self) -> Tensor:
        if self.chance(0.2):
            return self.odd()
        x = self.strided(self.choice(CAN_COMPUTE) if self.chance(0.5) else None)
        if x.dtype in REAL and self.chance(0.3) and not torch.is_inference_mode_enabled():
            x = x.detach().requires_grad_()
            self.leaves.append(x)
        return x

    def structure(self, leaf: Callable[[], Any], depth: int = 0) -> Any:
        if depth > 2 or self.chance(0.4):
            return leaf()
        inner = [self.structure(leaf, depth + 1) for _ in range(self.choice([0, 1, 2, 2, 3]))]
        if len(inner) == 2 and self.chance(0.7):
            kind: Any = self.choice([Data, Typed, Pair, Output])
            if kind is not Output:
                return kind(*inner)
            return Output(logits=inner[0], states=torch.ones(1) if inner[1] is None else inner[1])
        if self.chance(0.4):
            keys: list[Any] = ["a", 7, (1, "b")]
            self.random.shuffle(keys)
            return self.choice([dict, OrderedDict])(zip(keys, inner))  # noqa: B905
        return self.choice([tuple, list])(inner)

    def something(self, pool: list[Any]) -> Any:
        """One of a pool, mostly, or something new."""
        if pool and self.chance(0.6):
            return self.choice(pool)
        return self.tensor() if self.chance(0.8) else self.choice([None, 3, 2.5, True, "text", b"x", object, {1}])


class Part(nn.Module):
    """Takes, does and gives something else in each call."""

    def __init__(self, maker: Maker) -> None:
        super().__init__()
        self.maker = maker
        self.required = maker.count(2)
        self.optional = maker.count(2)
        self.takes_more = maker.chance(0.4)
        self.takes_names = maker.chance(0.4)
        self.only_by_name = maker.count(1)

    def takes(self, pool: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments that its forward can be called with."""
        maker = self.maker

        def value() -> Any:
            return maker.structure(lambda: maker.something(pool)) if maker.chance(0.3) else maker.something(pool)

        by_place = maker.count(self.required + self.optional)
        args = [value() for _ in range(by_place)]
        kwargs = {f"r{i}": value() for i in range(by_place, self.required)}
        if by_place >= self.required + self.optional and self.takes_more:
            args += [value() for _ in range(maker.count(2))]
        for i in range(max(by_place, self.required), self.required + self.optional):
            if maker.chance(0.5):
                kwargs[f"o{i}"] = value()
        if self.only_by_name and maker.chance(0.5):
            kwargs["k"] = value()
        if self.takes_names:
            kwargs |= {f"extra{i}": value() for i in range(maker.count(2))}
        return args, kwargs

    def run(self, given: dict[str, Any]) -> Any:
        maker = self.maker
        more, names = given.pop("more", ()), given.pop("names", {})
        pool = [value for name, value in given.items() if name != "self"] + [*more, *names.values()]
        own: list[Any] = [w for w in (*self._parameters.values(), *self._buffers.values()) if w is not None]
        for _ in range(1 + maker.count(4)):
            action = maker.choice([*["call"] * 6, "compute", "compute", "write", "draw", "make"])
            if action == "call" and self._modules and maker.calls_left > 0:
                maker.calls_left -= 1
                pool.append(self.call(maker.choice(list(self._modules.values())), pool))
            elif action == "make":
                pool.append(maker.tensor())
            elif action == "draw":
                pool.append(torch.rand(3))
            else:
                tensors = [x for x in (*pool, *own) if isinstance(x, Tensor) and can_compute(x)]
                if tensors:
                    pool += (write if action == "write" else compute)(maker, maker.choice(tensors))
        if maker.chance(0.03):
            raise Boom
        pool = [value for value in pool if size(value) < 40]
        return maker.structure(lambda: maker.something(pool))

    def call(self, child: Any, pool: list[Any]) -> Any:
        if isinstance(child, Part):
            args, kwargs = child.takes(pool)
            try:
                return child(*args, **kwargs)
            except Boom:
                return None
        if isinstance(child, nn.ModuleList):
            return None
        x = self.maker.plain(torch.float32, 12).clamp(-9, 9).view(3, 4)  # NaN stays
        return child(x, x, x) if isinstance(child, nn.MultiheadAttention) else child(x)


def size(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    elif isinstance(value, (Data, Pair)):
        value = list(vars(value).values())
    return 1 + sum(map(size, value)) if isinstance(value, (tuple, list)) else 1


def can_compute(x: Tensor) -> bool:
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.is_nested:
        return False
    if x.is_meta or x.dtype not in CAN_COMPUTE or x._is_zerotensor():
        return False
    return x.numel() == 0 or x.untyped_storage().nbytes() > 0


def compute(maker: Maker, x: Tensor) -> list[Tensor]:
    kind = maker.count(5)
    try:
        if kind == 0:
            return [x * 2]
        if kind == 1:
            return [x + 1, x - x.detach()]
        if kind == 2:
            return [maker.view(x)]
        if kind == 3:
            return [x.sum()]
        if kind == 4:
            return [x / 0] if maker.chance(maker.badness) else [x / 3]
        return [x.detach(), x.clone()]
    except (RuntimeError, NotImplementedError, TypeError):  # of inference tensors, for one
        return []


def write(maker: Maker, x: Tensor) -> list[Tensor]:
    """In place, but not so that a tensor with the same version and storage would hold something else."""
    kind = maker.count(6)
    grad: AbstractContextManager[Any] = torch.no_grad() if maker.chance(0.8) else torch.enable_grad()
    try:
        with grad:
            if kind == 0:
                x.mul_(2)
            elif kind == 1:
                x.zero_()
            elif kind == 2 and maker.chance(maker.badness) and x.dtype in REAL:
                x.view(-1)[-1:].fill_(maker.choice([float("nan"), float("inf"), -float("inf")]))
            elif kind == 3 and x.dim() == 2:
                x.t_()
            elif kind == 4 and not x.requires_grad and x.is_contiguous() and x.numel() > 2 and x.storage_offset() == 0:
                x.resize_(2)
            elif kind == 5:
                x.data = maker.plain(x.dtype, 6)
            else:
                x.add_(1)
    except (RuntimeError, IndexError, NotImplementedError):  # of a leaf, an expanded tensor
        pass
    return []


def part(maker: Maker) -> Part:
    """With a signature of its own."""
    made = Part(maker)
    names = [f"r{i}" for i in range(made.required)]
    names += [f"o{i}=None" for i in range(made.required, made.required + made.optional)]
    names += ["*more"] if made.takes_more else ["*"] if made.only_by_name else []
    names += ["k=1"] if made.only_by_name else []
    names += ["**names"] if made.takes_names else []
    scope: dict[str, Any] = {}
    exec(f"def forward({', '.join(['self', *names])}):\n    return self.run(dict(locals()))", scope)
    made.forward = scope["forward"].__get__(made)
    weights(maker, made)
    return made


def weights(maker: Maker, module: Part) -> None:
    for name in maker.random.sample(["weight", "bias", "scale"], maker.count(2)):
        if maker.chance(0.1):
            module.register_parameter(name, None)
            continue
        value = maker.strided() if maker.chance(0.9) else torch.empty(2, 2, device="meta")
        if maker.chance(0.1):
            module.__dict__[name] = value  # in place of a parameter; of a usual name it is seen
        else:
            module.register_parameter(name, nn.Parameter(value, value.dtype in REAL and maker.chance(0.8)))
    if "weight" in module._parameters and maker.chance(0.1):
        module.register_parameter("tied", module._parameters["weight"])
    for name in maker.random.sample(["mean", "var"], maker.count(2)):
        module.register_buffer(name, maker.strided() if maker.chance(0.9) else None)


def leaf_module(maker: Maker) -> nn.Module:
    kind = maker.count(6)
    if kind == 0:
        return nn.Linear(4, 4)
    if kind == 1:
        return nn.Dropout(0.5)
    if kind == 2:
        return nn.BatchNorm1d(4)
    if kind == 3:
        return nn.MultiheadAttention(4, 2, dropout=0.1)
    if kind == 4:
        return nn.ModuleList([part(maker)])
    return nn.Identity() if kind == 5 else nn.LayerNorm(4)


def tree(maker: Maker) -> Part:
    """Of parts, each of which has some of those behind it as children: also one in several places."""
    parts = [part(maker) for _ in range(1 + maker.count(5))]
    for i, parent in enumerate(parts):
        behind: list[nn.Module] = [*parts[i + 1 :]]
        for number in range(1 + maker.count(2)):
            child = maker.choice(behind) if behind and maker.chance(0.75) else leaf_module(maker)
            parent.add_module(f"c{number}", child)
    first, last = parts[0], parts[-1]
    if first._parameters.get("weight") is not None and "weight" in last._parameters and maker.chance(0.3):
        last.register_parameter("weight", first._parameters["weight"])
    return first


class Case:
    """A model, what it is called with, and how it is watched."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.maker = maker = Maker(seed)
        self.batches = 1 + maker.count(3)
        self.model = tree(maker)
        self.mode = maker.choice([torch.enable_grad, torch.enable_grad, torch.no_grad, torch.inference_mode])
        self.options: dict[str, Any] = {
            "nested": maker.chance(0.8),
            "buffers": maker.chance(0.4),
            "check": maker.choice(["module", "batch", "step"]),
            "weights": maker.choice(["forward", "on_change"]),
            "every_n": maker.choice([1, 1, 1, 2]),
            "reuse_unchanged": maker.choice([None, True, True, False]),
            "max_frames_to_save": maker.choice([None, 0, 1, 4, 21]),
            "trace_batch_nums": [number for number in range(self.batches) if maker.chance(0.1)],
        }
        self.raises = maker.chance(0.3)
        self.tells_all = maker.chance(0.5)
        self.include: list[Selector] | None = None
        self.exclude: list[Selector] = []
        self.allow: list[tuple[Selector, list[str]]] = []
        if maker.chance(0.35):
            if maker.chance(0.3):
                self.include = [self.selector() for _ in range(1 + maker.count(2))]
            self.exclude = [self.selector() for _ in range(maker.count(2))]
            kinds = [["nan"], ["inf"], ["-inf"], ["nan", "inf"], ["nan", "inf", "-inf"]]
            self.allow = [(self.selector(), maker.choice(kinds)) for _ in range(maker.count(3))]

    @property
    def has_policy(self) -> bool:
        return self.include is not None or bool(self.exclude or self.allow)

    def selector(self) -> Selector:
        maker = self.maker
        name = maker.choice([name for name, _ in self.model.named_modules() if name] or ["c0"])
        label = maker.choice(["output", "output[0]", "input[0]", "input[k]", "weight", "bias", "mean", "c0.weight"])
        return maker.choice(
            [
                Selector(name, lambda n, m: f"{n}.".startswith(f"{name}."), None),
                Selector(nn.Linear, lambda n, m: isinstance(m, nn.Linear), None),
                Selector(f":{label}", lambda n, m: True, lambda shown: shown == label),
                Selector(f"{name}:{label}", lambda n, m: f"{n}.".startswith(f"{name}."), lambda shown: shown == label),
                Selector(":input*", lambda n, m: True, lambda shown: shown.startswith("input")),
                Selector(":*put[?]", lambda n, m: True, lambda s: s[-3:-2] + s[-1:] == "[]" and s[:-3].endswith("put")),
                Selector("*.c1", lambda n, m: "c1" in n.split(".")[1:], None),
                Selector("*:output*", lambda n, m: True, lambda shown: shown.startswith("output")),
            ]
        )

    def run(self) -> Iterator[Any]:
        """What each batch gives: its output, and what became of its backward."""
        for number in range(self.batches):
            self.maker.calls_left = 12
            with self.mode():
                args, kwargs = self.model.takes([])
            yield number
            try:
                with self.mode():
                    output = self.model(*args, **kwargs)
            except Boom as error:
                yield error
            else:
                yield output
            parts = [module for module in self.model.modules() if isinstance(module, Part)]
            weights = [w for module in parts for w in module.parameters(recurse=False) if can_compute(w)]
            if weights and self.maker.chance(0.4):
                write(self.maker, self.maker.choice(weights))

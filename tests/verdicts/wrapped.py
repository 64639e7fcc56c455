"""Where there is more between a model and its numbers than modules that call each other."""

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from verdicts.case import Case, Run, calls, constant, mark

HALF = torch.float16


def large() -> nn.Linear:
    return constant(nn.Linear(2, 2, bias=False), weight=1e20)


class Calls(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)  # <- wrapped-forward
        return y


def wrapped_forward() -> nn.Module:
    """As accelerate does to all modules: the line of the wrapper is of no use to anybody."""
    model = Calls(nn.Sequential(large(), large()))
    for module in model.modules():
        before = module.forward

        def forward(*args: Any, before: Any = before, **kwargs: Any) -> Any:
            return before(*args, **kwargs)

        module.forward = functools.update_wrapper(functools.partial(forward), before)
    return model


class Adapter(nn.Module):
    """Low-rank, beside a layer that is frozen."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = constant(nn.Linear(2, 1, bias=False), weight=30)
        self.up = constant(nn.Linear(1, 2, bias=False), weight=2000)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x)) * 16  # <- adapter
        return y


def hook_that_divides() -> nn.Module:
    model = nn.Sequential(nn.Identity(), nn.Identity())

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output / 0  # <- hook

    model[0].register_forward_hook(hook)
    return model


class ByFunctionalCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(large(), large())

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: weight * 1 for name, weight in self.inner.named_parameters()}
        y: Tensor = torch.func.functional_call(self.inner, weights, (x,))  # <- functional-call
        return y


class InThread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = large()

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            y: Tensor = pool.submit(lambda: self.inner(self.inner(x))).result()  # <- in-thread
        return y


class ByGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([large() for _ in range(3)])

    def run(self, x: Tensor) -> Iterator[Tensor]:
        for layer in self.layers:
            x = layer(x)  # <- by-generator
            yield x

    def forward(self, x: Tensor) -> Tensor:
        *_, last = self.run(x)
        return last


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.exp()  # <- autograd-function

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class ByFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Function.apply(x)  # type: ignore[no-untyped-call,unused-ignore]
        return y


class ByVmap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.func.vmap(lambda row: row / row.sum())(x)  # <- vmap
        return y


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def block(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x).exp().exp()  # <- checkpointed
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return y


class AtRandom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            return x / 0  # <- at-random-below
        return (x * 1e20) * 1e20  # <- at-random-above


def at_random(seed: int) -> Any:
    """The module alone would draw another number."""

    def build() -> tuple[nn.Module, Run]:
        model = Calls(AtRandom())

        def run() -> None:
            torch.manual_seed(seed)
            model(torch.ones(2))

        return model, run

    return build


class EveryOther(nn.Module):
    """The second call does other things than the first: nothing is known of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / 0 if self.calls % 2 else x.log()


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        if not self.lock.acquire(blocking=False):
            raise RuntimeError("called twice")
        return x / 0


class WritesOverItsInput(nn.Module):
    """What the model was given is gone, and cannot be told from what it was not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, xs: list[Tensor]) -> Tensor:
        xs[0].mul_(300)
        y: Tensor = self.inner(xs[0])
        return y


class KeepsInList(nn.Module):
    """What the list holds when the numbers are judged, it did not hold when the model was called."""

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(x / 0)
        return torch.cat(cache)


class PutsIntoItsList(nn.Module):
    """A list of the model's own; run again alone, the one that fills it would find it filled."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps = Fills()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.keeps(x, [])
        return y


class Fills(nn.Module):
    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(x * 1e30 if not cache else x)
        return cache[0] * 1e30  # <- own-list


def under_inference_mode() -> tuple[nn.Module, Run]:
    """Where operations come as they are written, and not as what torch makes of them."""
    model = Calls(nn.Sequential(large(), large()))

    def run() -> None:
        with torch.inference_mode():
            model(torch.ones(1, 2))

    return model, run


class Attends(nn.Module):
    """Run again without gradients, torch's attention would take a way of its own, in one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = constant(nn.MultiheadAttention(4, 2, batch_first=True), in_proj_weight=30000)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]  # <- attention-in-eval
        return y


ONES = torch.ones(1, 2)
IS_BELOW = [bool(torch.rand((), generator=torch.Generator().manual_seed(seed)) < 0.5) for seed in range(4)]
CASES = [
    Case("wrapped-forward", calls(wrapped_forward, ONES), "inner.1", "aten.mm", "accumulation-overflow"),
    Case(
        "adapter", calls(lambda: Adapter(nn.Linear(2, 2)).half(), ONES.half()), "up", "aten.mm", "accumulation-overflow"
    ),
    Case("hook", calls(hook_that_divides, ONES), "0", "aten.div", "division-by-zero"),
    Case("functional-call", calls(ByFunctionalCall, ONES), "inner.1", "aten.mm", "accumulation-overflow"),
    Case("in-thread", calls(InThread, ONES), "inner", "aten.mm", "accumulation-overflow"),
    Case("by-generator", calls(ByGenerator, ONES), "layers.1", "aten.mm", "accumulation-overflow"),
    Case("autograd-function", calls(ByFunction, ONES * 100), "", "aten.exp", "arithmetic-overflow"),
    Case("vmap", calls(ByVmap, torch.tensor([[1.0, 1.0], [0.0, 0.0]])), "", "aten.div", "division-by-zero"),
    Case("checkpointed", calls(Checkpointed, ONES * 5), "", "aten.exp", "arithmetic-overflow"),
    *(
        Case(
            f"at-random-{'below' if is_below else 'above'}",
            at_random(seed),
            "inner",
            "aten.div" if is_below else "aten.mul",
            "division-by-zero" if is_below else "arithmetic-overflow",
        )
        for seed, is_below in enumerate(IS_BELOW)
        if is_below not in IS_BELOW[:seed]
    ),
    Case("every-other", calls(EveryOther, torch.zeros(2)), "", None, "unknown", source=None),
    Case("once", calls(Once, ONES), "", None, "unknown", source=None),
    Case(
        "input-written-over",
        calls(WritesOverItsInput, [torch.full((2,), 300.0, dtype=HALF)]),
        "inner",
        None,
        "unknown",
        label="input[0]",
        produced=False,
        source=None,
    ),
    Case(
        "list-that-was-given",
        lambda: (model := KeepsInList(), lambda: model(ONES, [])),
        "",
        None,
        "unknown",
        label="input[1][0]",
        produced=False,
        source=None,
    ),
    Case("own-list", calls(PutsIntoItsList, ONES), "keeps", "aten.mul", "arithmetic-overflow"),
    Case(
        "inference-mode",
        under_inference_mode,
        "inner.1",
        "aten.mm",
        "accumulation-overflow",
        source=mark("wrapped-forward"),
    ),
    Case(
        "attention-in-eval",
        calls(lambda: Attends().half(), torch.ones(1, 2, 4, dtype=HALF)),
        "attention",
        "aten.addmm",
        "accumulation-overflow",
        label="output[0]",
    ),
]

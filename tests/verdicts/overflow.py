"""Numbers that grow beyond what their dtype holds."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verdicts.case import Case, calls, constant, mark

HALF = torch.float16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = constant(nn.Linear(4, 4), weight=0, bias=20000)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dense(x)  # <- residual-sum
        return y


class Blocks(nn.Module):
    """20000 more in each: 40000, 60000, 80000."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"inner": Block()}) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = block["inner"](x)
        return x


class GatedGelu(nn.Module):
    """T5's: 240 * 260 = 62400 is there still, and dropout divides it by 0.9."""

    def __init__(self) -> None:
        super().__init__()
        self.wi_0 = constant(nn.Linear(4, 64, bias=False), weight=60)
        self.wi_1 = constant(nn.Linear(4, 64, bias=False), weight=65)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(F.gelu(self.wi_0(x)) * self.wi_1(x))  # <- gated-gelu-dropout
        return y


class GatedProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi_0 = constant(nn.Linear(4, 8, bias=False), weight=100)
        self.wi_1 = constant(nn.Linear(4, 8, bias=False), weight=100)
        self.wo = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.wi_0(x))
        hidden = hidden * self.wi_1(x)  # <- gated-gelu-product
        y: Tensor = self.wo(hidden)
        return y


class UnscaledAttention(nn.Module):
    """64 * 40 * 40 = 102400."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2)  # <- attention-without-scaling
        y: Tensor = scores.softmax(-1)
        return y


class Explodes(nn.Module):
    """8 layers, each by 16: 16 ** 4 = 65536 is beyond float16's largest."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([constant(nn.Linear(4, 4, bias=False), weight=4) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)  # <- explodes-over-layers
        return x


class ExpOfLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = constant(nn.Linear(4, 4, bias=False), weight=25)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.head(x).exp()  # <- exp-of-logits
        y: Tensor = weights / weights.sum(-1, keepdim=True)
        return y


class MomentOfSquares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        squares = x.pow(2)  # <- variance-by-moments
        return squares.mean(-1) - x.mean(-1).pow(2)


class SumOfSquares(nn.Module):
    """A layer norm by hand: deviations of 100, whose squares of 1e4 are 64."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        deviation = x - x.mean(-1, keepdim=True)
        variance: Tensor = deviation.pow(2).sum(-1, keepdim=True) / x.shape[-1]  # <- layer-norm-by-hand
        return deviation / torch.sqrt(variance + 1e-5), variance


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(constant(nn.Conv2d(3, 4, 3), weight=60), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stem(x)  # <- convolution
        return y


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = constant(nn.Linear(4, 4), weight=1, bias=0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dense(x)
        y.mul_(30000)  # <- in-place
        return y


class Twice(nn.Module):
    """The very same module, which does it at its second call only."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = constant(nn.Linear(4, 4, bias=False), weight=100)

    def forward(self, x: Tensor) -> Tensor:
        first = self.shared(x)
        second: Tensor = self.shared(first)  # <- shared-module
        return second


class CastsDown(nn.Module):
    """What bfloat16 made, and float16 has to take."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = constant(nn.Linear(4, 4, bias=False), weight=25000)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dense(x)
        return y.half()  # <- bfloat16-to-float16


class Float8(nn.Module):
    """e5m2 ends at 57344."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float8_e5m2)  # <- float8-e5m2


class UnderAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Identity()
        self.dense = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale(x) * 1e5
        with torch.autocast("cpu", HALF):
            y: Tensor = self.dense(x)  # <- autocast
        return y


class RunningTotal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(-1)  # <- running-total


class SafeAndThenNot(nn.Module):
    """The infinity of log(0) is taken out again; another one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        safe = torch.where(x > 0, x.log(), 0.0)
        return (safe + 1).mul(1e30).square()  # <- harmless-infinity


class WithCache(nn.Module):
    """Which cannot be run again without it being written to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        cache.append(x)
        y: Tensor = self.inner(x) * 30000.0
        return y


class Cache:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def append(self, x: Tensor) -> None:
        self.kept.append(x)


ONES = torch.ones(2, 4)
CASES = [
    Case(
        "residual-sum",
        calls(lambda: Blocks().half(), torch.full((2, 4), 20000.0, dtype=HALF)),
        "blocks.2.inner",
        "aten.add",
        "arithmetic-overflow",
    ),
    Case(
        "gated-gelu-dropout",
        calls(lambda: GatedGelu().half(), ONES.half()),
        "dropout",
        "aten.mul",
        "arithmetic-overflow",
    ),
    Case(
        "gated-gelu-product",
        calls(lambda: GatedProduct().half(), ONES.half()),
        "",
        "aten.mul",
        "arithmetic-overflow",
        label="input[0]",
    ),
    Case(
        "attention-without-scaling",
        calls(UnscaledAttention, torch.full((2, 3, 64), 40.0, dtype=HALF)),
        "",
        "aten.bmm",
        "accumulation-overflow",
    ),
    Case(
        "explodes-over-layers",
        calls(lambda: Explodes().half(), ONES.half()),
        "layers.3",
        "aten.mm",
        "accumulation-overflow",
    ),
    Case("exp-of-logits", calls(ExpOfLogits, ONES), "", "aten.exp", "arithmetic-overflow"),
    Case(
        "variance-by-moments",
        calls(MomentOfSquares, torch.full((2, 4), 300.0, dtype=HALF)),
        "",
        "aten.pow",
        "arithmetic-overflow",
    ),
    Case(
        "layer-norm-by-hand",
        calls(lambda: nn.Sequential(nn.Identity(), SumOfSquares()), torch.tensor([[100.0, -100.0] * 32]).half()),
        "1",
        "aten.sum",
        "accumulation-overflow",
        label="output[1]",
    ),
    Case(
        "convolution",
        calls(lambda: ConvNet().half(), torch.full((1, 3, 5, 5), 100.0, dtype=HALF)),
        "stem.0",
        "aten.convolution",
        "accumulation-overflow",
    ),
    Case("in-place", calls(lambda: InPlace().half(), ONES.half()), "", "aten.mul_", "arithmetic-overflow"),
    Case("shared-module", calls(lambda: Twice().half(), ONES.half()), "shared", "aten.mm", "accumulation-overflow"),
    Case(
        "bfloat16-to-float16",
        calls(lambda: CastsDown().bfloat16(), ONES.bfloat16()),
        "",
        "aten._to_copy",
        "cast-overflow",
    ),
    Case("float8-e5m2", calls(Float8, torch.full((4,), 1e5)), "", "aten._to_copy", "cast-overflow"),
    Case("autocast", calls(UnderAutocast, ONES), "dense", "aten._to_copy", "cast-overflow"),
    Case(
        "running-total",
        calls(RunningTotal, torch.full((8,), 10000.0, dtype=HALF)),
        "",
        "aten.cumsum",
        "accumulation-overflow",
    ),
    Case("harmless-infinity", calls(SafeAndThenNot, torch.tensor([0.0, 1.0])), "", "aten.pow", "arithmetic-overflow"),
    # All that is known is where, as nothing is run again.
    Case(
        "cache-object",
        calls(lambda: WithCache().half(), ONES.half() * 3, cache=Cache()),
        "",
        None,
        "unknown",
        source=None,
    ),
    Case(
        "without-drill",
        calls(lambda: Explodes().half(), ONES.half()),
        "layers.3",
        None,
        "unknown",
        source=mark("explodes-over-layers"),
        options={"drill": False},
    ),
]

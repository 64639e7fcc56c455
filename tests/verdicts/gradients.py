"""Gradients that go bad in the backward of what gave finite numbers.

The line is known in torch's anomaly mode only.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verdicts.case import Build, Case, Run, constant

HALF = torch.float16


class Around(nn.Module):
    """Has a module before the one that it is about, as that which its gradient goes to."""

    def __init__(self, middle: nn.Module, width: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.before = nn.Linear(width, width, bias=False, dtype=dtype)
        nn.init.eye_(self.before.weight)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.middle(self.before(x))
        return y


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Distance(nn.Module):
    """From 0, written by hand: 0 / 0, where torch.linalg.vector_norm has 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum(-1).sqrt()  # <- gradient-of-norm-at-0


class LayerNorm(nn.Module):
    """With its eps beside the root in place of under it."""

    def forward(self, x: Tensor) -> Tensor:
        deviation = x - x.mean(-1, keepdim=True)
        scale = deviation.square().mean(-1, keepdim=True).sqrt()  # <- gradient-of-deviation-of-constant-row
        return deviation / (scale + 1e-5)


class Entropy(nn.Module):
    """0 * log(0) is left out; the gradient is 0 there, and times log(0)."""

    def forward(self, p: Tensor) -> Tensor:
        y = p * p.log()  # <- gradient-of-entropy
        return -torch.where(p > 0, y, 0.0).sum(-1)


class MaskedLog(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x.log(), 0.0)


class MaskedExp(nn.Module):
    """As an ELU is written by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x.exp() - 1)  # <- gradient-of-masked-exp


class MaskedRoot(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x >= 0, x.sqrt(), 0.0)  # <- gradient-of-masked-nan


class Angle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.acos()


class Gamma(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x ** (1 / 2.2)  # <- gradient-of-power-at-0


class Ratio(nn.Module):
    """The quotient is a number of float32, its derivative by the divisor none."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.0 / (x + 1e-30)  # <- gradient-of-small-divisor


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (constant(nn.Linear(2, 2), weight=1.0, bias=0.0) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF):
            y: Tensor = self.down(self.up(x))
        return y


def backward(
    make: Callable[[], nn.Module], x: Tensor, loss: Callable[[Tensor], Tensor] = torch.sum, anomaly: bool = False
) -> Build:
    def build() -> tuple[nn.Module, Run]:
        model = make()

        def run() -> None:
            with torch.autograd.set_detect_anomaly(anomaly, check_nan=False):
                torch.autograd.backward([loss(model(x).float())])

        return model, run

    return build


def scaled(scale: float) -> Callable[[Tensor], Tensor]:
    """A loss that is multiplied by a scale which never changes."""
    return lambda y: y.sum() * scale


def clips_by_norm() -> tuple[nn.Module, Run]:
    """An infinity that clipping makes a NaN of, and 0 of all that is finite."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for weight in model.parameters():
        nn.init.eye_(weight)

    def run() -> None:
        model(torch.full((3, 2), 3e38)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return model, run


def tokens() -> nn.Module:
    return constant(nn.Embedding(4, 2, dtype=HALF), weight=1.0)


def case(name: str, build: Build, operation: str | None, kind: Any, label: str = "grad output", **more: Any) -> Case:
    more = {"module": "middle", "source": None, **more}
    return Case(name, build, operation=operation, kind=kind, label=label, options={"gradients": True}, **more)


X = torch.tensor([[0.0, 1.0], [1.0, 2.0]])
PROBABILITIES = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
CASES = [
    case("gradient-of-sqrt-at-0", backward(lambda: Around(Root()), X), "SqrtBackward0", "division-by-zero"),
    case(
        "gradient-of-norm-at-0",
        backward(lambda: Around(Distance()), X * 0, anomaly=True),
        "SqrtBackward0",
        "division-by-zero",
        source="marked",
    ),
    case(
        "gradient-of-deviation-of-constant-row",
        backward(lambda: Around(LayerNorm()), torch.ones(2, 2), anomaly=True),
        "SqrtBackward0",
        "division-by-zero",
        source="marked",
    ),
    case(
        "gradient-of-entropy",
        backward(lambda: Around(Entropy()), PROBABILITIES, anomaly=True),
        "MulBackward0",
        "zero-times-inf",
        source="marked",
    ),
    case("gradient-of-masked-log", backward(lambda: Around(MaskedLog()), X), "LogBackward0", "division-by-zero"),
    case(
        "gradient-of-masked-exp",
        backward(lambda: Around(MaskedExp()), X * 100, anomaly=True),
        "ExpBackward0",
        "zero-times-inf",
        source="marked",
    ),
    case(
        "gradient-of-masked-nan",
        backward(lambda: Around(MaskedRoot()), torch.tensor([[-1.0, 1.0]]), anomaly=True),
        "SqrtBackward0",
        "domain",
        source="marked",
    ),
    case("gradient-of-acos-at-1", backward(lambda: Around(Angle()), X / 2), "AcosBackward0", "division-by-zero"),
    case(
        "gradient-of-power-at-0",
        backward(lambda: Around(Gamma()), X, anomaly=True),
        "PowBackward0",
        "division-by-zero",
        source="marked",
    ),
    case(
        "gradient-of-small-divisor",
        backward(lambda: Around(Ratio()), X, anomaly=True),
        "ReciprocalBackward0",
        "arithmetic-overflow",
        source="marked",
    ),
    case(
        "gradient-in-float16-by-a-product",
        backward(
            lambda: Around(constant(nn.Linear(2, 2, bias=False, dtype=HALF), weight=20.0), dtype=HALF),
            X.half(),
            scaled(2.0**12),
        ),
        "MmBackward0",
        "accumulation-overflow",
    ),
    case(
        "gradient-under-autocast",
        backward(Autocast, torch.full((2, 2), 30.0), scaled(2.0**11)),
        "AddmmBackward0",
        "accumulation-overflow",
        "grad weight",
        module="down",
    ),
    case(
        "gradient-cast-to-float16",
        backward(lambda: Around(Wide(), dtype=HALF), X.half(), scaled(2.0**17)),
        "ToCopyBackward0",
        "cast-overflow",
    ),
    case(
        "gradient-of-a-token-that-is-often-there",
        backward(tokens, torch.zeros(3, 40, dtype=torch.int64), scaled(2.0**10)),
        "EmbeddingBackward0",
        "accumulation-overflow",
        "grad weight",
        module="",
    ),
    case(
        "clip-by-norm-with-an-infinity",
        clips_by_norm,
        "MmBackward0",
        "accumulation-overflow",
        "grad weight",
        module="1",
    ),
    case(
        "gradient-of-the-loss",
        backward(lambda: Around(nn.Identity()), X, lambda y: y.sqrt().sum()),
        None,
        "bad-input",
        module="before",
        produced=False,
    ),
]

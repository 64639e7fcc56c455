"""Divisors that are zero, or have rounded to it."""

import torch
from torch import Tensor, nn

from verdicts.case import Case, calls

HALF = torch.float16


class ConstantRow(nn.Module):
    """An eps of 1e-8 is 0 in float16, so that a row without variance is divided by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        deviation = x - x.mean(-1, keepdim=True)
        scale = torch.sqrt(deviation.pow(2).mean(-1, keepdim=True) + 1e-8)
        return deviation / scale  # <- norm-of-constant-row


class RmsOfZeros(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))  # <- rms-without-eps


class Cosine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Identity(), nn.Identity()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.left(a), self.right(b)
        y: Tensor = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))  # <- cosine-of-zero-vector
        return y


class Quantize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.0))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.round(x / self.scale).clamp(-128, 127)  # <- quantisation-scale


class MaskedMean(nn.Module):
    """Over the tokens that are no padding, of which a row has none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.inner(x) * mask
        x /= mask.sum(-1, keepdim=True)  # <- mean-over-padding
        return x.sum(-1)


class InverseFrequency(nn.Module):
    """1 / count of a class that does not occur."""

    def forward(self, counts: Tensor) -> Tensor:
        return counts.pow(-0.5)  # <- inverse-frequency


class SmallDivisor(nn.Module):
    """Which is not 0: the quotient is too large."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 1e-5  # <- small-divisor


CASES = [
    Case("norm-of-constant-row", calls(ConstantRow, torch.ones(2, 4, dtype=HALF)), "", "aten.div", "division-by-zero"),
    Case("rms-without-eps", calls(RmsOfZeros, torch.zeros(2, 4)), "", "aten.rsqrt", "division-by-zero"),
    Case(
        "cosine-of-zero-vector",
        calls(Cosine, torch.zeros(2, 4), torch.ones(2, 4)),
        "",
        "aten.div",
        "division-by-zero",
    ),
    Case("quantisation-scale", calls(Quantize, torch.tensor([1.0, 0.0])), "", "aten.div", "division-by-zero"),
    Case(
        "mean-over-padding",
        calls(MaskedMean, torch.ones(2, 3), torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])),
        "",
        "aten.div_",
        "division-by-zero",
    ),
    Case("inverse-frequency", calls(InverseFrequency, torch.tensor([3.0, 0.0])), "", "aten.pow", "division-by-zero"),
    Case(
        "small-divisor", calls(SmallDivisor, torch.full((4,), 100.0, dtype=HALF)), "", "aten.div", "arithmetic-overflow"
    ),
]

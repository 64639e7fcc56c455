"""Functions of what they have no value for, and reductions of nothing."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from verdicts.case import Case, calls

HALF = torch.float16


class LogOfProbability(nn.Module):
    """exp(-200) is 0 in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.softmax(x).log()  # <- log-of-probability
        return y


class LogOfSigmoid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        p = self.sigmoid(x)
        return -torch.log(1 - p)  # <- log-of-sigmoid


class Divergence(nn.Module):
    """Of a distribution with a 0 in it: 0 * log(0)."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Identity(), nn.Identity()

    def forward(self, p: Tensor, q: Tensor) -> Tensor:
        p, q = self.p(p), self.q(q)
        return (p * (p.log() - q.log())).sum(-1)  # <- kl-with-zeros


class NegativeVariance(nn.Module):
    """E[x^2] - E[x]^2 of numbers near each other comes out below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        variance = x.square().mean(-1) - x.mean(-1).square() - 1e-3
        return variance.sqrt()  # <- negative-variance


class Angle(nn.Module):
    """A cosine that rounding takes beyond 1."""

    def forward(self, cosine: Tensor) -> Tensor:
        return torch.acos(cosine)  # <- angle-of-cosine


class Gamma(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x ** (1 / 2.2)  # <- power-of-negative


class Experts(nn.Module):
    """One of which is given no token."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert(), Expert()])

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        return torch.stack([expert(x[choice == i]) for i, expert in enumerate(self.experts)])


class Expert(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0)  # <- expert-without-token


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels)  # <- labels-all-ignored


class DeviationOfOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.std(0)  # <- deviation-of-one


class Recurrent(nn.Module):
    """A state of which only a part is written before all of it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_empty(4, 4)  # <- unwritten-state
        state[:2] = self.inner(x)
        return state.sum(0)


class UnwrittenMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        total = torch.empty(4)  # <- unwritten-total
        for row in x:
            total += row
        return total


CASES = [
    Case("log-of-probability", calls(LogOfProbability, torch.tensor([200.0, 0.0])), "", "aten.log", "domain"),
    Case("log-of-sigmoid", calls(LogOfSigmoid, torch.tensor([0.0, 40.0])), "", "aten.log", "domain"),
    Case(
        "kl-with-zeros",
        calls(Divergence, torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])),
        "",
        "aten.log",
        "domain",
    ),
    Case("negative-variance", calls(NegativeVariance, torch.full((2, 4), 0.1)), "", "aten.sqrt", "domain"),
    Case("angle-of-cosine", calls(Angle, torch.tensor([0.5, 1.0000001])), "", "aten.acos", "domain"),
    Case("power-of-negative", calls(Gamma, torch.tensor([0.5, -0.01])), "", "aten.pow", "domain"),
    Case(
        "expert-without-token",
        calls(Experts, torch.ones(3, 4), torch.tensor([0, 0, 0])),
        "experts.1",
        "aten.mean",
        "empty-reduction",
    ),
    Case(
        "labels-all-ignored",
        calls(Loss, torch.ones(2, 4), torch.tensor([-100, -100])),
        "",
        "aten.nll_loss_forward",
        "empty-reduction",
    ),
    Case("deviation-of-one", calls(DeviationOfOne, torch.ones(1, 4)), "", "aten.std", "empty-reduction"),
    Case("unwritten-state", calls(Recurrent, torch.ones(2, 4)), "", "aten.new_empty", "uninitialised"),
    Case("unwritten-total", calls(UnwrittenMean, torch.ones(2, 4)), "", "aten.empty", "uninitialised"),
]

"""Inputs and weights that are bad before anything is computed."""

import torch
from torch import Tensor, nn

from verdicts.case import Case, Run, calls, constant, given

NAN = float("nan")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.proj = nn.Linear(4, 4)

    def forward(self, tokens: Tensor | None = None, embedded: Tensor | None = None) -> Tensor:
        y: Tensor = self.proj(self.embed(tokens) if embedded is None else embedded)
        return y


def never_initialised() -> Model:
    """A row that a resize of the vocabulary has added, with what was in memory."""
    model = Model()
    with torch.no_grad():
        model.embed.weight[3] = NAN
    return model


def loaded_in_bfloat16() -> Model:
    """1e5 is a number of bfloat16, and none of float16."""
    model = Model().bfloat16()
    constant(model.proj, weight=1e5)
    return model.half()


def steps_to_infinity() -> tuple[nn.Module, Run]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)

    def run() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.tensor([0, 1])) * 100).square().sum().backward()
            optimizer.step()

    return model, run


def clips_by_infinite_norm() -> tuple[nn.Module, Run]:
    """Each gradient times 1 / inf: 0 for those that are finite, and NaN for the one that is not."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.tensor([0, 1])) * 1e20).square().sum().mul(1e-20).backward()
            bias = model.proj.bias
            assert bias.grad is not None
            bias.grad.fill_(float("inf"))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return model, run


class MissingTargets(nn.Module):
    """NaN stands for what was not observed, and does no harm; a row of zeros is divided by its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2, 2)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x / x.sum(-1, keepdim=True)  # <- missing-targets
        return torch.where(target.isnan(), 0.0, self.proj(x) - target).sum()


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, xs: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.proj(xs["x"] * 2)
        return y


def inference_tensor() -> tuple[nn.Module, Run]:
    """Of which no write would show."""
    model = nn.Sequential(nn.Linear(4, 4))

    def run() -> None:
        with torch.inference_mode():
            model(BAD.clone())

    return model, run


def bad_statistics() -> nn.Module:
    """A batch that was bad in training has made them so."""
    norm = nn.BatchNorm1d(4)
    norm.running_var = torch.tensor([1.0, NAN, 1.0, 1.0])
    return nn.Sequential(nn.Linear(4, 4), norm).eval()


class MovingAverage(nn.Module):
    """Which is written to, and inf then: a rerun cannot tell that from what it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(1))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(x.mean())  # <- moving-average
        return x * self.mean


def moving_average() -> nn.Module:
    model = MovingAverage()
    model.mean.fill_(1e30)
    return model


BAD = torch.tensor([[1.0, NAN, 1.0, 1.0]])
CASES = [
    given(
        "embedding-never-initialised", calls(never_initialised, torch.tensor([0, 1])), "embed", "bad-weight", "weight"
    ),
    given(
        "bfloat16-checkpoint-in-float16",
        calls(loaded_in_bfloat16, torch.tensor([0, 1])),
        "proj",
        "bad-weight",
        "weight",
    ),
    given("step-to-infinity", steps_to_infinity, "embed", "bad-weight", "weight"),
    given("clip-by-infinite-norm", clips_by_infinite_norm, "proj", "bad-weight", "bias"),
    given("nan-in-batch", calls(lambda: Model().proj, BAD), "", "bad-input", "input[0]"),
    given("nan-in-dict", calls(Doubles, {"x": BAD}), "proj", "bad-input", "input[0]"),
    given("nan-under-inference", inference_tensor, "0", "bad-input", "input[0]"),
    given("bad-statistics", calls(bad_statistics, torch.ones(2, 4)), "1", "bad-weight", "output"),
    Case(
        "missing-targets",
        calls(MissingTargets, torch.zeros(1, 2), torch.tensor([[NAN, 1.0]])),
        "",
        "aten.div",
        "division-by-zero",
        label="input[0]",
    ),
    Case(
        "moving-average",
        calls(moving_average, torch.full((2,), 1e30)),
        "",
        "aten.mul_",
        "unknown",
    ),
    given("nan-in-keyword", calls(Model, embedded=BAD), "proj", "bad-input", "input[0]"),
]

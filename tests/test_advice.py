"""What a verdict says to try: that it cures what it is given for is tried here, as a user would."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError, run_in_float32
from overflowstat.recorder import RecorderName
from overflowstat.verdict import Verdict


class FeedForward(nn.Module):
    """T5's, gated, whose inner product is what overflows."""

    def __init__(self, inner: float, outer: float) -> None:
        super().__init__()
        self.wi_0, self.wi_1, self.wo = (nn.Linear(4, 4, bias=False) for _ in range(3))
        nn.init.constant_(self.wi_0.weight, inner)
        nn.init.constant_(self.wi_1.weight, inner)
        with torch.no_grad():  # of four sizes, since a norm makes zeros of four that are equal
            self.wo.weight.copy_(outer * torch.tensor([[0.25], [0.5], [0.75], [1.0]]).expand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wo(F.gelu(self.wi_0(x)) * self.wi_1(x))
        return y


class Layer(nn.Module):
    def __init__(self, inner: float, outer: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, elementwise_affine=False)
        self.feed_forward = FeedForward(inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.feed_forward(self.norm(x).abs())
        return y


class Encoder(nn.Module):
    def __init__(self, inner: float, outer: float, ends_in_norm: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(inner, outer) for _ in range(2)])
        self.final = nn.LayerNorm(4, elementwise_affine=False) if ends_in_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.final(x)
        return y


class Model(nn.Module):
    def __init__(self, inner: float, outer: float, ends_in_norm: bool = True) -> None:
        super().__init__()
        self.encoder = Encoder(inner, outer, ends_in_norm)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.encoder(x)
        return y


FIRST = "encoder.layers.0"
X = torch.tensor([[1.0, 2.0, 3.0, 5.0]]).half()


def verdict_of(model: nn.Module, *args: Tensor, recorder: RecorderName) -> Verdict:
    with pytest.raises(NonFiniteError) as raised, Monitor(model, recorder=recorder, sinks=[]):
        model(*args)
    assert raised.value.verdict is not None
    return raised.value.verdict


@pytest.mark.parametrize(
    ("inner", "outer", "operation", "module", "cure"),
    [
        # The four inputs are 3.4 together, in absolute terms, so that each activation is 3.4 * inner, and their product
        # beyond 65504 from an inner of 76 on. The largest that wo makes is 4 * outer times that: 3.6e4 in each of two
        # layers, whose sum is too much, or 3.3e5.
        pytest.param(100, 1e-3, "aten.mul", f"{FIRST}.feed_forward", f"{FIRST}.feed_forward", id="inside"),
        pytest.param(60, 0.22, "aten.add", "encoder.layers.1", "encoder", id="the residual sum itself"),
        pytest.param(60, 2, "aten.mm", f"{FIRST}.feed_forward.wo", "encoder", id="what a layer adds"),
    ],
)
def test_float32_is_advised_for_the_smallest_module_that_it_cures(
    recorder_name: RecorderName, inner: float, outer: float, operation: str, module: str, cure: str
) -> None:
    model = Model(inner, outer).half()
    verdict = verdict_of(model, X, recorder=recorder_name)
    assert (verdict.module, verdict.operation) == (module, operation)
    assert verdict.advice == f'overflowstat.run_in_float32(model, "{cure}"): tried, and finite'
    run_in_float32(model, cure)
    if cure != "encoder":  # which the other layer needs, too
        second = cure.replace("layers.0", "layers.1")
        assert verdict_of(model, X, recorder=recorder_name).advice == verdict.advice.replace(cure, second)
        run_in_float32(model, second)
    with Monitor(model, recorder=recorder_name, sinks=[]):
        assert bool(torch.isfinite(model(X)).all())


def test_bfloat16_is_advised_where_what_the_model_gives_is_beyond_float16(recorder_name: RecorderName) -> None:
    model = Model(60, 2, ends_in_norm=False).half()
    verdict = verdict_of(model, X, recorder=recorder_name)
    assert verdict.advice == "torch.bfloat16 for the model, which holds up to 3.4e+38: in float32 it is finite"
    assert bool(torch.isfinite(model.bfloat16()(X.bfloat16())).all())


class Does(nn.Module):
    def __init__(self, does: Callable[..., Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, *args: Tensor) -> Tensor:
        return self.does(*args)


LIMIT = torch.finfo(torch.float16).min


@pytest.mark.parametrize(
    ("does", "args", "expected", "cured"),
    [
        pytest.param(
            lambda x, mask: torch.softmax(x + mask + mask, -1),
            (X, torch.full((1, 4), LIMIT).half()),
            "a mask that is half of",
            lambda x, mask: torch.softmax(x + mask / 2 + mask / 2, -1),
            id="two masks of the least number",
        ),
        pytest.param(
            lambda x: (x - x.mean()) / (x.var(correction=0) + 1e-8).sqrt(),
            (torch.ones(4).half(),),
            "an eps in what is divided by, as 1e-04",
            lambda x: (x - x.mean()) / (x.var(correction=0) + 1e-4).sqrt(),
            id="an eps that float16 does not hold",
        ),
        pytest.param(
            lambda x: torch.log(torch.sigmoid(x)),
            (torch.tensor([-200.0]),),
            "logsigmoid",
            F.logsigmoid,
            id="the logarithm of a probability that underflowed",
        ),
        pytest.param(
            lambda x: ((x * x).mean() - x.mean() ** 2).sqrt(),
            (torch.full((1000,), 300.7),),
            "the mean of (x - mean)**2",
            lambda x: ((x - x.mean()) ** 2).mean().sqrt(),
            id="a variance below 0",
        ),
        pytest.param(
            lambda x: x[x > 9].mean(),
            (X.float(),),
            "divide a sum by count.clamp(min=1)",
            lambda x: x[x > 9].sum() / (x > 9).sum().clamp(min=1),
            id="a mean over nothing",
        ),
        pytest.param(
            lambda x, mask: torch.softmax(x.masked_fill(mask, float("-inf")), -1),
            (X, torch.ones(1, 4, dtype=torch.bool)),
            "torch.finfo(dtype).min in place of -inf",
            lambda x, mask: torch.softmax(x.masked_fill(mask, LIMIT), -1),
            id="a row that is masked",
        ),
    ],
)
def test_what_else_is_advised_cures(
    recorder_name: RecorderName,
    does: Callable[..., Tensor],
    args: tuple[Tensor, ...],
    expected: str,
    cured: Callable[..., Tensor],
) -> None:
    advice = verdict_of(Does(does), *args, recorder=recorder_name).advice
    assert advice is not None and expected in advice
    with Monitor(Does(cured), recorder=recorder_name, sinks=[]) as monitor:
        monitor.model(*args)


def test_a_mask_of_minus_infinities_that_is_given_is_to_be_allowed(recorder_name: RecorderName) -> None:
    mask = torch.tensor([[0.0, float("-inf")]])
    model = nn.Sequential(nn.Identity())
    advice = verdict_of(model, mask, recorder=recorder_name).advice
    assert advice == """if it is a mask: policy=Policy(allow={":input[0]": "-inf"})"""

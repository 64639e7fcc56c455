"""What a verdict says to try: that it cures what it is given for is tried here, as a user would."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError, run_in_float32
from overflowstat.errors import MonitorWarning
from overflowstat.float32 import run_module_in_float32
from overflowstat.recorder import RecorderName, make_recorder
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
        pytest.param(
            lambda x: x / (x.sum() - x.sum()),
            (torch.full((4,), 100.0).half(),),
            "an eps in what is divided by, as 1e-01",
            lambda x: x / (x.sum() - x.sum() + 0.1),
            id="an eps of 1e-4 is too small for what is divided",
        ),
        pytest.param(
            lambda x: (x * 0) ** -2,
            (X,),
            "an eps in what is divided by, as 1e-01",
            lambda x: (x * 0 + 0.1) ** -2,
            id="and so it is for a power of it",
        ),
        pytest.param(
            lambda x: torch.arange(4) / (x.sum() - x.sum()),
            (X.double(),),
            "an eps in what is divided by, as 1e-12",
            lambda x: torch.arange(4) / (x.sum() - x.sum() + 1e-12),
            id="in float64 it is smaller",
        ),
        pytest.param(
            lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
            (torch.full((1, 2), 100.0),),
            "torch.softmax or torch.logsumexp",
            lambda x: x.softmax(-1),
            id="a softmax by hand",
        ),
        pytest.param(
            lambda x, mask: (x + (1 - mask) * -1e9).softmax(-1),
            (X, torch.zeros(1, 4).half()),
            "torch.finfo(dtype).min / 2, or another that float16 holds, in place of -1e+09",
            lambda x, mask: (x + (1 - mask) * torch.finfo(x.dtype).min / 2).softmax(-1),
            id="a mask that float16 does not hold",
        ),
        pytest.param(
            lambda x: x.float().mul(1e5).half(),
            (X.float(),),
            "a clamp to within float16's 65504 before it is converted",
            lambda x: x.float().mul(1e5).clamp(-65504, 65504).half(),
            id="a dtype that the code itself asks for",
        ),
        pytest.param(
            lambda x: torch.atanh(x / x),
            (X.float(),),
            "clamp to within -1 and 1 before it",
            lambda x: torch.atanh((x / x).clamp(-1 + 1e-6, 1 - 1e-6)),
            id="the end of what a function has values for",
        ),
        pytest.param(lambda x: (-x) ** 0.5, (X,), "clamp(min=0)", lambda x: (-x).clamp(min=0) ** 0.5, id="a power"),
        pytest.param(
            lambda x: torch.acosh(x / 10),
            (X.float(),),
            "clamp(min=1)",
            lambda x: (x / 10).clamp(min=1).acosh(),
            id="acosh",
        ),
        pytest.param(
            lambda x: torch.logit(x * 0),
            (X.float(),),
            "x, eps=1e-6",
            lambda x: torch.logit(x * 0, eps=1e-6),
            id="logit",
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


def test_bfloat16_is_said_to_be_untried_where_nothing_may_be_run_again(recorder_name: RecorderName) -> None:
    class Cache:
        pass

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Does(lambda x: x * 30000)

        def forward(self, x: Tensor, cache: object) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    class Caches(nn.Module):
        """Of whose modules one may be run again, and none that is around it but the model itself."""

        def __init__(self) -> None:
            super().__init__()
            self.takes = Takes()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.takes(x, Cache()) / 30000
            return y

    monitor = Monitor(Takes(), recorder=recorder_name, sinks=[])
    with pytest.raises(NonFiniteError) as raised:
        monitor.model(X, Cache())
    assert raised.value.verdict is not None
    assert raised.value.verdict.advice == "torch.bfloat16 for the model, which holds up to 3.4e+38 (not tried)"
    assert verdict_of(Caches(), X, recorder=recorder_name).advice == (
        'overflowstat.run_in_float32(model, ""), all of it: tried, and finite'
    )


def test_what_a_module_gives_stays_float32_under_autocast_so_that_it_alone_is_cured(
    recorder_name: RecorderName,
) -> None:
    linear = nn.Linear(4, 4, bias=False)
    nn.init.constant_(linear.weight, 60000)
    model = nn.Sequential(linear)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        assert 'run_in_float32(model, "0")' in (verdict_of(model, X.float(), recorder=recorder_name).advice or "")


def test_what_is_not_cast_back_tells_whether_float32_would_hold_it(recorder_name: RecorderName) -> None:
    module = Does(lambda x: x * 30000)
    for casts_back, dtype in ((True, torch.float16), (False, torch.float32)):
        with warnings.catch_warnings(), run_module_in_float32(module, make_recorder(recorder_name), casts_back):
            warnings.simplefilter("ignore", MonitorWarning)
            y = module(X)
        assert y.dtype is dtype and bool(y.isfinite().all()) != casts_back

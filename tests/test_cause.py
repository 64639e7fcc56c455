"""Why one operation gave what is not finite: several members of each kind, and what is near a kind and not of it."""

import math
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overflowstat.cause import Cause
from overflowstat.kept_tensors import KeptTensors
from overflowstat.operations import Birth, Operations
from overflowstat.recorder import Recorder
from overflowstat.row import NonFinite

Make = Callable[[], object]
INF, NAN = math.inf, math.nan
F16, BF16, F64, C64, C128 = torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128


def t(*values: complex, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def cause(make: Make, recorder: Recorder) -> Cause | None:
    """Of what a function gives, or first gives; None if it is not bad, or was given."""
    operations = Operations(recorder, nn.Identity(), KeptTensors())
    with torch.no_grad(), operations:
        made = make()
    result = made if isinstance(made, Tensor) else made[0]  # type: ignore[index]
    assert isinstance(result, Tensor)
    everything = NonFinite.NAN | NonFinite.POSINF | NonFinite.NEGINF
    origin = operations.origin_of(result, everything) if bool((~torch.isfinite(result.to(C128))).any()) else None
    return origin.cause if isinstance(origin, Birth) else None


def filled_in(value: float) -> Tensor:
    x = torch.zeros(2, dtype=F16)
    x[0] = torch.tensor(value)
    return x


def ignored(*shape: int) -> Tensor:
    return torch.full(shape, -100)


KNOWN: dict[str, list[Make]] = {
    "cast-overflow": [
        lambda: t(1e5).half(),
        lambda: t(1e39, dtype=F64).float(),
        lambda: t(1e39, dtype=F64).bfloat16(),
        lambda: t(1e300, dtype=C128).to(C64),
        lambda: t(1e5).to(torch.float8_e5m2),
        lambda: torch.tensor([100000]).half(),
        lambda: torch.tensor(1e5).half(),
        lambda: torch.zeros(2, 3, dtype=F16).copy_(t(1e5)),
        lambda: torch.zeros(2, dtype=F16).fill_(torch.tensor(1e5)),
        lambda: filled_in(1e5),
        # What memory held before it is written to has no part in it.
        lambda: torch.full((2,), NAN, dtype=F16).copy_(t(1e5)),
    ],
    "arithmetic-overflow": [
        lambda: t(6e4, dtype=F16) * 2,
        lambda: t(3e38, dtype=BF16) * 2,
        lambda: t(1e30) * 1e30,
        lambda: t(1e300, dtype=F64) * 1e300,
        lambda: t(1e30 + 1e30j, dtype=C64) * t(1e30, dtype=C64),
        lambda: torch.tensor(6e4, dtype=F16) + torch.tensor(6e4, dtype=F16),
        lambda: t(6e4, dtype=F16).add_(6e4),
        lambda: torch.add(t(6e4, dtype=F16), t(3e4, dtype=F16), alpha=2),
        lambda: torch.mul(t(6e4, dtype=F16), t(2.0, dtype=F16), out=torch.ones(1, dtype=F16)),
        lambda: torch.mul(t(6e4, dtype=F16), t(2.0, dtype=F16), out=t(NAN, dtype=F16)),
        lambda: t(800.0, dtype=F64).exp(),
        lambda: t(100.0).exp(),
        lambda: t(100.0, dtype=C64).exp(),
        lambda: t(100.0).sinh(),
        lambda: t(1e30).square(),
        lambda: 10.0 ** t(100.0),
        lambda: torch.addcmul(t(1.0), t(1e30), t(1e30)),
        lambda: t(1e38).lgamma(),
        # Their divisors are small, and not 0.
        lambda: t(100.0, dtype=F16) / 1e-5,
        lambda: t(1.0, dtype=F16) / 1e-9,
        lambda: t(100.0, dtype=F16) / t(1e-7, dtype=F16),
        lambda: t(1e-6, dtype=F16).reciprocal(),
        lambda: t(6e4, -6e4, dtype=F16).log_softmax(-1),
        lambda: t(3e38, -3e38).log_softmax(-1),
        lambda: torch.native_dropout(torch.full((50,), 6e4, dtype=F16), 0.5, True),
    ],
    "accumulation-overflow": [
        lambda: t(6e4, 6e4, dtype=F16).sum(),
        lambda: t(6e4, 6e4).sum(dtype=F16),
        lambda: t(3e38, 3e38).mean(),
        lambda: t(1e308, 1e308, dtype=F64).sum(),
        lambda: t(3e38, 3e38, dtype=C64).sum(),
        lambda: t(6e4, 6e4, -6e4, dtype=F16).cumsum(0),
        lambda: t(6e4, 6e4, dtype=F16).prod(),
        lambda: t(6e4, 6e4, dtype=F16).norm(),
        lambda: t(6e4, -6e4, dtype=F16).std(),
        lambda: t(3e38, -3e38).var(),
        lambda: torch.full((2, 2), 1e30, dtype=BF16) @ torch.full((2, 2), 1e30, dtype=BF16),
        lambda: torch.full((2, 2), 1e200, dtype=F64) @ torch.full((2, 2), 1e200, dtype=F64),
        lambda: torch.zeros(1, 1).addmm_(torch.full((1, 1), 1e30), torch.full((1, 1), 1e30)),
        lambda: torch.bmm(torch.full((1, 1, 1), 1e30), torch.full((1, 1, 1), 1e30), out=torch.full((1, 1, 1), NAN)),
        lambda: torch.einsum("ij,jk->ik", torch.full((2, 2), 1e30), torch.full((2, 2), 1e30)),
        lambda: F.mse_loss(t(6e4, dtype=F16), t(-6e4, dtype=F16)),
        lambda: torch.zeros(1, dtype=F16).scatter_add_(0, torch.tensor([0, 0]), t(6e4, 6e4, dtype=F16)),
    ],
    "division-by-zero": [
        lambda: t(1.0) / 0,
        lambda: t(0.0, dtype=F16) / t(0.0, dtype=F16),
        lambda: torch.tensor(1.0) / torch.tensor(0.0),
        lambda: torch.tensor([1]) / torch.tensor([0]),
        lambda: t(1 + 1j, dtype=C64) / t(0, dtype=C64),
        lambda: 1 / t(0.0, dtype=F64),
        lambda: t(1.0).div_(t(0.0)),
        lambda: t(0.0, dtype=BF16).rsqrt(),
        lambda: t(0.0) ** -1,
        lambda: t(1.0).remainder(0),
        lambda: torch.addcdiv(t(1.0), t(1.0), t(0.0)),
        lambda: F.rms_norm(torch.zeros(1, 4), (4,), eps=0.0),
        lambda: t(1.0).var(correction=0) / 0,
        lambda: t(INF) / 0,  # as it is for whatever is divided
        # Parts of what does several things in one.
        lambda: F.layer_norm(torch.ones(1, 4), (4,), eps=0.0),
        lambda: F.layer_norm(torch.ones(1, 4, dtype=F16), (4,), eps=0.0),
        lambda: F.group_norm(torch.ones(1, 4, 2), 1, eps=0.0),
        lambda: F.batch_norm(torch.ones(2, 4), torch.zeros(4), torch.zeros(4), eps=0.0),
        lambda: F.cross_entropy(torch.ones(2, 3), torch.tensor([0, 0]), weight=torch.zeros(3)),
        lambda: torch._weight_norm(torch.zeros(2, 2), torch.ones(2, 1)),
    ],
    "zero-times-inf": [
        lambda: t(0.0) * INF,
        lambda: t(-INF, dtype=F16).mul_(0),
        lambda: t(0.0, 1.0).view(1, 2) @ t(INF, 1.0).view(2, 1),
        lambda: t(0.0, 1.0).view(1, 2) @ t(INF, 1.0),
        lambda: t(0.0, 1.0).dot(t(INF, 1.0)),
    ],
    "inf-minus-inf": [
        lambda: t(INF) - t(INF),
        lambda: t(1.0, -INF) - t(-INF, -INF),  # of which the first is an infinity that was there
        lambda: torch.rsub(t(INF), t(INF)),
        lambda: torch.add(t(INF), t(INF), alpha=-1),
        lambda: t(INF, dtype=F16).add_(t(-INF, dtype=F16)),
        lambda: torch.ones(1, 2) @ t(INF, -INF).view(2, 1),
        lambda: t(INF, -INF).sum(),
        lambda: t(1.0, INF).softmax(-1),
        lambda: t(1.0, INF, dtype=BF16).softmax(-1),
    ],
    "domain": [
        lambda: t(0.0).log(),
        lambda: t(-1.0, dtype=F64).log2(),
        lambda: t(0, dtype=C64).log(),
        lambda: t(-1.0).log1p(),
        lambda: t(-1.0, dtype=F16).sqrt(),
        lambda: t(-1.0).sqrt_(),
        lambda: t(-1.0).rsqrt(),
        lambda: t(1.01, dtype=BF16).acos(),
        lambda: t(0.5).acosh(),
        lambda: t(1.0).atanh(),
        lambda: t(1.0).logit(),
        lambda: t(-2.0) ** 0.5,
        lambda: torch.tensor(-1.0).log(),
        lambda: torch.log(t(-1.0), out=t(NAN)),
        lambda: torch.xlogy(t(1.0), t(0.0)),
        lambda: torch.special.entr(t(-1.0)),  # -inf by definition, which torch has as log of 0
    ],
    "masked-row": [
        lambda: t(-INF, -INF).softmax(-1),
        lambda: torch.tensor(-INF).softmax(-1),
        lambda: t(-INF, -INF, dtype=F16).log_softmax(-1),
        # Of which the first bad number is none of that row.
        lambda: t(0.0, -INF, -INF, -INF).view(2, 2).log_softmax(-1),
        lambda: t(-INF, 1.0, -INF, 1.0).view(2, 2).softmax(0),
    ],
    "empty-reduction": [
        lambda: torch.ones(0).mean(),
        lambda: torch.ones(0, 3, dtype=F16).mean(0),
        lambda: t(1.0).std(),
        lambda: torch.var_mean(t(1.0)),
        lambda: F.cross_entropy(torch.ones(2, 3), ignored(2)),
        lambda: F.cross_entropy(torch.ones(1, 3, 2, 2), ignored(1, 2, 2)),
        lambda: F.mse_loss(torch.ones(0), torch.ones(0)),
        lambda: F.binary_cross_entropy(torch.ones(0), torch.ones(0)),
    ],
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize(
    ("kind", "make"),
    [pytest.param(kind, make, id=f"{kind}-{i}") for kind, makes in KNOWN.items() for i, make in enumerate(makes)],
)
def test_the_kind(kind: str, make: Make, recorder: Recorder) -> None:
    found = cause(make, recorder)
    assert found is not None and found.kind == kind, found


@pytest.mark.parametrize(
    "make",
    [
        lambda: t(INF) - 1,
        lambda: t(INF) * 2,
        lambda: t(NAN).log(),
        lambda: t(NAN, -INF).softmax(-1),
        lambda: t(INF).half(),
        lambda: t(NAN).to(torch.float8_e5m2),
        lambda: torch.where(torch.tensor([True]), t(1.0), INF),
        lambda: t(1.0).masked_fill(torch.tensor([True]), INF),
        lambda: t(1.0) * NAN,
        lambda: t(-INF, -INF).logsumexp(-1),
        lambda: F.embedding(torch.tensor([0]), t(NAN).view(1, 1)),
    ],
)
def test_what_was_given_is_no_birth(make: Make, recorder: Recorder) -> None:
    assert cause(make, recorder) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: t(1e5).to(torch.float8_e4m3fn),  # saturates
        lambda: t(6e4, 6e4, -6e4, -6e4, dtype=F16).sum(),  # adds in float32
        lambda: torch.full((3,), 6e4, dtype=F16).mean(),
        lambda: torch.full((2,), NAN).zero_(),
    ],
)
def test_what_is_finite_has_no_cause(make: Make, recorder: Recorder) -> None:
    assert cause(make, recorder) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: t(INF) / t(INF),
        lambda: t(-INF).log(),
        lambda: t(INF).sin(),
        lambda: t(0.0) * 1e39,  # a constant beyond float32, which makes it inf before it multiplies
        lambda: torch.add(t(1.0), t(INF), alpha=0),
        lambda: torch.addmm(t(-INF), torch.ones(1, 2), t(INF, 1.0).view(2, 1)),
        lambda: torch.linalg.inv_ex(torch.zeros(2, 2))[0],
        lambda: F.conv1d(torch.full((1, 1, 3), INF), torch.zeros(1, 1, 2)),
    ],
)
def test_what_the_numbers_do_not_tell_is_unknown(make: Make, recorder: Recorder) -> None:
    found = cause(make, recorder)
    assert found is not None and found.kind == "unknown", found


def test_the_cause_says_how_far_beyond(recorder: Recorder) -> None:
    found = cause(lambda: operator.mul(t(6e4, dtype=F16), 2), recorder)
    assert found == ("arithmetic-overflow", "6e+04 * 2 = 1.2e+05 is beyond float16's 65504")

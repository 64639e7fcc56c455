"""In anomaly mode: which node made a bad gradient, and why. In that mode and without: what is pinned on no module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gradient_models import Calls, X, around, line, linear, sqrt_at_0, verdict_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overflowstat import Monitor, NonFiniteError, Policy
from overflowstat.gradient_births import GradientBirths
from overflowstat.gradient_graph import GradientGraph
from overflowstat.recorder import RecorderName
from overflowstat.verdict import Verdict

NAN = float("nan")


@pytest.fixture(autouse=True)
def torch_may_warn_of_the_node_that_raised() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error detected in", UserWarning)
        yield


def anomaly(is_on: bool = True) -> Any:
    return torch.autograd.set_detect_anomaly(is_on, check_nan=False)


def raised(
    model: nn.Module, step: Callable[[], object], recorder_name: RecorderName, in_anomaly: bool = True, **options: Any
) -> Verdict:
    with (
        Monitor(model, gradients=True, recorder=recorder_name, sinks=[], **options),
        anomaly(in_anomaly),
        pytest.raises(NonFiniteError) as error,
    ):
        step()
    return verdict_of(error.value)


def backward(model: nn.Module, x: Tensor = X) -> Callable[[], None]:
    return lambda: torch.autograd.backward([model(x).sum()])


def test_the_operation_inside_of_the_node_and_its_operands(recorder_name: RecorderName) -> None:
    model = around(sqrt_at_0)
    verdict = raised(model, backward(model), recorder_name)
    assert (verdict.operation, verdict.kind, verdict.module) == ("SqrtBackward0", "division-by-zero", "middle")
    gradient, root, result = (operand.content for operand in verdict.operands)
    assert not isinstance(gradient, str) and not isinstance(root, str) and not isinstance(result, str)
    assert [operand.name for operand in verdict.operands] == ["self", "other", "result"]
    assert (gradient.abs_max, root.abs_min, root.abs_max, result.posinf_count) == (1.0, 0.0, 4.0, 2)
    assert "  kind        division-by-zero: 1 / 0\n" in verdict.text
    assert "  given       self 1 to 1 (float32), other 0 to 4 (float32)\n" in verdict.text
    assert verdict.advice is not None and verdict.advice.startswith("an eps")


def steep_root(x: Tensor) -> Tensor:
    return (x * 1e-40).sqrt() * 1e38  # 0.5 / sqrt(1e-40) * 1e38 is beyond float32


def squared_divisor(x: Tensor) -> Tensor:
    return 1.0 / (x + 1e-30)


def masked_root(x: Tensor) -> Tensor:
    return torch.where(x > 0, (x - 1).sqrt(), 0.0)


@pytest.mark.parametrize(
    ("function", "operation", "kind"),
    [
        (steep_root, "SqrtBackward0", "arithmetic-overflow"),
        (squared_divisor, "ReciprocalBackward0", "arithmetic-overflow"),
        (masked_root, "SqrtBackward0", "unknown"),  # nothing tells that what it was taken of is a number
    ],
)
def test_kinds(recorder_name: RecorderName, function: Callable[[Tensor], Tensor], operation: str, kind: str) -> None:
    model = around(function)
    x = torch.tensor([[0.0, 2.0]]) if function is not steep_root else torch.ones(1, 2)
    verdict = raised(model, backward(model, x), recorder_name)
    assert (verdict.module, verdict.operation, verdict.source) == ("middle", operation, line(function))
    assert verdict.kind == kind, verdict.text
    if function is masked_root:
        assert "  kind        unknown: the forward has saved for it what is not finite: result" in verdict.text


def test_a_gradient_that_was_masked_away_is_not_blamed(recorder_name: RecorderName) -> None:
    """The first infinity of the backward, of a root at 0, goes no further; the second is that which does."""

    class Masks(torch.autograd.Function):
        """0 for what is not finite."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient.nan_to_num(0.0, 0.0, 0.0)

    def masked(y: Tensor) -> Tensor:
        z = y.log1p()
        root: Tensor = Masks.apply(z).sub(z.detach()).sqrt()  # type: ignore[no-untyped-call,unused-ignore]
        return root + (z * 1e-40).sqrt() * 1e38

    model = around(masked)
    verdict = raised(model, backward(model, torch.ones(1, 2)), recorder_name)
    assert (verdict.operation, verdict.source) == ("SqrtBackward0", line(masked, 3))
    assert verdict.kind == "arithmetic-overflow"


def test_user_code_runs_once(recorder_name: RecorderName) -> None:
    ran = []

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            ran.append(1)
            return gradient / 0

    model = around(Bad.apply)
    verdict = raised(model, backward(model), recorder_name)
    assert (verdict.module, verdict.operation, verdict.kind) == ("middle", "BadBackward", "unknown")
    assert ran == [1]


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y[:, :1].sqrt_()
        z: Tensor = self.b(y)
        return z


def test_a_write_to_a_view(recorder_name: RecorderName) -> None:
    model = Writes()
    verdict = raised(model, backward(model), recorder_name)
    assert (verdict.module, verdict.operation) == ("", "torch::autograd::CopySlices")
    assert (verdict.kind, verdict.source) == ("division-by-zero", line(Writes.forward, 2))


class Checkpointed(nn.Module):
    """The bad operation is the first of what is run again, or in a module there."""

    def __init__(self, reentrant: bool, is_first: bool) -> None:
        super().__init__()
        self.first, self.last, self.root = linear(), linear(), Calls(sqrt_at_0)
        self.reentrant, self.is_first = reentrant, is_first

    def inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(sqrt_at_0(x) if self.is_first else self.root(self.first(x)))
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)
        return y


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_checkpointing(recorder_name: RecorderName, reentrant: bool, is_first: bool) -> None:
    model = Checkpointed(reentrant, is_first)
    verdict = raised(model, backward(model), recorder_name)
    assert (verdict.module, verdict.operation) == ("" if is_first else "root", "SqrtBackward0")
    assert (verdict.kind, verdict.source) == ("division-by-zero", line(sqrt_at_0))
    without = raised(model, backward(model), recorder_name, in_anomaly=False)
    assert (without.module, without.kind, without.source) == (verdict.module, "unknown", None)
    assert without.advice is not None and "set_detect_anomaly" in without.advice


def test_saved_tensors_elsewhere(recorder_name: RecorderName) -> None:
    model = around(sqrt_at_0)
    with torch.autograd.graph.save_on_cpu():
        verdict = raised(model, backward(model), recorder_name)
    assert verdict.kind == "division-by-zero"


def test_nothing_of_the_second_run_stays(recorder_name: RecorderName) -> None:
    def gradients(watched: bool) -> list[list[float]]:
        torch.manual_seed(0)
        model = around(sqrt_at_0)
        if watched:
            Monitor(model, gradients=True, recorder=recorder_name, sinks=[], on_detect=lambda report: None)
        with anomaly():
            loss = model(X).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        return [
            weight.grad.nan_to_num(7.0, 8.0, 9.0).tolist() for weight in model.parameters() if weight.grad is not None
        ]

    assert gradients(True) == gradients(False)


class Stores(nn.Module):
    """Lets the loss have a tensor that it does not give."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.features = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.a(x)
        y: Tensor = self.b(self.features)
        return y


@pytest.mark.parametrize("in_anomaly", [False, True])
def test_a_loss_that_takes_a_tensor_from_inside(recorder_name: RecorderName, in_anomaly: bool) -> None:
    model = Stores()

    def step() -> None:
        loss = model(X).sum() + model.features.sqrt().sum()
        loss.backward()

    verdict = raised(model, step, recorder_name, in_anomaly)
    assert (verdict.module, verdict.produced, verdict.kind, verdict.operation) == ("a", False, "unknown", None)
    assert verdict.text.startswith("  made in     the backward of b, or of what else has used it\n")


@pytest.mark.parametrize("in_anomaly", [False, True])
def test_a_loss_that_takes_a_weight(recorder_name: RecorderName, in_anomaly: bool) -> None:
    model = nn.Sequential(linear())
    weight = model.get_parameter("0.weight")
    step = lambda: (model(X).sum() + (weight - weight.detach()).sqrt().sum()).backward()  # noqa: E731
    verdict = raised(model, step, recorder_name, in_anomaly)
    assert (verdict.label, verdict.produced, verdict.operation) == ("grad weight", False, None)
    assert verdict.text.startswith("  made in     the backward of 0, or of what else has used it\n")


@pytest.mark.parametrize("in_anomaly", [False, True])
def test_a_second_derivative_is_no_modules(recorder_name: RecorderName, in_anomaly: bool) -> None:
    """That of x ** 1.5 at 0."""
    model = around(lambda x: x.pow(1.5))
    x = X.clone().requires_grad_()

    def step(penalty: float) -> None:
        loss = model(x).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + penalty * gradient.sum()).backward()

    verdict = raised(model, lambda: step(1.0), recorder_name, in_anomaly)
    assert (verdict.label, verdict.produced, verdict.operation) == ("grad output", False, None)
    assert verdict.text.startswith("  made in     the backward of middle, or of what else has used it\n")


def test_a_hook_of_the_users_own(recorder_name: RecorderName) -> None:
    model = around(torch.tanh)

    def step() -> None:
        y = model[0](X)
        y.register_hook(lambda gradient: gradient * NAN)
        torch.autograd.backward([model[2](model[1](y)).sum()])

    verdict = raised(model, step, recorder_name)
    assert (verdict.module, verdict.produced, verdict.operation) == ("before", False, None)
    assert verdict.text.startswith("  made        by a hook on it, or where several were added up")


def test_what_was_bad_before_and_is_added_to_is_no_modules(recorder_name: RecorderName) -> None:
    model = nn.Sequential(linear())
    with Monitor(model, gradients=True, recorder=recorder_name, sinks=[]):

        def verdict(x: float) -> Verdict:
            with pytest.raises(NonFiniteError) as error:
                (model(torch.full((1, 2), x)) * x).sum().backward()
            return verdict_of(error.value)

        assert (verdict(1e30).produced, verdict(1e30).kind) == (True, "bad-input")
        again = verdict(1.0)
        assert (again.module, again.produced, again.kind) == ("0", False, "bad-input")
        assert again.text.startswith("  given       it was bad before this backward, which has added to it\n")
        model.zero_grad(set_to_none=False)
        assert verdict(1e30).kind == "accumulation-overflow"
        model.zero_grad()
        assert verdict(1e30).kind == "accumulation-overflow"


def test_lines_that_the_policy_hides_still_part_modules(recorder_name: RecorderName) -> None:
    model = around(sqrt_at_0)
    hidden = Policy(exclude=["*:grad output", ":grad output"])
    verdict = raised(model, backward(model), recorder_name, in_anomaly=False, policy=hidden)
    assert (verdict.module, verdict.label, verdict.produced) == ("middle", "grad input[0]", True)
    # After and middle lie between what is read.
    hidden = Policy(exclude=["*:grad output", ":grad output", "after:grad input[0]"])
    verdict = raised(model, backward(model), recorder_name, in_anomaly=False, policy=hidden)
    assert (verdict.label, verdict.produced) == ("grad input[0]", False)
    # Weights alone: it may have come to the module so.
    hidden = Policy(exclude=["*:grad output", ":grad output", "*:grad input[0]"])
    optimizer = torch.optim.SGD(model.parameters())
    model.zero_grad()
    steps = lambda: (backward(model)(), optimizer.step())  # noqa: E731
    verdict = raised(model, steps, recorder_name, in_anomaly=False, policy=hidden)
    assert (verdict.label, verdict.produced, verdict.kind) == ("grad weight", False, "unknown")
    assert "or before: no gradient that reached it was read" in verdict.text


def test_nodes_that_run_before_anything_is_read_are_followed(recorder_name: RecorderName) -> None:
    hidden = Policy(include=["before:grad output"])
    model = around(sqrt_at_0)
    verdict = raised(model, backward(model), recorder_name, policy=hidden)
    assert (verdict.module, verdict.operation, verdict.kind) == ("", "SqrtBackward0", "division-by-zero")
    model = around(sqrt_at_0)
    hidden = Policy(exclude=["*:grad output", ":grad output", "after:grad input[0]"])
    verdict = raised(model, backward(model), recorder_name, policy=hidden)
    assert (verdict.module, verdict.operation, verdict.kind) == ("middle", "SqrtBackward0", "division-by-zero")


def test_a_module_that_is_not_watched_is_not_left_out(recorder_name: RecorderName) -> None:
    model = around(sqrt_at_0)
    verdict = raised(model, backward(model), recorder_name, in_anomaly=False, policy=Policy(exclude=["middle"]))
    assert (verdict.module, verdict.produced) == ("", True)
    assert "in its own forward between its children, or a module there that is not watched" in verdict.text


def test_sparse_gradients_are_followed(recorder_name: RecorderName) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    with torch.no_grad():
        embedding.weight.fill_(1.0)
    model = nn.Sequential(embedding)
    embedding.weight.register_hook(lambda gradient: gradient * 1e38)  # type: ignore[no-untyped-call]
    tokens = torch.tensor([0, 1])
    verdict = raised(model, lambda: (model(tokens) * 1e10).sum().backward(), recorder_name)
    assert (verdict.label, verdict.produced, verdict.operation) == ("grad weight.values", False, None)
    assert verdict.text.startswith("  made        by a hook on it, or where several were added up")


def test_a_search_that_fails_leaves_the_detection(recorder_name: RecorderName, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("of a kind that was not thought of")

    monkeypatch.setattr(GradientGraph, "parents", fails)
    monkeypatch.setattr(GradientBirths, "_read", fails)
    model = around(sqrt_at_0)
    verdict = raised(model, backward(model), recorder_name)
    assert (verdict.module, verdict.label, verdict.kind) == ("before", "grad output", "unknown")
    assert (
        verdict.text
        == "  cause       not known: the search for it failed: RuntimeError: of a kind that was not thought of"
    )


def test_gradients_that_add_up_beyond_the_limit(recorder_name: RecorderName) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b = linear(), linear(), linear()

        def forward(self, x: Tensor) -> Any:
            y = self.first(x)
            return self.a(y.view(-1, 2)), self.b(y.view(-1, 2))

    model = Model()

    def step() -> None:
        a, b = model(torch.ones(1, 2) * 1e-3)
        ((a + b) * 2e38).sum().backward()

    verdict = raised(model, step, recorder_name, in_anomaly=False)
    assert (verdict.module, verdict.label, verdict.produced) == ("", "grad output", True)
    assert (verdict.kind, verdict.operation) == ("arithmetic-overflow", None)
    assert "finite gradients add up to what is beyond float32's 3.4028e+38" in verdict.text

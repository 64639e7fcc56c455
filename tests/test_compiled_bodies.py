"""Modules that are called inside of what takes a function: torch.cond, torch.vmap, checkpoints and the like."""

import warnings
from collections.abc import Callable

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.strict_mode import strict_mode
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd.function import FunctionCtx
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from overflowstat import Monitor, NonFiniteError
from overflowstat.errors import MonitorWarning
from overflowstat.recorder import RecorderName
from overflowstat.stats import TensorStats

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
X = torch.tensor([[1.0, -2.0, 3.0, 0.5], [0.25, 4.0, -1.0, 2.0]])

Body = Callable[[nn.Module, Tensor], Tensor]


class Around(nn.Module):
    """Gives what `body` makes of a layer and a tensor to another layer."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.inside = nn.Linear(4, 4)
        self.after = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.body(self.inside, x))
        return y


def in_cond(layer: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = torch.cond(x.sum() > 0, lambda t: layer(t), lambda t: t + 1, (x,))
    return found


def in_checkpoint_in_cond(layer: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = torch.cond(x.sum() > 0, lambda t: checkpoint(layer, t, use_reentrant=False), lambda t: t + 1, (x,))
    return found


def in_scan(layer: nn.Module, x: Tensor) -> Tensor:
    def add(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        carry = layer(carry) + row
        return carry, carry.clone()

    found: Tensor = scan(add, torch.zeros(4), x)[1]
    return found


def in_while_loop(layer: nn.Module, x: Tensor) -> Tensor:
    start = torch.tensor(0), x
    found: Tensor = while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, layer(y)), start)[1]  # type: ignore[no-untyped-call]
    return found


def in_map(layer: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = map_rows(lambda t, *_: layer(t), x)
    return found


def in_region(layer: nn.Module, x: Tensor) -> Tensor:
    region = torch.compiler.nested_compile_region(lambda t: layer(t))
    found: Tensor = region(region(x))
    return found


def in_strict_mode(layer: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = strict_mode(lambda t: layer(t), (x,))  # type: ignore[no-untyped-call]
    return found


class Doubled(nn.Module):
    def forward(self, score: Tensor) -> Tensor:
        return score * 2


def in_flex_attention(layer: nn.Module, x: Tensor) -> Tensor:
    q = x.reshape(1, 1, 2, 4).repeat(1, 1, 8, 4)
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: layer(score))[0, 0, :2, :4]


NOT_READ = {
    "torch.cond": in_cond,
    "scan": in_scan,
    "while_loop": in_while_loop,
    "map": in_map,
    "strict_mode": in_strict_mode,
}


def check_not_read(make: Callable[[], nn.Module], operation: str, name: RecorderName, compiled: bool) -> None:
    def run(model: nn.Module) -> Callable[..., Tensor]:
        return torch.compile(model, backend="aot_eager") if compiled else model

    expected = run(make())(X)
    torch._dynamo.reset()
    model, sink = make(), Keeps()
    Monitor(model, recorder=name, sinks=[sink])
    with pytest.warns(MonitorWarning, match=rf"calls of inside \(\w+\) inside of {operation} are not watched") as found:
        torch.testing.assert_close(run(model)(X), expected)
    assert sum(issubclass(warning.category, MonitorWarning) for warning in found) == 1
    assert sink.modules() == ["after", ""]
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        run(model)(X)
    assert sink.modules() == ["after", ""]
    with torch.no_grad():
        after = model.get_submodule("after")
        assert isinstance(after, nn.Linear)
        after.bias.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"first in after \(Linear\), bias"):
        run(model)(X)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("operation", NOT_READ)
def test_a_model_runs_as_it_does_alone_and_says_what_it_does_not_watch(
    operation: str, compiled: bool, recorder_name: RecorderName
) -> None:
    with torch.set_grad_enabled(operation != "strict_mode"):  # which has no backward
        check_not_read(lambda: Around(NOT_READ[operation]), operation, recorder_name, compiled)


@pytest.mark.parametrize("body", [in_region, in_checkpoint_in_cond])
@pytest.mark.parametrize("has_grad", [False, True])
def test_so_it_does_in_what_only_a_compiler_takes_apart(
    body: Body, has_grad: bool, recorder_name: RecorderName
) -> None:
    operation = "torch.compiler.nested_compile_region" if body is in_region else "torch.cond"
    with torch.set_grad_enabled(has_grad):
        check_not_read(lambda: Around(body), operation, recorder_name, compiled=True)


def test_so_it_does_in_the_scores_of_an_attention(recorder_name: RecorderName) -> None:
    def make() -> nn.Module:
        model = Around(in_flex_attention)
        model.inside = Doubled()  # type: ignore[assignment]
        return model

    with torch.no_grad():
        check_not_read(make, "flex_attention", recorder_name, compiled=True)


def test_so_it_does_in_a_hook_of_a_tensor(recorder_name: RecorderName) -> None:
    def in_backward(layer: nn.Module, x: Tensor) -> Tensor:
        y = x.clone().requires_grad_() * 2
        y.register_hook(lambda gradient: layer(gradient))  # type: ignore[no-untyped-call]
        return y * 1

    model = Around(in_backward)
    Monitor(model, recorder=recorder_name, sinks=[])
    run = torch.compile(model, backend="aot_eager")
    with pytest.warns(MonitorWarning, match=r"inside \(Linear\) inside of a hook of a tensor"):
        run(X).sum().backward()
    run(X).sum().backward()


def test_inductor_takes_a_watched_model_with_a_branch_in_it(recorder_name: RecorderName) -> None:
    model, sink = Around(in_cond), Keeps()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    with pytest.warns(MonitorWarning, match=r"inside of torch.cond"):
        torch.compile(model)(X).sum().backward()
    assert sink.modules() == ["after", ""]


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, layer: nn.Module) -> Tensor:
        found: Tensor = layer(x)
        return found

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def per_sample(layer: nn.Module, x: Tensor) -> Tensor:
    weights: dict[str, Tensor] = dict(layer.named_parameters())

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        found: Tensor = functional_call(layer, weights, (row,)).sum()
        return found

    found: Tensor = vmap(grad(loss), in_dims=(None, 0))(weights, x)["bias"]
    return found


READ: dict[str, Body] = {
    "vmap": lambda layer, x: vmap(layer)(x),
    "vmap of columns": lambda layer, x: vmap(lambda t: layer(t), in_dims=1, out_dims=1)(x.t()).t(),
    "vmap in vmap": lambda layer, x: vmap(vmap(layer))(x.view(2, 1, 4)).view(2, 4),
    "grad": lambda layer, x: grad(lambda t: layer(t).sum())(x),
    "jvp": lambda layer, x: jvp(layer, (x,), (x,))[1],
    "jacrev": lambda layer, x: jacrev(lambda t: layer(t).sum())(x),
    "hessian": lambda layer, x: hessian(lambda t: layer(t).sin().sum())(x[0]),
    "grad of each sample": per_sample,
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "autograd.Function": lambda layer, x: Through.apply(x * 1, layer),  # type: ignore[no-untyped-call,unused-ignore]
}


def read(body: Body, name: RecorderName, backend: str | None, has_grad: bool) -> list[object]:
    """What was shown: where, of which shape, and the magnitudes."""
    torch._dynamo.reset()
    model, sink = Around(body), Keeps()
    Monitor(model, recorder=name, sinks=[sink])
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    with torch.set_grad_enabled(has_grad):
        run(X)
    found: list[object] = []
    for frame in sink.take():
        for line in frame.lines:
            assert isinstance(line.content, TensorStats)
            magnitudes = (line.content.abs_min, line.content.abs_max)
            found += [frame.module, line.label, line.content.shape, *(pytest.approx(x, abs=1e-6) for x in magnitudes)]
    return found


@pytest.mark.filterwarnings("error::overflowstat.errors.MonitorWarning")
@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("way", READ)
def test_what_runs_inside_of_these_is_read_as_in_the_eager_model(
    way: str, has_grad: bool, recorder_name: RecorderName
) -> None:
    expected = read(READ[way], recorder_name, None, has_grad)
    assert "inside" in expected
    found = read(READ[way], recorder_name, "aot_eager", has_grad)
    assert [getattr(x, "expected", x) for x in found] == expected


def test_inductor_reads_what_runs_for_each_sample(recorder_name: RecorderName) -> None:
    expected = read(per_sample, recorder_name, None, True)
    assert [getattr(x, "expected", x) for x in read(per_sample, recorder_name, "inductor", True)] == expected


def test_one_bad_row_of_a_batch_is_found_in_the_layer_that_vmap_calls(recorder_name: RecorderName) -> None:
    model = Around(READ["vmap"])
    Monitor(model, recorder=recorder_name, sinks=[])
    with torch.no_grad():
        model.inside.weight.fill_(1e38)
    with pytest.raises(NonFiniteError, match=r"first in inside \(Linear\), output: some of 8 are"):
        torch.compile(model, backend="aot_eager")(X * torch.tensor([[0.0], [100.0]]))

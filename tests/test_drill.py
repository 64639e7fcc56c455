"""What running a forward once more leaves as it was, and what is not run again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError
from overflowstat.calls import Call
from overflowstat.drill import Seen, drill
from overflowstat.operations import Birth
from overflowstat.recorder import RecorderName, make_recorder
from overflowstat.report import Report
from overflowstat.rerun import why_not_again
from overflowstat.row import NonFinite
from overflowstat.run_state import RunState


class Does(nn.Module):
    """And counts how often it did."""

    def __init__(self, does: Callable[..., Any], **members: nn.Module | Tensor) -> None:
        super().__init__()
        self.does = does
        self.calls = 0
        for name, member in members.items():
            if isinstance(member, nn.Module):
                self.add_module(name, member)
            else:
                self.register_buffer(name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.does(self, *args, **kwargs)


def birth(recorder_name: RecorderName, kinds: NonFinite, module: nn.Module, *args: Any, **kwargs: Any) -> Birth:
    call = Call(module, args, kwargs, None, None)
    found = drill(call, Seen(module, "output", kinds), make_recorder(recorder_name), RunState.now()).origin
    assert isinstance(found, Birth)
    return found


def test_what_it_writes_to_is_put_back_with_its_version(recorder_name: RecorderName) -> None:
    given, weight = torch.ones(3), nn.Parameter(torch.ones(3))
    hidden = torch.arange(6.0).view(2, 3).T  # not dense from its first element on, and a view of another

    def forward(self: Any, x: Tensor) -> Tensor:
        self.mean.mul_(0.9)
        self.weight.data.add_(1)
        hidden.zero_()
        return x.div_(0)

    module = Does(forward, mean=torch.full((3,), 2.0))
    module.register_parameter("weight", weight)
    tensors = [given, weight, hidden, module.get_buffer("mean")]
    before = [(tensor.clone(), tensor._version) for tensor in tensors]
    found = birth(recorder_name, NonFinite.POSINF, module, given)
    assert found.operation == "aten.div_" and module.calls == 1
    for tensor, (copy, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copy) and tensor._version == version


def test_what_it_puts_in_the_place_of_a_member_is_taken_away(recorder_name: RecorderName) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.mean = self.mean + 1
        self.linear.weight.data = torch.zeros(5, 2)
        self.linear.bias = None
        return x / 0

    linear, mean = nn.Linear(2, 2), torch.ones(2)
    weight, bias, data = linear.weight, linear.bias, linear.weight.detach().clone()
    module = Does(forward, mean=mean, linear=linear)
    assert birth(recorder_name, NonFinite.POSINF, module, torch.ones(2)).operation == "aten.div"
    assert module.get_buffer("mean") is mean
    assert linear.weight is weight and linear.bias is bias and torch.equal(weight, data)


def test_batch_norms_statistics_are_those_of_one_forward(recorder_name: RecorderName) -> None:
    states = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(2), Does(lambda self, x: x / 0))
        if watched:
            with Monitor(model, recorder=recorder_name, on_detect=lambda report: None, sinks=[]):
                model(torch.randn(4, 2))
        else:
            model(torch.randn(4, 2))
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_random_numbers_go_on_as_if_it_had_not_run(recorder_name: RecorderName) -> None:
    model = nn.Sequential(nn.Dropout(0.5), Does(lambda self, x: torch.rand_like(x) / 0))
    numbers = []
    for watched in (False, True):
        torch.manual_seed(0)
        with Monitor(model, recorder=recorder_name, on_detect=lambda report: None, sinks=[]) as monitor:
            if not watched:
                monitor.disable()
            model(torch.ones(8))
        numbers.append(torch.rand(4))
    assert torch.equal(*numbers)


def test_the_whole_model_is_run_with_the_random_numbers_that_it_had(recorder_name: RecorderName) -> None:
    """The inner one alone draws others, and keeps none in two of three cases."""
    torch.manual_seed(0)
    inner = Does(lambda self, x: (nn.functional.dropout(x, 0.9) - 10).reciprocal())  # what is kept is 1 / (1 - 0.9)
    model = Does(lambda self, x: self.inner(x), inner=inner)
    verdicts = []
    for _ in range(40):
        found: list[Report] = []
        with Monitor(model, recorder=recorder_name, on_detect=found.append, sinks=[]):
            model(torch.ones(4))
        verdicts += [report.verdict for report in found]
    assert len(verdicts) > 5
    named = {(verdict.module, verdict.operation, verdict.kind) for verdict in verdicts if verdict is not None}
    assert named == {("inner", "aten.reciprocal", "division-by-zero")}


def test_training_goes_on_under_autocast_with_the_same_gradients(recorder_name: RecorderName) -> None:
    """Casts of weights made without gradients must not be met by the forward that goes on."""
    gradients = []
    for watched in (False, True):
        torch.manual_seed(0)
        bad = Does(lambda self, x: torch.stack([self.linear(x).sum(), x.new_zeros(()).log()]), linear=nn.Linear(4, 4))
        model = Does(lambda self, x: self.bad(x)[0] + self.bad.linear(x).sum(), bad=bad)
        monitor = Monitor(model, recorder=recorder_name, on_detect=lambda report: None, sinks=[])
        if not watched:
            monitor.disable()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(2, 4))
        loss.backward()
        assert bad.calls == 1 + watched
        monitor.remove()
        gradients.append([weight.grad for weight in model.parameters()])
    assert all(a is not None and torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_no_gradient_is_recorded_and_no_hook_is_left(recorder_name: RecorderName) -> None:
    seen: list[bool] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        seen.append(y.requires_grad)
        return y / 0

    model = Does(forward, linear=nn.Linear(2, 2))
    calls: list[nn.Module] = []
    model.get_submodule("linear").register_forward_hook(lambda module, args, output: calls.append(module))
    with pytest.raises(NonFiniteError), Monitor(model, recorder=recorder_name, sinks=[]):
        model(torch.ones(2))
    assert seen == [True, False] and len(calls) == 2  # the user's own hooks are part of what is run
    hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]
    assert hooks == [0, 1]


def test_lists_and_dicts_that_are_given_are_not_added_to(recorder_name: RecorderName) -> None:
    def forward(self: Any, x: Tensor, seen: list[Any], named: dict[str, Any]) -> Tensor:
        seen.append(len(seen))
        named[str(len(named))] = 1
        return x / 0

    seen: list[Any] = []
    named: dict[str, Any] = {}
    model = Does(forward)
    with pytest.raises(NonFiniteError), Monitor(model, recorder=recorder_name, sinks=[]):
        model(torch.ones(2), seen, named=named)
    assert model.calls == 2 and seen == [0] and list(named) == ["0"]


def test_one_that_raises_then_says_so(recorder_name: RecorderName) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.calls > 1:
            raise KeyError("only once")
        return x / 0

    with pytest.raises(NonFiniteError) as raised, Monitor(Does(forward), recorder=recorder_name, sinks=[]) as monitor:
        monitor.model(torch.ones(2))
    verdict = raised.value.verdict
    assert verdict is not None and (verdict.produced, verdict.operation, verdict.kind) == (True, None, "unknown")
    assert "run again, it raised KeyError: 'only once'" in verdict.text


def test_one_that_is_finite_then_says_so(recorder_name: RecorderName) -> None:
    model = Does(lambda self, x: x / (self.calls - 1))
    with pytest.raises(NonFiniteError) as raised, Monitor(model, recorder=recorder_name, sinks=[]):
        model(torch.ones(2))
    verdict = raised.value.verdict
    assert verdict is not None and verdict.operation is None and "run again, it gave finite numbers" in verdict.text


def test_memory_that_is_not_initialised_is_found_by_filling_it(recorder_name: RecorderName) -> None:
    """Whose numbers are finite, by luck, when it is run again."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.empty(4)
        if self.calls == 1:
            y.fill_(float("nan"))  # what was in that memory
        elif not bool(y.isnan().all()):
            y.zero_()
        y[:2] = x
        return y

    found: list[Report] = []
    model = Does(forward)
    with Monitor(model, recorder=recorder_name, on_detect=found.append, sinks=[]):
        model(torch.ones(2))
    verdict = found[0].verdict
    assert verdict is not None and (verdict.operation, verdict.kind) == ("aten.empty", "uninitialised")


class Cache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (Cache(), "it is given a Cache, which it may write to"),
        ([1, {"a": Cache()}], "it is given a Cache, which it may write to"),
        ((None, True, 1, 2.5, "text", torch.float16, torch.device("cpu"), [torch.ones(1)], {"a": slice(3)}, abs), ""),
    ],
)
def test_what_is_given_tells_whether_it_is_run_again(given: Any, reason: str) -> None:
    for call in (
        Call(nn.Identity(), (given,), {}, None, None),
        Call(nn.Identity(), (), {"past": given}, None, None),
    ):
        assert why_not_again(call) == reason


def test_what_a_transform_of_functorch_runs_is_not_run_again(recorder_name: RecorderName) -> None:
    model = Does(lambda self, x: x / 0)
    with pytest.raises(NonFiniteError) as raised, Monitor(model, recorder=recorder_name, sinks=[]):
        torch.func.vmap(model)(torch.ones(2, 3))
    verdict = raised.value.verdict
    assert verdict is not None and model.calls == 1 and "transform of torch.func" in verdict.text

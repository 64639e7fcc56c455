"""What torch.export makes of a watched model is that of the model alone."""

from collections.abc import Callable

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError
from overflowstat.errors import MonitorWarning
from overflowstat.recorder import RecorderName

X = torch.ones(2, 3)
BAD = torch.tensor([[1.0, torch.inf, 1.0], [1.0, 1.0, 1.0]])


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


def exported(model: nn.Module) -> str:
    return str(torch.export.export(model, (X,)).graph)


def made_fx(model: nn.Module) -> str:
    from torch.fx.experimental.proxy_tensor import make_fx

    return str(make_fx(model)(X).graph)


# torch warns of what is its own future.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
WAYS = pytest.mark.parametrize("program", [exported, made_fx])


@WAYS
@pytest.mark.filterwarnings("ignore::overflowstat.errors.MonitorWarning")
def test_a_program_has_nothing_of_the_monitor_in_it(
    program: Callable[[nn.Module], str], recorder_name: RecorderName
) -> None:
    of_the_model = program(make())
    model = make()
    Monitor(model, recorder=recorder_name, sinks=[])
    assert program(model) == of_the_model


@WAYS
def test_making_a_program_is_no_batch_and_the_model_is_watched_after_it(
    program: Callable[[nn.Module], str], recorder_name: RecorderName
) -> None:
    model, sink = make(), Keeps()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    with pytest.warns(MonitorWarning, match="what torch.export, make_fx or AOTAutograd makes of Sequential is not"):
        program(model)
    assert (monitor.batch_number, monitor.total_calls) == (1, 4)
    with pytest.raises(NonFiniteError, match=r"first in 0 \(Linear\), input\[0\]"):
        model(BAD)


def test_the_program_that_aot_module_runs_is_said_not_to_be_watched(recorder_name: RecorderName) -> None:
    from torch._functorch.aot_autograd import aot_module

    model = make()
    Monitor(model, recorder=recorder_name, sinks=[])
    with pytest.warns(MonitorWarning, match="AOTAutograd makes of Sequential is not watched"):
        aot_module(model, lambda graph, examples: graph)(X)


@pytest.mark.filterwarnings("error::overflowstat.errors.MonitorWarning")
def test_that_it_is_not_watched_is_told_once(recorder_name: RecorderName) -> None:
    model = make()
    Monitor(model, recorder=recorder_name, sinks=[])
    with pytest.warns(MonitorWarning):
        exported(model)
    exported(model)


@pytest.mark.filterwarnings("ignore::overflowstat.errors.MonitorWarning")
def test_what_fails_to_become_a_program_leaves_the_monitor_as_it_was(recorder_name: RecorderName) -> None:
    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = make()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inside(x)
            if torch.compiler.is_exporting():
                raise RuntimeError("this cannot be exported")
            return y

    model = Refuses()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    with pytest.raises(Exception, match="cannot be exported"):
        exported(model)
    model(X)
    assert (monitor.batch_number, monitor.total_calls) == (1, 5)


def test_a_layer_on_its_own_becomes_a_program_without_the_monitor(recorder_name: RecorderName) -> None:
    model = nn.Sequential(make(), nn.ReLU())
    of_the_layer = exported(model[0])
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    assert exported(model[0]) == of_the_layer
    assert monitor.total_calls == 0


def test_what_unflatten_makes_of_a_program_is_watched(recorder_name: RecorderName) -> None:
    modules = torch.export.unflatten(torch.export.export(make(), (X,)))
    Monitor(modules, recorder=recorder_name, sinks=[])
    modules(X)
    with pytest.raises(NonFiniteError, match=r"first in 0 \(\w+\), input\[0\]"):
        modules(BAD)


def test_strict_export_says_what_stands_in_its_way(recorder_name: RecorderName) -> None:
    model = make()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    with pytest.raises(Exception, match=r"overflowstat watches this model, until monitor.disable\(\)"):
        torch.export.export(model, (X,), strict=True)
    monitor.disable()
    assert "linear" in str(torch.export.export(model, (X,), strict=True).graph)

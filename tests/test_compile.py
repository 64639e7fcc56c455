"""Models that torch.compile compiles, before a monitor is attached or after: watched, or told that they are not."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn
from torch._dynamo.utils import counters

from overflowstat import DebugUnderflowOverflow, Monitor, NonFiniteError
from overflowstat.errors import MonitorWarning
from overflowstat.recorder import RecorderName

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

X = torch.ones(2, 3)
BACKEND = "eager"  # what is compiled, and when, is the same


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


def compiled(model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    function: Callable[[Tensor], Tensor] = torch.compile(model, backend=BACKEND, **options)
    return function


def in_place(model: nn.Module) -> Callable[[Tensor], Tensor]:
    model.compile(backend=BACKEND)
    return model


EVERY_CALL = ["0", "1", "2", ""]


@pytest.mark.parametrize("how", [compiled, in_place])
@pytest.mark.parametrize("when", ["before it is attached", "after"])
def test_a_model_is_watched_if_nothing_of_it_ran_compiled_before(
    recorder_name: RecorderName, sink: Keeps, how: Callable[[nn.Module], Callable[[Tensor], Tensor]], when: str
) -> None:
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        if when == "after":
            monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
            run = how(model)
        else:
            run = how(model)
            monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
        for number in range(3):
            run(X)
            assert sink.modules() == EVERY_CALL and monitor.batch_number == number + 1
        with pytest.raises(NonFiniteError, match=r"inf in batch 3, first in 0 \(Linear\), input\[0\]"):
            run(X * float("inf"))
        monitor.remove()
    expected = make()
    expected.load_state_dict(model.state_dict())
    assert torch.equal(run(X), expected(X))


def test_a_model_that_compiles_itself_is_watched_though_it_ran_before(recorder_name: RecorderName, sink: Keeps) -> None:
    model = make()
    in_place(model)(X)
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    assert sink.modules() == EVERY_CALL


def test_none_of_our_own_code_is_compiled(recorder_name: RecorderName) -> None:
    model = make()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    run = compiled(model)
    for _ in range(3):
        run(X)
    assert monitor.batch_number == 3
    # The model's own, in parts: two for each of its modules, and for itself.
    assert 0 < counters["frames"]["total"] <= 2 * len(list(model.modules()))


def test_a_compiled_part_that_ran_before_is_told_and_watched_after_a_reset(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    model = make()
    model[0] = cast("nn.Module", torch.compile(model[0], backend=BACKEND))
    model(X)
    with pytest.warns(MonitorWarning, match=r"torch\.compile has made 0: what it has compiled already.*reset\(\)"):
        Monitor(model, recorder=recorder_name, sinks=[sink])
    torch.compiler.reset()
    model(X)
    assert sink.modules() == ["0", *EVERY_CALL]


def test_a_compiled_model_that_ran_before_is_told_and_watched_after_a_reset(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    model = make()
    run = cast("nn.Module", torch.compile(model, backend=BACKEND))
    run(X)
    with pytest.warns(MonitorWarning, match=r"torch\.compile has made the model itself: what it has compiled already"):
        Monitor(run, recorder=recorder_name, sinks=[sink])
    torch.compiler.reset()
    run(X)
    assert sink.modules() == [*EVERY_CALL, ""]


@pytest.mark.parametrize("watch", [Monitor, DebugUnderflowOverflow])
def test_a_model_whose_compiled_double_ran_before_is_told_when_nothing_was_seen(watch: Any) -> None:
    """The monitor knows of the double only that no call comes."""
    model = make()
    run = compiled(model)
    run(X)
    monitor = watch(model)
    run(X)
    with pytest.warns(MonitorWarning, match=r"no call of a module of Sequential was seen: if torch\.compile"):
        monitor.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.remove()


class Users(nn.Module):
    """A class of one's own, whose hooks the compiled double calls as those of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output


@pytest.mark.parametrize("how", ["at an optimizer's step", "when it is removed"])
def test_a_model_of_whose_compiled_double_only_the_root_is_seen_is_told(recorder_name: RecorderName, how: str) -> None:
    model = Users()
    run = compiled(model)
    run(X)
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    run(X).sum().backward()  # type: ignore[no-untyped-call]
    assert monitor.total_calls == 1, "the root alone"
    end = torch.optim.SGD(model.parameters(), lr=0.1).step if how == "at an optimizer's step" else monitor.remove
    with pytest.warns(MonitorWarning, match="no call of a module inside Users was seen: if torch.compile had"):
        end()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.remove()


@pytest.mark.parametrize("model", [nn.Linear(3, 3), make()])
def test_a_model_that_is_not_compiled_is_not_told_so_where_another_one_is(
    recorder_name: RecorderName, model: nn.Module
) -> None:
    """Also where the root is all there is."""
    compiled(make())(X)
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    model(X).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        monitor.remove()


def test_it_is_told_at_the_first_optimizer_step_and_once(recorder_name: RecorderName, sink: Keeps) -> None:
    model = make()
    run = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        run(X).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    step()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    with pytest.warns(MonitorWarning, match="no call of a module of Sequential was seen"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    torch.compiler.reset()
    step()
    assert sink.modules() == EVERY_CALL
    monitor.remove()


def test_the_optimizer_of_another_model_says_nothing(recorder_name: RecorderName) -> None:
    other = make()
    monitor = Monitor(make(), recorder=recorder_name, sinks=[])
    other(X).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        monitor.remove()


def test_a_graph_that_must_not_break_says_who_breaks_it(recorder_name: RecorderName) -> None:
    model = make()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    run = compiled(model, fullgraph=True)
    with pytest.raises(Exception, match=r"overflowstat watches this model, until monitor\.disable\(\)"):
        run(X)
    monitor.disable()
    torch.compiler.reset()
    run(X)
    assert monitor.batch_number == 0


def test_a_layer_whose_graph_must_not_break_says_who_breaks_it(recorder_name: RecorderName) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    Monitor(model, recorder=recorder_name, sinks=[])
    model[1].compile(backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"(?i)overflowstat"):
        model(torch.ones(1, 4))


def test_a_detached_model_is_compiled_in_one_piece_again(recorder_name: RecorderName) -> None:
    model = make()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    run = compiled(model)
    run(X)
    monitor.remove()
    torch.compiler.reset()
    counters.clear()
    run(X)
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.usefixtures("recorder_name")
def test_with_the_compiler_that_is_the_default(recorder_name: RecorderName, sink: Keeps) -> None:
    model = make()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    run = torch.compile(model)
    for _ in range(2):
        run(X)
        assert sink.modules() == EVERY_CALL
    with pytest.raises(NonFiniteError, match=r"first in 0 \(Linear\), input\[0\]"):
        run(X * float("nan"))

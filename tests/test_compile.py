"""Models that torch.compile compiles, before a monitor is attached or after: watched, or told that they are not."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn
from torch._dynamo.utils import counters

from overflowstat import Monitor, NonFiniteError
from overflowstat.errors import MonitorWarning
from overflowstat.recorder import RecorderName

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("nothing_compiled"),
]

X = torch.ones(2, 3)
BACKEND = "eager"  # what is compiled, and when, is the same


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


class Users(nn.Module):
    """A class of one's own, of which Dynamo compiles the forward alone, where of torch's own it does all of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output


EVERY_CALL_OF_USERS = ["net.0", "net.1", "net.2", "net", ""]


def of_each_kind(test: Any) -> Any:
    """With a model of torch's own classes and one of the user's, each compiled in either way."""
    kinds = pytest.mark.parametrize(("make_model", "calls"), [(make, EVERY_CALL), (Users, EVERY_CALL_OF_USERS)])
    return pytest.mark.parametrize("how", [compiled, in_place])(kinds(test))


def test_a_compiled_part_that_ran_before_is_watched(recorder_name: RecorderName, sink: Keeps) -> None:
    model = make()
    model[0] = cast("nn.Module", torch.compile(model[0], backend=BACKEND))
    model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        Monitor(model, recorder=recorder_name, sinks=[sink])
        model(X)
    assert sink.modules() == ["0", *EVERY_CALL]


def test_what_torch_compile_made_and_ran_before_is_watched(recorder_name: RecorderName, sink: Keeps) -> None:
    run = cast("nn.Module", torch.compile(make(), backend=BACKEND))
    run(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        Monitor(run, recorder=recorder_name, sinks=[sink])
        run(X)
    assert sink.modules() == [*EVERY_CALL, ""]


@of_each_kind
def test_a_model_that_ran_compiled_before_is_watched_from_the_first_batch_on(
    recorder_name: RecorderName,
    sink: Keeps,
    how: Callable[[nn.Module], Callable[[Tensor], Tensor]],
    make_model: Callable[[], nn.Module],
    calls: list[str],
) -> None:
    model = make_model()
    run = how(model)
    run(X)
    Monitor(model, recorder=recorder_name, sinks=[sink])
    for _ in range(2):
        run(X)
        assert sink.modules() == calls


@of_each_kind
def test_a_model_is_watched_though_another_of_its_class_was_compiled_before(
    recorder_name: RecorderName,
    sink: Keeps,
    how: Callable[[nn.Module], Callable[[Tensor], Tensor]],
    make_model: Callable[[], nn.Module],
    calls: list[str],
) -> None:
    how(make_model())(X)
    model = make_model()
    run = how(model)
    Monitor(model, recorder=recorder_name, sinks=[sink])
    run(X)
    assert sink.modules() == calls


def test_a_batch_that_ran_as_another_model_was_compiled_is_told_and_the_next_is_watched(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    model, teacher = Users(), Users()
    run, run_teacher = compiled(model), compiled(teacher)
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    run(X)
    assert sink.modules() == EVERY_CALL_OF_USERS
    run_teacher(X)
    with pytest.warns(MonitorWarning, match="batch 1 was not watched inside of the model itself"):
        run(X)
    assert sink.modules() == [""]
    for _ in range(3):
        run(X)
        assert sink.modules() == EVERY_CALL_OF_USERS
        run_teacher(X)
    monitor.remove()


def test_after_remove_it_runs_as_it_was_compiled_before(recorder_name: RecorderName, sink: Keeps) -> None:
    model = Users()
    run = compiled(model)
    run(X)
    members = dict(vars(model))
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    run(X)
    graphs = counters["stats"]["unique_graphs"]
    monitor.remove()
    sink.take()
    run(X)
    assert (sink.frames, counters["stats"]["unique_graphs"], vars(model)) == ([], graphs, members)


def test_what_a_removed_monitor_had_compiled_does_not_run_any_more(recorder_name: RecorderName) -> None:
    model = Users()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    run = compiled(model)
    run(X)
    hook: Any = next(iter(model.net[0]._forward_hooks.values()))
    row = hook.rows[0]
    monitor.remove()
    before = row.clone()
    run(X)
    assert torch.equal(row, before)


def test_disabled_and_enabled_it_needs_no_other_graph(recorder_name: RecorderName, sink: Keeps) -> None:
    model = Users()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    run = compiled(model)
    run(X)
    monitor.disable()
    monitor.enable()
    sink.take()
    graphs = counters["stats"]["unique_graphs"]
    run(X)
    assert sink.modules() == EVERY_CALL_OF_USERS
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_with_code_of_its_own_is_not_watched_and_works(
    recorder_name: RecorderName, sink: Keeps, copied: Callable[[nn.Module], nn.Module]
) -> None:
    model = Users()
    compiled(model)(X)
    Monitor(model, recorder=recorder_name, sinks=[sink])
    run = compiled(model)
    run(X)
    sink.take()
    other = copied(model)
    assert torch.equal(compiled(other)(X), model(X))
    sink.take()
    compiled(other)(X)
    assert sink.frames == []
    run(X)
    assert sink.modules() == EVERY_CALL_OF_USERS


def test_a_function_that_was_compiled_with_the_model_before_is_told_of(recorder_name: RecorderName) -> None:
    """Its code is none of the model's, and no hook is ever called."""
    model = make()
    run = compiled(cast("nn.Module", lambda x: model(x)))
    run(X)
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    run(X)
    with pytest.warns(MonitorWarning, match=r"no call of a module of Sequential was seen: if torch\.compile"):
        monitor.remove()
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
    run = compiled(cast("nn.Module", lambda x: model(x)))
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

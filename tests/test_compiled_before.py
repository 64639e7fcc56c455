"""What was compiled before a monitor came, where no code of its own can be given: told in the first batch, or never."""

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn
from torch._dynamo.utils import counters

from overflowstat import DebugUnderflowOverflow, Monitor
from overflowstat.errors import MonitorWarning
from overflowstat.recorder import RecorderName

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("nothing_compiled"),
]

X = torch.ones(2, 3)
BACKEND = "eager"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


class NoGrad(Layer):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


class Autocast(Layer):
    @torch.autocast("cpu", dtype=torch.bfloat16)  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


class BreaksInMethod(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.route(x)

    def route(self, x: Tensor) -> Tensor:
        y = self.a(x)
        torch._dynamo.graph_break()
        z: Tensor = self.b(y)
        return z


def breaks(layer: Any, x: Tensor) -> Tensor:
    y = layer.a(x)
    torch._dynamo.graph_break()
    z: Tensor = layer.b(y)
    return z


class BreaksInFunction(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return breaks(self, x)


class BreaksInWhatNobodyNames(Layer):
    functions = (breaks,)

    def forward(self, x: Tensor) -> Tensor:
        return self.functions[0](self, x)


class CompiledForward(Layer):
    @torch.compile(backend=BACKEND)
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


class CompiledMethod(Layer):
    @torch.compile(backend=BACKEND)
    def go(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.go(x)
        return y


def in_place(layer: nn.Module) -> None:
    layer.compile(backend=BACKEND)


def its_forward(layer: nn.Module) -> None:
    layer.forward = torch.compile(layer.forward, backend=BACKEND)


def as_it_is(layer: nn.Module) -> None:
    pass


Case = tuple[type[Layer], Callable[[nn.Module], None]]
CASES: list[Case] = [
    (Layer, its_forward),
    (NoGrad, in_place),
    (Autocast, in_place),
    (BreaksInMethod, in_place),
    (BreaksInFunction, in_place),
    (BreaksInWhatNobodyNames, in_place),
    (CompiledForward, as_it_is),
    (CompiledMethod, as_it_is),
]
each_case = pytest.mark.parametrize("case", CASES, ids=[f"{kind.__name__}-{how.__name__}" for kind, how in CASES])
each_place = pytest.mark.parametrize("is_root", [True, False])


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(x).float())
        return y


def make(case: Case, is_root: bool) -> nn.Module:
    kind, how = case
    layer = kind()
    how(layer)
    return layer if is_root else Around(layer)


def every_call(is_root: bool) -> list[str]:
    return ["a", "b", ""] if is_root else ["layer.a", "layer.b", "layer", "head", ""]


def assert_seen(found: list[str], is_root: bool, recorder_name: RecorderName) -> None:
    """In order, which graphs without the extension's clock do not tell."""
    wanted = every_call(is_root)
    assert found == wanted if recorder_name == "native" else sorted(found) == sorted(wanted)


def told(case: Case, is_root: bool, batch: int = 0) -> str:
    name = "the model itself" if is_root else "layer"
    return re.escape(f"no call inside of {name} ({case[0].__name__}) was seen in batch {batch}, and torch.compile had")


@pytest.fixture
def nothing_is_told() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        yield


@each_case
@each_place
@pytest.mark.parametrize("first", ["the same", "another"])
def test_that_nothing_inside_was_seen_is_told_in_the_first_batch_and_once(
    recorder_name: RecorderName, sink: Keeps, case: Case, is_root: bool, first: str
) -> None:
    if first == "another" and case[1] is its_forward:
        pytest.skip("one model's own compiled forward never runs in the place of another's: there is nothing to tell")
    model = make(case, is_root)
    (model if first == "the same" else make(case, True))(X)
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", MonitorWarning)
        model(X)
    texts = [str(warning.message) for warning in warned if warning.category is MonitorWarning]
    if case[0] in (NoGrad, Autocast) and not texts:  # of what torch 2.14's decorators give there can be a copy
        assert_seen(sink.modules(), is_root, recorder_name)
    else:
        assert len(texts) == 1 and re.match(told(case, is_root), texts[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error", MonitorWarning)
            model(X)
        torch.compiler.reset()  # as it says
    sink.take()
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        model(X)
        assert_seen(sink.modules(), is_root, recorder_name)
        monitor.remove()


@each_case
@each_place
@pytest.mark.usefixtures("nothing_is_told")
def test_what_is_compiled_after_the_monitor_has_come_is_watched(
    recorder_name: RecorderName, sink: Keeps, case: Case, is_root: bool
) -> None:
    model = make(case, is_root)
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    for _ in range(2):
        model(X)
        assert_seen(sink.modules(), is_root, recorder_name)
    monitor.remove()


def test_what_another_had_compiled_between_two_batches_is_told(recorder_name: RecorderName, sink: Keeps) -> None:
    case = BreaksInMethod, in_place
    model, another = make(case, False), make(case, True)
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    assert sink.modules() == every_call(False)
    another(X)
    with pytest.warns(MonitorWarning, match=told(case, False, batch=1)):
        model(X)


def test_the_drop_in_tells_it_too() -> None:
    case = BreaksInMethod, in_place
    model = make(case, False)
    model(X)
    DebugUnderflowOverflow(model)
    with pytest.warns(MonitorWarning, match=told(case, False)):
        model(X)


@pytest.mark.filterwarnings("ignore:the forward of Around itself is never called")
@pytest.mark.parametrize("settle", [Monitor.check, Monitor.step])
def test_without_a_root_the_end_of_a_batch_tells_it(
    recorder_name: RecorderName, settle: Callable[[Monitor], None]
) -> None:
    case = Layer, its_forward
    model: Any = make(case, False)
    model(X)
    monitor = Monitor(model, recorder=recorder_name, sinks=[], batch_ends="step")
    model.layer(X)
    with pytest.warns(MonitorWarning, match=told(case, False)):
        settle(monitor)


@pytest.mark.parametrize("settle", [Monitor.check, Monitor.step])
def test_the_end_of_a_batch_tells_that_no_module_was_called(
    recorder_name: RecorderName, settle: Callable[[Monitor], None]
) -> None:
    model = Layer()
    run = torch.compile(lambda x: model(x), backend=BACKEND)
    run(X)
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    run(X)
    with pytest.warns(MonitorWarning, match="no call of a module of Layer was seen"):
        settle(monitor)


class Skips(Layer):
    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return x * 2 if skip else super().forward(x)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Skips() for _ in range(2))

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        for layer in self.layers:
            x = layer(x, skip)
        return x


@pytest.mark.parametrize(
    ("is_whole", "skips"),
    [(False, (False, True, False, True)), (True, (False, True, False)), (True, (True, True, False))],
)
@pytest.mark.usefixtures("nothing_is_told")
def test_layers_that_call_nothing_in_a_batch_are_no_reason_to_compile_more(
    recorder_name: RecorderName, is_whole: bool, skips: tuple[bool, ...]
) -> None:
    graphs = []
    for is_watched in (False, True):
        torch.compiler.reset()
        counters.clear()
        model = Skipping()
        for module in [model] if is_whole else model.layers:
            module.compile(backend=BACKEND)
        if is_watched:
            monitor = Monitor(model, recorder=recorder_name, sinks=[])
        for skip in skips:
            model(X, skip)
        graphs.append(counters["stats"]["unique_graphs"])
    monitor.remove()
    assert graphs[0] == graphs[1]


class WithTeacher(nn.Module):
    """Which is no module of it, and is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.teachers = (Layer(),)
        for layer in (self.layer, *self.teachers):
            in_place(layer)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.teachers[0](x) - self.layer(x)
        return y


def test_a_layer_that_ran_as_another_was_compiled_in_the_first_batch_is_told_in_the_second_and_then_watched(
    recorder_name: RecorderName, sink: Keeps
) -> None:
    model = WithTeacher()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)  # nothing had been compiled when this began
    with pytest.warns(MonitorWarning, match=r"no call inside of layer \(Layer\) was seen in batch 1: .* once more"):
        model(X)
    sink.take()
    model(X)
    assert sink.modules() == ["layer.a", "layer.b", "layer", ""]


class HasWhatNobodyCalls(nn.Module):
    """Computes by the weights of a child, and by nn.MultiheadAttention, which does that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.attention = nn.MultiheadAttention(3, 1)
        self.held = nn.ModuleList()
        self.weights = nn.ParameterList([nn.Parameter(X.clone())])

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.used.weight)
        z: Tensor = self.attention(y, y, y)[0]
        weight: Tensor = self.weights[0]
        return z + weight


@pytest.mark.parametrize("part", ["", "attention", None])
@pytest.mark.usefixtures("nothing_is_told")
def test_modules_that_nobody_calls_are_not_missed(recorder_name: RecorderName, sink: Keeps, part: str | None) -> None:
    another = HasWhatNobodyCalls()
    in_place(another)
    another(X)
    model = HasWhatNobodyCalls()
    if part is not None:
        in_place(model.get_submodule(part))
        model(X)
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    for _ in range(2):
        model(X)
        assert sink.modules() == ["attention", ""]
    monitor.remove()


@each_case
@pytest.mark.usefixtures("nothing_is_told")
def test_what_runs_eagerly_is_watched_whatever_was_compiled(
    recorder_name: RecorderName, sink: Keeps, case: Case
) -> None:
    model = make(case, False)
    model(X)
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    with torch.compiler.set_stance("force_eager"):
        model(X)
    assert sink.modules() == every_call(False)
    monitor.remove()


@pytest.mark.usefixtures("nothing_is_told")
def test_a_forward_that_raises_before_it_calls_a_module_is_not_told_so(recorder_name: RecorderName) -> None:
    case = Layer, its_forward
    model = make(case, True)
    model(X)
    Monitor(model, recorder=recorder_name, sinks=[])
    with pytest.raises(TypeError):
        model()

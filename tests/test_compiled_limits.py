"""What torch.compile makes where it does not take what it is given, or where no module call is around a graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError
from overflowstat.errors import MonitorWarning
from overflowstat.recorder import RecorderName
from overflowstat.stats import TensorStats

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:"),
]
X = torch.ones(2, 3)
BAD = torch.tensor([[1.0, torch.inf, 1.0], [1.0, 1.0, 1.0]])


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


class WithScripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.scripted(self.first(x)))
        return y


def test_around_a_scripted_module_a_compiled_model_is_watched(recorder_name: RecorderName) -> None:
    model, sink = WithScripted(), Keeps()
    with pytest.warns(MonitorWarning, match=r"scripted \(RecursiveScriptModule\) takes no hooks, and is not watched"):
        Monitor(model, recorder=recorder_name, sinks=[sink])
    run = torch.compile(model, backend="aot_eager")
    run(X)
    assert sink.modules() == ["first", "last", ""]
    with torch.no_grad():
        model.last.bias.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"first in last \(Linear\), bias"):
        run(X)


def takes_torch_only(graph: torch.fx.GraphModule, examples: object) -> Callable[..., Any]:
    for node in graph.graph.nodes:
        if "overflowstat" in str(node.target):
            raise NotImplementedError(f"no lowering for {node.target}")
    run: Callable[..., Any] = graph.forward
    return run


def test_a_backend_that_takes_no_operation_of_others_names_it_and_eagerly_the_model_is_watched(
    recorder_name: RecorderName,
) -> None:
    model, sink = make(), Keeps()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    run = torch.compile(model, backend=takes_torch_only)
    with pytest.raises(Exception, match=r"no lowering for overflowstat.read_v3"):
        run(X)
    sink.take()
    with torch.compiler.set_stance("force_eager"):
        run(X)
        assert sink.modules() == ["0", "1", "2", ""]
        with pytest.raises(NonFiniteError, match=r"first in 0 \(Linear\), input\[0\]"):
            run(BAD)


def test_a_monitor_that_is_disabled_leaves_such_a_backend_nothing_to_refuse(
    recorder_name: RecorderName,
) -> None:
    model = make()
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    with pytest.raises(Exception, match="no lowering"):
        torch.compile(model, backend=takes_torch_only)(X)
    monitor.disable()
    torch.compile(model, backend=takes_torch_only)(X)


@pytest.mark.filterwarnings("ignore:the forward of Sequential itself is never called")
@pytest.mark.parametrize("settle", [Monitor.check, Monitor.step])
def test_a_compiled_function_that_calls_modules_without_the_root_is_judged(
    settle: Callable[[Monitor], None], recorder_name: RecorderName
) -> None:
    model, sink = make(), Keeps()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink], batch_ends="step")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: Tensor) -> Tensor:
        y: Tensor = model[2](model[0](x))
        return y

    run(X)
    settle(monitor)
    assert sink.modules() == ["0", "2"]
    monitor.step()
    assert monitor.batch_number == 1
    run(BAD)
    with pytest.raises(NonFiniteError, match=r"batch 1, first in 0 \(Linear\), input\[0\]"):
        settle(monitor)


class Quantizes(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.quantized = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.quantized(torch.quantize_per_tensor(x, 0.5, 0, self.dtype))
        return y.dequantize()


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8])
def test_a_quantized_tensor_stops_nothing(dtype: torch.dtype, backend: str, recorder_name: RecorderName) -> None:
    model, sink = Quantizes(dtype), Keeps()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    found = torch.compile(model, backend=backend)(torch.tensor([1.1, 3.4]))
    assert found.tolist() == [1.0, 3.5]
    [inside, _] = sink.take()
    shown = [line.content for line in inside.lines]
    if backend == "eager":  # which runs the operation on what there is
        assert shown == [str(dtype).removeprefix("torch.")] * 2
    else:
        assert [(x.abs_min, x.abs_max) for x in shown if isinstance(x, TensorStats)] == [(1.0, 3.5)] * 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_monitor_that_is_attached_in_inference_mode_watches_outside_of_it(
    backend: str, recorder_name: RecorderName
) -> None:
    model, sink = make(), Keeps()
    run = torch.compile(model, backend=backend)
    with torch.inference_mode():
        Monitor(model, recorder=recorder_name, sinks=[sink])
        run(X)
    sink.take()
    run(X).sum().backward()
    assert sink.modules() == ["0", "1", "2", ""]
    with pytest.raises(NonFiniteError, match=r"first in 0 \(Linear\), input\[0\]"):
        run(BAD)


def test_a_module_that_is_added_in_inference_mode_is_watched_outside_of_it(recorder_name: RecorderName) -> None:
    model, sink = make(), Keeps()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    run = torch.compile(model, backend="aot_eager")
    run(X)
    with torch.inference_mode():
        model[1] = nn.Sequential(nn.ReLU(), nn.Tanh())
        run(X)
    sink.take()
    run(X)
    assert sorted(sink.modules()) == ["", "0", "1", "1.0", "1.1", "2"]

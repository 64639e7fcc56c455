"""CUDA graphs. Run by `pytest -m cuda` where there is a CUDA device; skipped elsewhere."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from keeps import Keeps
from on_cuda import keep_busy, requires_cuda
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError
from overflowstat.errors import MonitorWarning
from overflowstat.frames import Frame

pytestmark = [pytest.mark.cuda, requires_cuda]


def layers(count: int = 2, size: int = 8) -> nn.Sequential:
    """Each doubles what it gets."""
    model = nn.Sequential(*[nn.Linear(size, size, bias=count > 2) for _ in range(count)]).cuda()
    with torch.no_grad():
        for layer in model:
            layer.get_parameter("weight").copy_(2 * torch.eye(size))
            if count > 2:
                layer.get_parameter("bias").zero_()
    return model


def captured(model: nn.Module, static: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of the model's forward, after the warm-up that torch's documents ask for."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        model(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = model(static)
    return graph, out


def numbers(frames: list[Frame], label: str = "output") -> list[float]:
    contents = [line.content for frame in frames for line in frame.lines if line.label == label]
    return [float(content.abs_max) for content in contents if not isinstance(content, str)]


def test_each_replay_of_a_forward_is_watched() -> None:
    model, sink = layers(), Keeps()
    monitor = Monitor(model, recorder="native", sinks=[sink])
    static = torch.ones(4, 8, device="cuda")
    graph, out = captured(model, static)
    assert monitor.batch_number == 1, "the warm-up"
    sink.take()
    monitor.check()
    assert monitor.batch_number == 1 and sink.take() == []
    for number in range(1, 6):
        static.fill_(number)
        keep_busy(0.01)
        graph.replay()
        monitor.check()
        assert monitor.batch_number == 1 + number
        assert numbers(sink.take()) == [2 * number, 4 * number, 4 * number]
        assert out.max().item() == 4 * number


def test_an_overflow_in_a_replay_is_found_by_check() -> None:
    model = layers()
    monitor = Monitor(model, recorder="native", sinks=[])
    static = torch.ones(4, 8, device="cuda")
    graph, _ = captured(model, static)
    graph.replay()
    monitor.check()
    static.fill_(1.5e38)
    graph.replay()
    with pytest.raises(NonFiniteError, match=r"inf in batch 2, first in 1 \(Linear\), output: 32 of 32 are \+inf"):
        monitor.check()
    static[0, 0] = float("nan")
    graph.replay()
    with pytest.raises(NonFiniteError, match=r"nan in batch 3, first in 0 \(Linear\), input\[0\]: 1 of 32 is nan"):
        monitor.check()
    static.fill_(1)
    graph.replay()
    monitor.check()
    assert monitor.batch_number == 5


def test_replays_are_counted_and_the_last_one_is_judged() -> None:
    model, sink = layers(), Keeps()
    monitor = Monitor(model, recorder="native", sinks=[sink])
    static = torch.ones(4, 8, device="cuda")
    graph, _ = captured(model, static)
    sink.take()
    for number in range(1, 8):
        static.fill_(number)
        graph.replay()
    monitor.check()
    assert monitor.batch_number == 1 + 7
    assert numbers(sink.take()) == [14, 28, 28]


def test_two_graphs_and_forwards_between_their_replays() -> None:
    model, sink = layers(), Keeps()
    monitor = Monitor(model, recorder="native", sinks=[sink])
    statics = [torch.full((4, 8), value, device="cuda") for value in (1.0, 10.0)]
    graphs = [captured(model, static)[0] for static in statics]
    sink.take()
    for which, value in ((1, 10.0), (0, 1.0), (1, 10.0)):
        graphs[which].replay()
        monitor.check()
        assert numbers(sink.take()) == [2 * value, 4 * value, 4 * value]
        with torch.no_grad():
            model(torch.full((2, 8), 3.0, device="cuda"))
        assert numbers(sink.take()) == [6, 12, 12]


def test_weights_of_a_long_table_are_read_as_each_replay_finds_them() -> None:
    model, sink = layers(count=40), Keeps()
    for layer in model:
        torch.nn.init.eye_(layer.get_parameter("weight"))
    monitor = Monitor(model, recorder="native", sinks=[sink])
    static = torch.ones(4, 8, device="cuda")
    graph, _ = captured(model, static)
    for number in range(1, 4):
        with torch.no_grad():
            for i, layer in enumerate(model):
                layer.get_parameter("bias").fill_(number + i)
            model(static)  # eagerly, with a table of its own
        sink.take()
        graph.replay()
        monitor.check()
        assert numbers(sink.take(), "bias") == [number + i for i in range(40)]


def test_streams_that_fork_inside_a_graph() -> None:
    class Forks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = layers(1), layers(1)
            self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

        def forward(self, x: Tensor) -> Tensor:
            main = torch.cuda.current_stream()
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                a: Tensor = self.a(x)
            b: Tensor = self.b(x + 1)
            main.wait_stream(self.side)
            return a + b

    model, sink = Forks(), Keeps()
    monitor = Monitor(model, recorder="native", sinks=[sink])
    static = torch.ones(1 << 16, 8, device="cuda")
    graph, _ = captured(model, static)
    sink.take()
    for number in range(1, 20):
        static.fill_(number)
        graph.replay()
        monitor.check()
        frames = {frame.module: numbers([frame]) for frame in sink.take()}
        assert frames["a"] == [2 * number] and frames["b"] == [2 * number + 2] and frames[""] == [4 * number + 2]


def test_a_graph_outlives_its_monitor() -> None:
    model = layers()
    monitor = Monitor(model, recorder="native", sinks=[])
    static = torch.ones(4, 8, device="cuda")
    graph, out = captured(model, static)
    monitor.remove()
    del monitor
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 10,), 7.0, device="cuda") for _ in range(100)]  # where freed memory would be
    for number in range(1, 5):
        static.fill_(number)
        graph.replay()
        torch.cuda.synchronize()
        assert out.max().item() == 4 * number
    assert all(bool((x == 7).all()) for x in junk)


def test_a_graph_that_is_gone_is_judged_once_more_and_forgotten() -> None:
    model = layers()
    monitor = Monitor(model, recorder="native", sinks=[])
    static = torch.ones(4, 8, device="cuda")
    graph, _ = captured(model, static)
    graph.replay()
    graph.reset()
    del graph
    deadline = time.monotonic() + 10
    while monitor._captured and time.monotonic() < deadline:  # CUDA tells it in a thread of its own
        monitor.check()
        time.sleep(0.01)
    assert monitor._captured == [] and monitor.batch_number == 2


def test_graphs_one_after_the_other_use_the_same_memory() -> None:
    model = layers()
    with Monitor(model, recorder="native", sinks=[]) as monitor:
        static = torch.ones(4, 8, device="cuda")
        allocated = []
        for number in range(12):
            graph, out = captured(model, static)
            graph.replay()
            monitor.check()
            assert monitor.batch_number == 2 * (number + 1)
            del graph, out
            gc.collect()
            torch.cuda.synchronize()
            allocated.append(torch.cuda.memory_allocated())
    assert max(allocated[6:]) <= max(allocated[:6])


def test_a_part_that_torch_has_made_a_graph_of_is_watched_from_outside(capsys: pytest.CaptureFixture[str]) -> None:
    """Modules must have no hooks when they are made graphed callables, so a monitor comes after that."""
    part = layers(1)
    sample = torch.randn(4, 8, device="cuda", requires_grad=True)
    torch.cuda.make_graphed_callables(part, (sample,))
    model, sink = nn.Sequential(part, nn.ReLU()).cuda(), Keeps()
    monitor = Monitor(model, recorder="native", sinks=[sink])
    for value in (1.0, 2.0):
        model(torch.full((4, 8), value, device="cuda", requires_grad=True)).sum().backward()
        assert numbers(sink.take())[-3:] == [2 * value] * 3
    with pytest.raises(NonFiniteError, match=r"first in 0 \(Sequential\), output: 32 of 32 are \+inf"):
        model(torch.full((4, 8), 3e38, device="cuda", requires_grad=True))
    assert monitor.batch_number == 3


def test_plain_torch_says_that_it_does_not_read_inside_a_graph() -> None:
    model = layers()
    static = torch.ones(4, 8, device="cuda")
    with Monitor(model, recorder="torch", sinks=[]):
        with pytest.warns(MonitorWarning, match="cannot read tensors while a CUDA graph is captured"):
            graph, out = captured(model, static)
        static.fill_(5)
        graph.replay()
        torch.cuda.synchronize()
        assert out.max().item() == 20, "the capture is as if there were no monitor"


def test_a_device_that_was_never_read_is_named_when_a_graph_is_captured() -> None:
    from overflowstat.recorder import NativeRecorder, make_recorder

    recorder = NativeRecorder(make_recorder("native").extension)  # type: ignore[attr-defined]
    x = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(RuntimeError, match="nothing on cuda:0 was read before the capture of a CUDA graph began"):
            recorder.record([y])
    graph.replay()
    torch.cuda.synchronize()
    assert y.tolist() == [2, 2, 2]

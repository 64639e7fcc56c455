"""Compiled models on a CUDA device, and in CUDA graphs. Run by `pytest -m cuda` where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from keeps import Keeps
from on_cuda import requires_cuda
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError
from overflowstat.frames import Frame

pytestmark = [pytest.mark.cuda, requires_cuda, pytest.mark.usefixtures("nothing_compiled")]


def block(size: int = 32) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = x + each(x)
        return x


def given(bad: float = 1.0) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(4, 32, device="cuda")
    x[1, 2] = bad
    return x


def shown(frames: list[Frame]) -> tuple[list[tuple[str, str, str]], list[float]]:
    """(module, label, what is no tensor) of each line; magnitudes of all tensors."""
    names, magnitudes = [], []
    for frame in frames:
        for line in frame.lines:
            names.append((frame.module, line.label, line.content if isinstance(line.content, str) else ""))
            if not isinstance(line.content, str):
                magnitudes += [float(line.content.abs_min), float(line.content.abs_max)]
    return names, magnitudes


MODES = pytest.mark.parametrize("mode", ["default", "reduce-overhead"])


@MODES
@pytest.mark.parametrize("training", [False, True])
def test_frames_of_a_compiled_model_are_those_of_the_eager_one(mode: str, training: bool) -> None:
    of_eager, of_compiled = Keeps(), Keeps()
    model = Model().cuda()
    with torch.set_grad_enabled(training):
        with Monitor(model, sinks=[of_eager]):
            model(given())
        Monitor(model, sinks=[of_compiled])
        run: Any = torch.compile(model, mode=mode, fullgraph=True)
        names, magnitudes = shown(of_eager.take())
        for _ in range(5):  # the third one is a replay
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            out = run(given())
            if training:
                out.sum().backward()
            found = shown(of_compiled.take())
            assert found[0] == names
            assert found[1] == pytest.approx(magnitudes, rel=1e-2, abs=1e-6)


@MODES
@pytest.mark.parametrize("good", [1, 4])
def test_a_bad_batch_is_found_in_the_batch_that_it_is(mode: str, good: int) -> None:
    model = Model().cuda()
    monitor = Monitor(model, sinks=[])
    run = torch.compile(model, mode=mode)

    def meet_a_bad_one() -> None:
        run(given(bad=torch.inf))
        monitor.check()

    with torch.no_grad():
        for _ in range(good):
            run(given())
        with pytest.raises(NonFiniteError, match=rf"batch {good}, first in blocks\.0\.0 \(LayerNorm\), input\[0\]"):
            meet_a_bad_one()


def test_no_graph_of_torch_is_skipped_for_the_rows() -> None:
    from torch._dynamo.utils import counters

    model = Model().cuda()
    Monitor(model, sinks=[])
    run = torch.compile(model, mode="reduce-overhead")
    counters.clear()
    with torch.no_grad():
        for _ in range(4):
            run(given())
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_each_replay_of_a_captured_compiled_forward_is_judged() -> None:
    model, sink = Model().cuda(), Keeps()
    monitor = Monitor(model, sinks=[sink], check="step")
    run = torch.compile(model)
    static = given()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            run(static)
    torch.cuda.current_stream().wait_stream(side)
    monitor.check()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        run(static)
    monitor.check()
    batch = monitor.batch_number
    sink.take()
    for number in range(2):
        graph.replay()
        monitor.check()
        assert monitor.batch_number == batch + number + 1
        assert [name for name in sink.modules() if name.startswith("blocks.1")][-1:] == ["blocks.1"]
    static.copy_(given(bad=torch.nan))
    graph.replay()
    with pytest.raises(NonFiniteError, match=r"first in blocks\.0\.0 \(LayerNorm\), input\[0\]"):
        monitor.check()


def test_rows_stay_where_they_are() -> None:
    model = Model().cuda()
    monitor = Monitor(model, sinks=[])
    run = torch.compile(model)
    hooks = [hook for _, hook in monitor._compiled.hooked]
    with torch.no_grad():
        run(given())
        addresses = [hook.rows.data_ptr() for hook in hooks]
        assert all(hook.rows.is_cuda for hook in hooks)
        run(given())
    assert [hook.rows.data_ptr() for hook in hooks] == addresses

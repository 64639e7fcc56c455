"""Forwards inside a CUDA graph, judged by `Monitor.check()` after its replays.

The graph is a fake one: what is recorded while it is captured keeps the tensors, whose memory every replay writes anew,
and is read again in each replay, as the device does it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn

from overflowstat import BatchLimitReached, Monitor, NonFiniteError
from overflowstat.recorder import NativeRecorder, Reading, Recorder, Replays, make_recorder
from overflowstat.row import Row


class GraphReading:
    def __init__(self, recorder: "GraphRecorder", tensors: Sequence[Tensor]) -> None:
        self.recorder = recorder
        self.tensors = tensors
        self.found: Sequence[Row | str] = ["not replayed"] * len(tensors)
        self.completed = 0
        self.is_over = False

    def ready(self) -> bool:
        return True

    def rows(self) -> Sequence[Row | str]:
        return self.found

    def replays(self) -> Replays:
        return Replays(self.completed, self.is_over, self.recorder.failure)


class GraphRecorder(Recorder):
    name = "graph"
    launches_until_first = 2
    """Those of all weights, and of the first module."""

    def __init__(self) -> None:
        self.recorder = make_recorder("torch")
        self.graph: int | None = None
        self.readings: dict[int, list[GraphReading]] = {}
        self.failure = ""

    def capture(self) -> int | None:
        return self.graph

    def record(self, tensors: Sequence[Tensor]) -> Reading:
        if self.graph is None:
            return self.recorder.record(tensors)
        reading = GraphReading(self, tensors)
        self.readings[self.graph].append(reading)
        return reading

    @contextmanager
    def capturing(self, graph: int) -> Iterator[None]:
        self.graph = graph
        self.readings.setdefault(graph, [])
        yield
        self.graph = None

    def replay(self, graph: int, launches: int | None = None) -> None:
        """As far as so many launches."""
        for reading in self.readings[graph][:launches]:
            reading.found = self.recorder.record(reading.tensors).rows()
            reading.completed += 1


class NativeGraphRecorder(GraphRecorder, NativeRecorder):
    """With the log of calls that is written in C++, which leaves tensors of a class of their own to its recorder.

    Such weights are read in their modules.
    """

    launches_until_first = 1

    def __init__(self) -> None:
        GraphRecorder.__init__(self)
        native = make_recorder("native")
        assert isinstance(native, NativeRecorder)
        NativeRecorder.__init__(self, native.extension)


class Foreign(Tensor):
    """And what is made of one."""


class Static(nn.Module):
    """Writes what it makes to the same memory each time, as a captured module does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size).as_subclass(Foreign), requires_grad=False)
        self.made = torch.zeros(size).as_subclass(Foreign)

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(x, self.scale, out=self.made)


@pytest.fixture(params=[GraphRecorder, NativeGraphRecorder], ids=["log in Python", "log in C++"])
def recorder(request: pytest.FixtureRequest) -> GraphRecorder:
    made: GraphRecorder = request.param()
    return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Static(3)
        self.second = Static(3)
        # A model that is on the CPU alone is in no CUDA graph.
        self.elsewhere = nn.Parameter(torch.empty(1, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.first(x))
        return made


@pytest.fixture
def model() -> Model:
    return Model()


X = torch.ones(3).as_subclass(Foreign)


def rerun(model: Model, value: float) -> None:
    """What a replay computes, without hooks."""
    torch.mul(torch.full((3,), value), model.first.scale, out=model.first.made)
    torch.mul(model.first.made, model.second.scale, out=model.second.made)


def test_a_capture_is_no_batch_and_each_replay_is_one(recorder: GraphRecorder, model: Model) -> None:
    sink = Keeps()
    monitor = Monitor(model, recorder=recorder, sinks=[sink])
    model(X)
    sink.frames.clear()
    with recorder.capturing(7):
        model(X)
    monitor.check()
    assert monitor.batch_number == 1 and sink.frames == []
    for number in (1, 2):
        recorder.replay(7)
        monitor.check()
        assert monitor.batch_number == number + 1
        assert [(f.batch_number, f.module, f.starts_batch) for f in sink.frames] == [
            (number, "first", True),
            (number, "second", False),
            (number, "", False),
        ]
        sink.frames.clear()
    monitor.check()
    assert sink.frames == [] and monitor.batch_number == 3


def test_the_last_of_several_replays_is_judged_and_all_are_counted(recorder: GraphRecorder, model: Model) -> None:
    sink = Keeps()
    monitor = Monitor(model, recorder=recorder, sinks=[sink])
    with recorder.capturing(1):
        model(X)
    for value in (2.0, 3.0, 4.0):
        rerun(model, value)
        recorder.replay(1)
    monitor.check()
    assert monitor.batch_number == 3 and monitor.total_calls == 9
    assert {f.batch_number for f in sink.frames} == {2}
    assert [line.content.abs_max for line in sink.frames[1].lines if not isinstance(line.content, str)] == [1, 4, 4]


def test_weights_are_read_as_they_are_in_the_replay(recorder: GraphRecorder, model: Model) -> None:
    monitor = Monitor(model, recorder=recorder, sinks=[])
    model(X)
    with recorder.capturing(1):
        model(X)
    model.second.scale.fill_(float("inf"))
    recorder.replay(1)
    with pytest.raises(NonFiniteError, match=r"first in second \(Static\), scale"):
        monitor.check()


def test_a_bad_replay_raises_once_and_the_next_one_again(recorder: GraphRecorder, model: Model) -> None:
    monitor = Monitor(model, recorder=recorder, sinks=[])
    with recorder.capturing(1):
        model(X)
    for number in range(2):
        rerun(model, float("nan"))
        recorder.replay(1)
        with pytest.raises(NonFiniteError) as raised:
            monitor.check()
        assert raised.value.batch_number == number
        assert [f.module for f in raised.value.frames] == ["first"]
        monitor.check()
    rerun(model, 1.0)
    recorder.replay(1)
    monitor.check()
    assert monitor.batch_number == 3


def test_forwards_between_the_replays_are_judged_as_ever(recorder: GraphRecorder, model: Model) -> None:
    monitor = Monitor(model, recorder=recorder, sinks=[])
    with recorder.capturing(1):
        model(X)
    model(X)
    assert monitor.batch_number == 1
    recorder.replay(1)
    monitor.check()
    with pytest.raises(NonFiniteError) as raised:
        model(X * float("inf"))
    assert raised.value.batch_number == 2


def test_two_graphs_are_told_apart(recorder: GraphRecorder, model: Model) -> None:
    sink = Keeps()
    monitor = Monitor(model, recorder=recorder, sinks=[sink])
    with recorder.capturing(1):
        model(X)
    with recorder.capturing(2):
        model(X)
    recorder.replay(2)
    monitor.check()
    assert len(sink.frames) == 3 and monitor.batch_number == 1
    recorder.replay(1)
    recorder.replay(2)
    monitor.check()
    assert [f.batch_number for f in sink.frames] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_two_forwards_in_one_graph_are_two_batches(recorder: GraphRecorder, model: Model) -> None:
    sink = Keeps()
    monitor = Monitor(model, recorder=recorder, sinks=[sink])
    with recorder.capturing(1):
        model(X)
        model(X)
    recorder.replay(1)
    monitor.check()
    assert [f.batch_number for f in sink.frames] == [0, 0, 0, 1, 1, 1] and monitor.batch_number == 2


def test_a_captured_part_of_a_model_counts_no_batch(recorder: GraphRecorder, model: Model) -> None:
    sink = Keeps()
    monitor = Monitor(model, recorder=recorder, sinks=[sink])
    with recorder.capturing(1):
        model.first(X)
    with recorder.capturing(2):
        model.second(X)
    recorder.replay(1)
    recorder.replay(2)
    monitor.check()
    assert [f.module for f in sink.frames] == ["first", "second"] and monitor.batch_number == 0
    assert all(not isinstance(line.content, str) for f in sink.frames for line in f.lines)


def test_a_replay_that_breaks_off_is_judged_as_far_as_it_came(recorder: GraphRecorder, model: Model) -> None:
    sink = Keeps()
    monitor = Monitor(model, recorder=recorder, sinks=[sink])
    with recorder.capturing(1):
        model(X)
    recorder.failure = "cudaErrorAssert (device-side assert triggered)"
    recorder.replay(1, launches=recorder.launches_until_first)
    with pytest.warns(UserWarning, match="did not come to its end.*device-side assert"):
        monitor.check()
    assert [f.module for f in sink.frames] == ["first"]


def test_calls_of_a_graph_that_is_gone_are_dropped(recorder: GraphRecorder, model: Model) -> None:
    monitor = Monitor(model, recorder=recorder, sinks=[])
    for graph in (1, 2, 3):
        with recorder.capturing(graph):
            model(X)
        recorder.replay(graph)
        for reading in recorder.readings[graph]:
            reading.is_over = True
    monitor.check()
    assert monitor.batch_number == 3 and monitor._captured == []


def test_a_graph_in_which_nothing_could_be_read_is_dropped(
    recorder: GraphRecorder, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensors: Sequence[Tensor]) -> Reading:
        raise RuntimeError("no memory")

    monitor = Monitor(model, recorder=recorder, sinks=[])
    monkeypatch.setattr(recorder, "record", refuse)
    with recorder.capturing(1), pytest.warns(UserWarning, match="could not be read"):
        model(X)
    monitor.check()
    assert monitor._captured == [] and monitor.batch_number == 0


def test_replays_are_traced_and_end_as_other_batches_do(
    recorder: GraphRecorder, model: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = Monitor(model, recorder=recorder, trace_batch_nums=[1], abort_after_batch_num=1)
    with recorder.capturing(1):
        model(X)
    recorder.replay(1)
    monitor.check()
    assert capsys.readouterr().out == ""
    recorder.replay(1)
    with pytest.raises(BatchLimitReached):
        monitor.check()
    assert "batch number=1 " in capsys.readouterr().out


@pytest.mark.parametrize("look", [Monitor.check, Monitor.remove])
def test_a_forward_that_fails_while_it_is_captured_leaves_nothing_half_done(
    recorder: GraphRecorder, model: Model, look: Callable[[Monitor], None]
) -> None:
    monitor = Monitor(model, recorder=recorder, sinks=[])
    with recorder.capturing(1), pytest.raises(TypeError):
        model(None)
    with recorder.capturing(2):
        model(X)
    recorder.replay(2)
    look(monitor)
    assert [f.module for f in monitor.frames] == ["first", "second", ""]

"""What ends a batch, and numbers that no module gave: what a monitor does for a training loop's sake."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError
from overflowstat.integrations.watched_run import _Phases, _TracedBatches
from overflowstat.monitor import CheckName
from overflowstat.recorder import RecorderName

INF, NAN = float("inf"), float("nan")
X = torch.ones(1, 2)


class Twice(nn.Module):
    """Two children, and a forward that calls the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return y


def shown(sink: Keeps) -> list[tuple[int, str, bool]]:
    return [(frame.batch_number, frame.module, frame.starts_batch) for frame in sink.take()]


def test_a_batch_may_end_with_a_step_alone(recorder_name: RecorderName) -> None:
    model, sink = Twice(), Keeps()
    monitor = Monitor(model, batch_ends="step", recorder=recorder_name, sinks=[sink])
    for number in range(2):
        model(X)
        model(X)
        model.b(X)
        assert monitor.batch_number == number
        monitor.step()
        assert monitor.batch_number == number + 1
        first, *others = shown(sink)
        assert first == (number, "a", True)
        assert others == [(number, name, False) for name in ("", "a", "", "b")]
    monitor.step()
    assert monitor.batch_number == 2, "nothing was called since"


@pytest.mark.parametrize("check", ["module", "batch", "step"])
def test_a_forward_that_raises_ends_it_all_the_same(recorder_name: RecorderName, check: CheckName) -> None:
    model, sink = Twice(), Keeps()
    monitor = Monitor(model, batch_ends="step", check=check, recorder=recorder_name, sinks=[sink])
    model(X)
    with pytest.raises(NonFiniteError, match=r"inf in batch 0, first in a \(Linear\), input\[0\]"):
        model(X * INF)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert monitor.batch_number == 2
    sink.take()
    model(X)
    assert shown(sink) == [(2, "a", True), (2, "", False)]
    with pytest.raises(NonFiniteError, match=r"inf in batch 2, first in b \(Linear\), input\[0\]"):
        model.b(X * INF)
    assert monitor.batch_number == 3


def test_a_batch_ends_with_a_forward_or_a_step_and_nothing_else() -> None:
    model = Twice()
    with pytest.raises(ValueError, match="batch_ends='epoch': must be one of 'forward', 'step'"):
        Monitor(model, batch_ends="epoch")  # type: ignore[arg-type]
    assert not model._forward_hooks


def test_a_step_takes_up_what_is_traced_from_here_on(recorder_name: RecorderName) -> None:
    model, sink = Twice(), Keeps()
    traced: set[int] = set()
    monitor = Monitor(
        model, batch_ends="step", trace_batch_nums=traced, every_n=10, recorder=recorder_name, sinks=[sink]
    )
    model.a(X)
    monitor.step()
    model.a(X)
    monitor.step()
    traced.add(2)
    monitor.step()
    model.a(X)
    assert shown(sink) == [(0, "a", True), (2, "a", True)]


def test_a_number_is_judged_as_part_of_the_batch_that_has_ended(recorder_name: RecorderName) -> None:
    model, sink = Twice(), Keeps()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    model(X)
    assert monitor.judge("loss", torch.tensor(2.0)) is False
    model(X)
    with pytest.raises(NonFiniteError) as caught:
        monitor.judge("loss", torch.tensor([1.0, NAN, INF]))
    assert str(caught.value) == (
        "overflowstat: nan and inf in batch 1, first in loss (Tensor), value: "
        "1 of 3 is nan, 1 of 3 is +inf, first at [1]; float32, shape [3]"
    )
    assert caught.value.batch_number == 1 and caught.value.verdict is None
    assert [frame.module for frame in caught.value.frames] == ["a", "", "a", "", "loss"]
    expected = [(0, "a", True), (0, "", False), (0, "loss", False), (1, "a", True), (1, "", False), (1, "loss", False)]
    assert shown(sink) == expected
    assert monitor.detected_overflow and len(monitor.detections) == 1 and monitor.batch_number == 2
    model(X)


def test_or_of_the_one_that_runs_which_it_ends_where_it_raises(recorder_name: RecorderName) -> None:
    model, sink = Twice(), Keeps()
    monitor = Monitor(model, batch_ends="step", recorder=recorder_name, sinks=[sink])
    model(X)
    with pytest.raises(NonFiniteError, match="inf in batch 0, first in loss"):
        monitor.judge("loss", torch.tensor(INF))
    assert monitor.batch_number == 1
    model(X)
    assert shown(sink)[-1] == (1, "", False)


@pytest.mark.parametrize(("keep", "modules"), [(0, []), (1, ["loss"]), (2, ["", "loss"]), (None, ["a", "", "loss"])])
def test_a_report_of_it_has_as_many_frames_as_any(
    keep: int | None, modules: list[str], recorder_name: RecorderName
) -> None:
    model = Twice()
    monitor = Monitor(model, max_frames_to_save=keep, recorder=recorder_name, sinks=[])
    model(X)
    with pytest.raises(NonFiniteError) as caught:
        monitor.judge("loss", torch.tensor(NAN))
    assert [frame.module for frame in caught.value.frames] == modules


def test_it_is_told_once_and_not_where_its_batch_has_gone_bad_before(recorder_name: RecorderName) -> None:
    model, sink = Twice(), Keeps()
    monitor = Monitor(model, on_detect="warn", verdict=False, recorder=recorder_name, sinks=[sink])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(X * NAN)
        assert monitor.judge("loss", torch.tensor(NAN)) is True
        model(X)
        assert monitor.judge("loss", torch.tensor(NAN)) is True
        assert monitor.judge("other", torch.tensor(NAN)) is True
        model(X)
        assert monitor.judge("loss", torch.tensor(NAN)) is True
    texts = [str(warning.message).split(" are nan")[0].split(";")[0] for warning in told]
    assert texts == [
        "overflowstat: nan in batch 0, first in a (Linear), input[0]: 2 of 2",
        "overflowstat: nan in batch 1, first in loss (Tensor), value: 1 of 1 is nan",
    ]
    assert [found.batches for found in monitor.detections] == [1, 2] and len(sink.reports) == 2


def test_it_does_not_raise_in_a_batch_that_is_traced(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Twice()
    monitor = Monitor(model, trace_batch_nums=[0], recorder=recorder_name)
    model(X)
    assert monitor.judge("loss", torch.tensor(NAN)) is True
    assert capsys.readouterr().out.endswith("loss Tensor\n     nan      nan value\n")
    assert monitor.detected_overflow and monitor.detections == []


def test_what_ran_before_it_is_judged_before_it(recorder_name: RecorderName) -> None:
    model = Twice()
    monitor = Monitor(model, batch_ends="step", check="step", recorder=recorder_name, sinks=[])
    model(X)
    with pytest.raises(NonFiniteError, match="first in a"):
        model(X * NAN)
    assert monitor.judge("loss", torch.tensor(1.0)) is False


@pytest.mark.parametrize("value", [1.0, None, [torch.ones(1)]])
def test_what_is_no_tensor_is_refused(value: Any) -> None:
    monitor = Monitor(Twice(), sinks=[])
    with pytest.raises(TypeError, match="tensor must be a tensor, not"):
        monitor.judge("loss", value)


def test_a_batch_is_part_of_what_had_begun_last_before_it() -> None:
    phases = _Phases()
    assert phases.of(0) == ""
    for batch, phase in [(0, "1"), (1, "1"), (2, "evaluation"), (5, "2"), (5, "3")]:
        phases.begin(batch, phase)
    assert [phases.of(batch) for batch in range(7)] == ["1", "1", "evaluation", "evaluation", "evaluation", "3", "3"]
    for batch in range(6, 40):
        phases.begin(batch, str(batch))
    assert phases.of(39) == "39" and phases.of(3) == "", "only the last ones are kept"


def test_batches_are_traced_by_number_or_from_one_to_another() -> None:
    asked_for = {1}
    traced = _TracedBatches(asked_for)
    for batch, is_traced in [(3, True), (4, True), (6, False), (9, True), (9, False), (11, True)]:
        traced.switch(batch, is_traced)
    asked_for.add(7)
    assert [number for number in range(14) if number in traced] == [1, 3, 4, 5, 7, 11, 12, 13]

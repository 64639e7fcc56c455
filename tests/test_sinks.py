"""Where frames and reports go: a log, a function, TensorBoard, and anything with the two methods."""

from __future__ import annotations

import io
import logging
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from traces import frame, numbers

from overflowstat import CallableSink, LoggingSink, Monitor, NonFiniteError, Printer, TensorBoardSink, check_weights
from overflowstat.errors import MonitorWarning
from overflowstat.frames import Frame
from overflowstat.recorder import RecorderName
from overflowstat.report import OwnStyle, ReferenceStyle, Report


class Doubles(nn.Module):
    """Its output is twice as large in each batch, and inf in the last one."""

    def __init__(self, bad_in: int = 10**9) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.bad_in, self.batch = bad_in, 0

    def forward(self, x: Tensor) -> Tensor:
        self.batch += 1
        y: Tensor = self.inner(x * 2.0**self.batch)
        return y / 0 if self.batch > self.bad_in else y


X = torch.tensor([1.0, -3.0])


def run_batches(model: nn.Module, count: int) -> None:
    for _ in range(count):
        model(X)


# printing


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", "\\xc4\\u4e2d"), ("latin-1", "\xc4\\u4e2d"), ("cp1252", "\xc4\\u4e2d"), ("utf-8", "\xc4\u4e2d")],
)
def test_a_report_is_printed_where_stdout_has_no_letters_for_a_name(
    encoding: str, shown: str, recorder_name: RecorderName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a report and in a traced frame; what is raised is the detection and not a failure to print it."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    model = nn.Sequential()
    model.add_module("\xc4\u4e2d", nn.Identity())
    Monitor(model, recorder=recorder_name, trace_batch_nums=[0])
    model(X)
    with pytest.raises(NonFiniteError):
        model(X / 0)
    sys.stdout.flush()
    told = written.getvalue().decode(encoding)
    assert told.count(f"{shown} Identity\n") == 2 and f"first in {shown} (Identity), input[0]" in told


def test_what_a_terminal_would_obey_is_escaped_in_all_that_is_told(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of modules, of classes and of inputs; in traced frames, reports, exceptions, warnings and tables."""

    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, values: dict[str, Tensor]) -> Tensor:
            return next(iter(values.values())) * self.weight

    Child.__name__ = "C\x1b[2J"
    child = "a\x1b[31m\nb\u202e"

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(child, Child())

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self._modules[child]({"k\x9b1m": x})  # type: ignore[misc]
            return y

    model = Root()
    with Monitor(model, recorder=recorder_name, trace_batch_nums=[0]):
        model(X)
        with pytest.raises(NonFiniteError) as raised:
            model(X / 0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", MonitorWarning)
        monitor = Monitor(model, recorder=recorder_name, sinks=[], on_detect="warn", warn_at=0.5)
        for x in (X * 1e38, X / 0, X / 0, X):
            model(x)
        monitor.remove()
    with torch.no_grad():
        model.get_parameter(f"{child}.weight").fill_(torch.nan)
    told = [str(warning.message) for warning in warned]
    assert [word in text for word, text in zip(("limit", "first in", "again"), told[-3:], strict=True)] == [True] * 3
    texts = [capsys.readouterr().out, str(raised.value), *told[-2:], str(check_weights(model)), str(monitor.headroom())]
    for text in [*texts, *told]:
        assert text.replace("\n", "").isprintable()
    for text in texts:
        assert "a\\x1b[31m\\nb\\u202e" in text


# logging


def test_traced_frames_are_logged_as_info_and_reports_as_errors(
    recorder_name: RecorderName, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Doubles(bad_in=2)
    with (
        caplog.at_level(logging.DEBUG),
        Monitor(model, recorder=recorder_name, sinks=[LoggingSink()], trace_batch_nums=[1]),
        pytest.raises(NonFiniteError) as raised,
    ):
        run_batches(model, 3)
    told = [(record.name, record.levelname) for record in caplog.records]
    assert told == [("overflowstat", "INFO")] * 2 + [("overflowstat", "ERROR")]
    assert "4.00e+00 1.20e+01 output" in caplog.messages[0]
    assert str(raised.value) in caplog.messages[2]
    assert capsys.readouterr().out == ""


def test_all_other_frames_are_logged_as_debug_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    model, sink = Doubles(), LoggingSink(logging.getLogger("mine"), every_frame=True, style=ReferenceStyle())
    with caplog.at_level(logging.DEBUG, "mine"), Monitor(model, sinks=[sink], trace_batch_nums=[1]):
        for _ in range(2):
            model(X)
    assert [(record.name, record.levelno) for record in caplog.records] == [("mine", logging.DEBUG)] * 2 + [
        ("mine", logging.INFO)
    ] * 2


def test_a_bad_frame_is_in_its_report_and_not_logged_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(NonFiniteError), Monitor(Doubles(0), sinks=[LoggingSink()]) as m:
        m.model(X)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_percent_sign_in_a_name_is_no_format(caplog: pytest.LogCaptureFixture) -> None:
    sink = LoggingSink("percent")
    with caplog.at_level(logging.INFO):
        sink.frame(frame(0, "100%s", {"output": numbers(0.0, 1.0)}), traced=True)
    assert "100%s" in caplog.messages[0]


def test_frames_that_no_handler_wants_are_not_worded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Style(OwnStyle):
        def frame(self, frame: Frame) -> str:
            raise AssertionError("worded")

    logger = logging.getLogger("quiet")
    logger.setLevel(logging.WARNING)
    LoggingSink(logger, style=Style()).frame(frame(0, "m", {}), traced=True)


def test_a_logger_adapter_is_a_logger(caplog: pytest.LogCaptureFixture) -> None:
    adapter = logging.LoggerAdapter(logging.getLogger("adapted"), {})
    with caplog.at_level(logging.INFO):
        LoggingSink(adapter).frame(frame(0, "m", {}), traced=True)
    assert caplog.records[0].name == "adapted"


# a function


def test_a_function_gets_frames_and_reports(recorder_name: RecorderName) -> None:
    seen: list[Frame | Report] = []
    model = Doubles(bad_in=1)
    with pytest.raises(NonFiniteError), Monitor(model, recorder=recorder_name, sinks=[CallableSink(seen.append)]):
        run_batches(model, 2)
    bad, report = seen
    assert isinstance(bad, Frame) and (bad.module, bad.batch_number) == ("", 1)
    assert isinstance(report, Report) and report.bad == bad


def test_a_function_gets_every_frame_if_asked_for(recorder_name: RecorderName) -> None:
    seen: list[Any] = []
    model = Doubles()
    with Monitor(model, recorder=recorder_name, sinks=[CallableSink(seen.append, every_frame=True)]):
        for _ in range(2):
            model(X)
    assert [(each.batch_number, each.module) for each in seen] == [(0, "inner"), (0, ""), (1, "inner"), (1, "")]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: CallableSink(3), "function=3"),  # type: ignore[arg-type]
        (lambda: CallableSink(None), "function=None"),  # type: ignore[arg-type]
        (lambda: LoggingSink(3), "logger=3"),  # type: ignore[arg-type]
        (lambda: LoggingSink(print), "logger="),  # type: ignore[arg-type]
        (lambda: TensorBoardSink("runs/1"), "writer='runs/1'"),  # type: ignore[arg-type]
        (lambda: Monitor(nn.Identity(), sinks=[print]), "frame()"),  # type: ignore[list-item]
    ],
    ids=["number", "None", "logger number", "logger function", "writer text", "bare function"],
)
def test_what_is_no_sink_is_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(TypeError) as raised:
        make()
    assert named in str(raised.value)


# any object


class Two:
    def __init__(self) -> None:
        self.told: list[str] = []

    def frame(self, frame: Frame, traced: bool) -> None:
        self.told.append(f"frame {frame.batch_number}")

    def report(self, report: Report) -> None:
        self.told.append(f"report {report.batch_number}")


class Four(Two):
    every_frame = True

    def flush(self) -> None:
        self.told.append("flush")

    def close(self) -> None:
        self.told.append("close")


def test_any_object_with_the_two_methods_is_a_sink(recorder_name: RecorderName) -> None:
    sink, model = Two(), Doubles(bad_in=1)
    with pytest.raises(NonFiniteError), Monitor(model, recorder=recorder_name, sinks=[sink]):
        run_batches(model, 2)
    assert sink.told == ["frame 1", "report 1"]


def test_one_that_can_is_told_when_a_batch_and_when_all_has_been_told(recorder_name: RecorderName) -> None:
    sink, model = Four(), Doubles()
    monitor = Monitor(model, recorder=recorder_name, sinks=[sink])
    for _ in range(2):
        model(X)
    assert sink.told == ["frame 0", "frame 0", "flush", "frame 1", "frame 1", "flush"]
    monitor.remove()
    assert sink.told[6:] == ["flush", "close"]


def test_a_printer_needs_no_style(capsys: pytest.CaptureFixture[str]) -> None:
    Printer().frame(frame(0, "m", {"output": numbers(0.0, 1.0)}), traced=True)
    assert "m Linear" in capsys.readouterr().out


# TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_curves_over_batches_by_tensorboards_own_reader(tmp_path: Path, recorder_name: RecorderName) -> None:
    from torch.utils.tensorboard import SummaryWriter

    model = Doubles(bad_in=3)
    with SummaryWriter(tmp_path) as writer:
        with (
            Monitor(model, recorder=recorder_name, sinks=[TensorBoardSink(writer)]),
            pytest.raises(NonFiniteError),
        ):
            run_batches(model, 4)
        assert writer.file_writer is not None  # it stays open
    found = scalars(tmp_path)
    assert set(found) == {f"abs {which}/{name}" for which in ("max", "min") for name in ("inner", "the model itself")}
    assert found["abs max/inner"] == [(0, 6.0), (1, 12.0), (2, 24.0), (3, 48.0)]
    assert found["abs min/inner"] == [(0, 2.0), (1, 4.0), (2, 8.0), (3, 16.0)]
    assert found["abs max/the model itself"][3] == (3, math.inf)


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        self.texts.append((tag, text_string, global_step))


def test_a_curve_has_the_extremes_of_all_calls_and_outputs_of_a_module(recorder_name: RecorderName) -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x * 10

    inner, writer = Pair(), Writer()
    model = nn.ModuleList([inner])
    with Monitor(model, recorder=recorder_name, sinks=[TensorBoardSink(writer)]) as monitor:
        for factor in (1.0, 0.5, 7.0):
            inner(X * factor)
        monitor.step()
        inner(X)
    assert writer.scalars == [
        *[("abs max/0", 210.0, 0), ("abs min/0", 0.5, 0)],
        *[("abs max/0", 30.0, 1), ("abs min/0", 1.0, 1)],
    ]


def test_a_nan_in_any_call_makes_both_ends_nan_and_what_is_empty_does_not_count() -> None:
    writer = Writer()
    sink = TensorBoardSink(writer)
    for content in (numbers(0.5, 2.0), numbers(0.5, 2.0, nan=1), numbers(0.5, 2.0)):
        sink.frame(frame(0, "m", {"output": content, "input[0]": numbers(0.0, 9.0)}), traced=False)
    sink.frame(frame(0, "text", {"output": "not a tensor"}), traced=False)
    sink.frame(frame(0, "again", {"output": numbers(0.5, 2.0)}, is_recompute=True), traced=False)
    sink.flush()
    assert [(tag, math.isnan(value)) for tag, value, _ in writer.scalars] == [("abs max/m", True), ("abs min/m", True)]


def test_gradients_have_curves_of_their_own(recorder_name: RecorderName) -> None:
    writer, model = Writer(), nn.Linear(2, 1)
    with Monitor(model, recorder=recorder_name, gradients=True, sinks=[TensorBoardSink(writer)]):
        model(X).sum().backward()
    assert ("grad abs max/the model itself", 1.0, 0) in writer.scalars
    assert [tag.split("/")[0] for tag, _, _ in writer.scalars] == [
        *["abs max", "abs min"],
        *["grad abs max", "grad abs min"],
    ]


def test_a_report_is_a_text_as_it_is_and_no_markup() -> None:
    writer, model = Writer(), Doubles(bad_in=0)
    with Monitor(model, sinks=[TensorBoardSink(writer)]), pytest.raises(NonFiniteError) as raised:
        model(X)
    ((tag, text, step),) = writer.texts
    assert (tag, step) == ("overflowstat", 0)
    assert text.splitlines() == [f"    {line}" for line in str(raised.value).splitlines()]


def test_names_with_braces_are_names() -> None:
    writer = Writer()
    sink = TensorBoardSink(writer)
    sink.frame(frame(0, "{0}", {"output": numbers(0.5, 2.0)}), traced=False)
    sink.flush()
    assert [tag for tag, _, _ in writer.scalars] == ["abs max/{0}", "abs min/{0}"]

"""What a trace file holds is what was seen, whatever it was, and whatever became of the process that wrote it."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from traces import ALLOWED, INF, NAN, frame, lines_of, numbers, opened, write

from overflowstat import (
    CallableSink,
    Monitor,
    NonFiniteError,
    Policy,
    TensorStats,
    TraceFile,
    load_trace,
    trace_format,
)
from overflowstat.errors import BatchLimitReached, MonitorWarning
from overflowstat.frames import Frame, Line
from overflowstat.recorder import RecorderName
from overflowstat.report import OwnStyle, Report
from overflowstat.row import NOTHING
from overflowstat.trace_file import _Stream
from overflowstat.trace_format import frame_line

ROOT = Path(__file__).parent.parent
SUFFIXES = ["jsonl", "jsonl.gz"]


@pytest.fixture(params=SUFFIXES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"run.{request.param}"


def everything() -> tuple[list[Frame], CallableSink]:
    seen: list[Any] = []
    return seen, CallableSink(seen.append, every_frame=True)


class Half(nn.Module):
    def __init__(self, bad_from: int = 10**9) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.bad_from, self.calls = bad_from, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.second(self.first(x).relu())
        return y / 0 if self.calls > self.bad_from else y


def run_batches(model: nn.Module, count: int) -> None:
    for _ in range(count):
        model(torch.ones(2, 3))


# what is written is what was seen


@pytest.mark.parametrize("make", [models.llama, models.t5_gated_gelu])
def test_all_frames_of_a_model_come_back(
    path: Path, recorder_name: RecorderName, make: Callable[[], models.Subject]
) -> None:
    subject = make()
    seen, sink = everything()
    with Monitor(subject.model, recorder=recorder_name, sinks=[sink], trace_file=path), torch.no_grad():
        for number in range(2):
            subject.model(**subject.batch(number))
    trace = load_trace(path)
    assert len(seen) > 20
    assert repr(trace.frames) == repr(seen)
    assert (trace.batches, trace.is_complete, trace.recovered) == ([0, 1], True, False)
    assert trace.header.root_class == type(subject.model).__name__


def test_gradients_and_recomputed_forwards_come_back(path: Path, recorder_name: RecorderName) -> None:
    model = Half()
    seen, sink = everything()

    def run(x: Tensor) -> Tensor:
        y: Tensor = torch.utils.checkpoint.checkpoint(model.first, x, use_reentrant=True)
        return model.second(y).sum()  # type: ignore[no-any-return]

    with Monitor(model, recorder=recorder_name, sinks=[sink], trace_file=path, gradients=True) as monitor:
        run(torch.ones(2, 3, requires_grad=True)).backward()  # type: ignore[no-untyped-call]
        monitor.step()
    trace = load_trace(path)
    assert repr(trace.frames) == repr(seen)
    assert {row.kind for row in trace.rows} == {"forward", "recompute", "backward"}


STRANGE_NAMES = [
    "",
    "a\nb",
    "tab\tnul\0bell\a",
    "\x1b[31mred\x1b[0m",
    "</script><b>",
    'quote"back\\slash',
    "ünï→中😀",
    "\ud800lone",
    "\u2028\u2029\x85",
    "{}%s",
]


@pytest.mark.parametrize("name", STRANGE_NAMES, ids=ascii)
def test_a_name_of_any_characters_comes_back_and_stays_in_its_line(path: Path, name: str) -> None:
    made = frame(0, name, {name: "not a tensor", "output": numbers(0.0, 1.0)}, class_name=name)
    write(path, [made, frame(1, "after", {"output": numbers(0.0, 2.0)})], root=name)
    text = opened(path)
    assert text.isascii() and len(text.splitlines()) == 4
    trace = load_trace(path)
    assert trace.frames[0] == made and trace.header.root_class == name


NUMBERS = {
    "zero": numbers(0.0, 0.0),
    "smallest": numbers(5e-324, 1.7976931348623157e308, dtype=torch.float64),
    "a third": numbers(1 / 3, 2 / 3, dtype=torch.float64),
    "nan": numbers(0.5, 2.0, nan=3),
    "+inf": numbers(0.5, 2.0, posinf=1),
    "all three": numbers(0.5, 2.0, nan=1, posinf=2, neginf=3, dtype=torch.float16),
    "nothing but nan": TensorStats(NAN, NAN, NAN, 4, 0, 0, (0,), 4, torch.bfloat16, (4,)),
    "nothing but -inf": TensorStats(INF, INF, NAN, 0, 0, 4, (0,), 4, torch.float32, (4,)),
    "scalar": TensorStats(INF, INF, NAN, 0, 1, 0, (), 1, torch.float32, ()),
    "empty": TensorStats(NAN, NAN, NAN, 0, 0, 0, None, 0, torch.float32, (3, 0)),
    "int64": TensorStats(0, 2**63, 2**63, 0, 0, 0, None, 2, torch.int64, (2,)),
    "uint64": TensorStats(2**53 + 1, 2**64 - 1, 2**64 - 1, 0, 0, 0, None, 2, torch.uint64, (2,)),
    "bool": TensorStats(0, 1, 1, 0, 0, 0, None, 2, torch.bool, (2,)),
    "float8": numbers(0.015625, 448.0, dtype=torch.float8_e4m3fn),
    "complex": numbers(0.0, 3.0, dtype=torch.complex64),
    "large": TensorStats(1.0, 1.0, 1.0, 0, 0, 0, None, 2**40, torch.float32, (2**20, 2**20)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_come_back_to_the_last_bit(path: Path, name: str) -> None:
    write(path, [frame(3, "m", {"output": NUMBERS[name]})])
    (line,) = load_trace(path).frames[0].lines
    assert repr(line.content) == repr(NUMBERS[name])


def test_numbers_that_are_not_finite_are_texts_and_integers_are_exact(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", [frame(0, "m", {"a": NUMBERS["nothing but -inf"], "b": NUMBERS["uint64"]})])
    first, second = lines_of(tmp_path / "run.jsonl")[1]["lines"]
    assert first == {
        "label": "a",
        "dtype": "float32",
        "shape": [4],
        "abs_min": "inf",
        "abs_max": "inf",
        "finite_abs_max": "nan",
        "neginf_count": 4,
        "first_bad": [0],
    }
    assert (second["abs_min"], second["abs_max"]) == (9007199254740993, 18446744073709551615)


DETAILS = ("zero_count", "subnormal_count", "abs_min_nonzero")


def test_what_a_monitor_was_asked_for_beyond_that_comes_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detailed: type = TensorStats
    if "zero_count" not in {field.name for field in dataclasses.fields(TensorStats)}:
        added = [(name, object, dataclasses.field(default=None)) for name in DETAILS]
        detailed = dataclasses.make_dataclass("Detailed", added, bases=(TensorStats,), frozen=True)
        monkeypatch.setattr(trace_format, "TensorStats", detailed)
        monkeypatch.setattr(trace_format, "DETAILS", DETAILS)
    rest = (0.0, 0.0, 0.0, 0, 0, 0, None, 2, torch.float32, (2,))
    asked, not_asked = detailed(*rest, zero_count=2, subnormal_count=0, abs_min_nonzero=NAN), detailed(*rest)
    write(path, [frame(0, "m", {"asked": asked, "not asked": not_asked})])
    written = lines_of(path)[1]["lines"]
    assert [[line.get(name) for name in DETAILS] for line in written] == [[2, 0, "nan"], [None] * 3]
    first, second = load_trace(path).rows
    assert (first.zero_count, first.subnormal_count, str(first.abs_min_nonzero)) == (2, 0, "nan")
    assert (second.zero_count, second.subnormal_count, second.abs_min_nonzero) == (None, None, None)


def test_what_is_allowed_and_not_judged_comes_back(path: Path) -> None:
    lines = [
        Line("mask", numbers(0.0, 1.0, nan=1, neginf=2), True, ALLOWED),
        Line("child.weight", numbers(0.0, 1.0, nan=1), False, NOTHING),
        Line("output", numbers(0.0, 1.0, posinf=1), True, ALLOWED),
    ]
    made = frame(0, "m", lines, starts_batch=True, is_recompute=True)
    write(path, [made])
    trace = load_trace(path)
    assert trace.frames == [made]
    assert [row.is_bad for row in trace.rows] == [False, True, True]
    assert trace.rows[0].allowed == ("nan", "-inf")


def test_what_compiled_code_did_not_count_comes_back(path: Path) -> None:
    read = [numbers(0.0, 1.0, nan=1), numbers(0.5, 1.0, posinf=1, neginf=1), numbers(0.5, 1.0)]
    read[:2] = [dataclasses.replace(stats, first_bad=(), is_counted=False) for stats in read[:2]]
    lines: dict[str, TensorStats | str] = {f"input[{i}]": stats for i, stats in enumerate(read)}
    made = dataclasses.replace(frame(0, "m", lines), calls=3)
    write(path, [made])
    [found] = load_trace(path).frames
    assert repr(found) == repr(made)
    assert [line.content.bad_counts for line in found.lines if isinstance(line.content, TensorStats)] == [
        [("some", "nan")],
        [("some", "+inf"), ("some", "-inf")],
        [],
    ]


def test_every_line_is_json_and_the_header_says_who_wrote_it(path: Path) -> None:
    with Monitor(nn.Linear(2, 2), trace_file=path) as monitor:
        monitor.model(torch.ones(1, 2))
    header, *frames, end = lines_of(path)
    assert header.pop("started").endswith("+00:00")
    assert header.pop("torch") == torch.__version__
    assert header.pop("overflowstat").partition("+")[0] == "0.1.0"  # and what it is built for
    assert header == {
        "type": "header",
        "format": "overflowstat-trace",
        "version": 1,
        "rank": 0,
        "world_size": 1,
        "root": "Linear",
    }
    assert [line["type"] for line in frames] == ["frame"] and end == {"type": "end"}


def test_nothing_of_the_environment_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "very-secret")
    monkeypatch.setattr(sys, "argv", ["train.py", "--key=very-secret"])
    with Monitor(Half(0), trace_file=tmp_path / "run.jsonl", sinks=[]) as monitor, pytest.raises(NonFiniteError):
        monitor.model(torch.ones(1, 3))
    assert b"secret" not in (tmp_path / "run.jsonl").read_bytes()


# reports


def test_a_detection_is_a_report_with_its_verdict(path: Path, recorder_name: RecorderName) -> None:
    reports: list[Any] = []
    sink = CallableSink(lambda told: None if isinstance(told, Frame) else reports.append(told))
    with (
        Monitor(Half(1), recorder=recorder_name, sinks=[sink], trace_file=path, drill=True) as monitor,
        pytest.raises(NonFiniteError) as raised,
    ):
        run_batches(monitor.model, 3)
    (found,) = load_trace(path).reports
    assert raised.value.verdict is not None
    assert (found.batch_number, found.module, found.class_name, found.label) == (1, "", "Half", "output")
    assert found.text == OwnStyle().detected(reports[0]) == str(raised.value)
    assert found.verdict == raised.value.verdict.to_json()
    assert found.verdict["kind"] == "division-by-zero"


def test_a_report_without_a_verdict(path: Path) -> None:
    monitor = Monitor(Half(0), sinks=[], trace_file=path, on_detect="warn", verdict=False)
    with pytest.warns(MonitorWarning, match="inf in batch 0"):
        run_batches(monitor.model, 1)
    monitor.remove()
    (found,) = load_trace(path).reports
    assert found.verdict is None and found.text.startswith("overflowstat: ")


# rows


def test_rows_have_a_line_each_and_count_the_calls_of_a_module(path: Path) -> None:
    twice = nn.Linear(2, 2)
    with Monitor(nn.Sequential(twice, twice), trace_file=path) as monitor, torch.no_grad():
        for _ in range(2):
            monitor.model(torch.ones(1, 2))
    rows = load_trace(path).rows
    assert [(row.batch, row.module, row.call) for row in rows if row.label == "output"] == [
        *[(0, "0", 0), (0, "0", 1), (0, "", 0)],
        *[(1, "0", 0), (1, "0", 1), (1, "", 0)],
    ]
    assert [row.label for row in rows[:4]] == ["weight", "bias", "input[0]", "output"]
    assert rows[2][:10] == (0, 0, "forward", "0", "Linear", "input[0]", None, "float32", (1, 2), 2)
    assert (rows[2].abs_min, rows[2].abs_max, rows[2].nan_count, rows[2].is_bad) == (1.0, 1.0, 0, False)


def test_a_row_without_numbers_says_what_is_there(path: Path) -> None:
    write(path, [frame(0, "m", {"input[0]": "not a tensor"})])
    (row,) = load_trace(path).rows
    assert row.content == "not a tensor"
    assert {row.dtype, row.shape, row.numel, row.abs_max, row.nan_count, row.first_bad} == {None}


def test_only_some_batches_are_read_and_all_are_known(path: Path) -> None:
    write(path, [frame(batch, "m", {"output": numbers(0.0, float(batch))}) for batch in (0, 1, 1, 4)])
    trace = load_trace(path, batches=[1])
    assert [each.batch_number for each in trace.frames] == [1, 1]
    assert trace.batches == [0, 1, 4] and trace.is_complete


def test_a_table_of_pandas_has_the_rows(path: Path) -> None:
    write(path, [frame(0, "m", {"input[0]": "None", "output": numbers(0.5, 2.0, nan=3)}), frame(1, "m", {})])
    trace = load_trace(path)
    table = trace.to_pandas()
    assert list(table.columns) == list(trace.rows[0]._fields) and len(table) == 2
    assert table.abs_max.dtype == "float64" and table.abs_max[1] == 2.0 and table.abs_max.isna()[0]
    assert table.nan_count.tolist()[1] == 3 and table.batch.dtype == "int64"
    assert table[table.is_bad].label.tolist() == ["output"]


def test_a_table_keeps_integers_that_a_float_would_round(path: Path) -> None:
    write(path, [frame(0, "m", {"a": NUMBERS["uint64"], "b": numbers(0.5, 2.0)})])
    assert load_trace(path).to_pandas().abs_max.tolist() == [2**64 - 1, 2.0]


def test_a_table_of_nothing(path: Path) -> None:
    write(path, [])
    assert load_trace(path).to_pandas().empty


def test_a_table_without_pandas_says_what_to_install(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, [])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        load_trace(path).to_pandas()


# files and their names


def test_a_file_that_is_there_is_never_overwritten(path: Path) -> None:
    path.write_text("precious")
    names = [Path(TraceFile(path).path).name for _ in range(2)]
    stem, _, suffix = path.name.partition(".")
    assert names == [f"{stem}-1.{suffix}", f"{stem}-2.{suffix}"]
    assert path.read_text() == "precious"


def test_a_link_that_leads_nowhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").symlink_to(tmp_path / "elsewhere")
    assert Path(TraceFile(tmp_path / "run.jsonl").path).name == "run-1.jsonl"
    assert not (tmp_path / "elsewhere").exists()


def test_names_without_a_suffix_and_with_several(tmp_path: Path) -> None:
    for name, expected in (("run", "run-1"), (".gz", "-1.gz"), ("v1.2.jsonl.GZ", "v1.2-1.jsonl.GZ")):
        assert Path(TraceFile(tmp_path / name).path).name == name
        assert Path(TraceFile(tmp_path / name).path).name == expected


def test_a_name_relative_to_the_folder_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert TraceFile("run.jsonl").path == "run.jsonl"
    assert (tmp_path / "run.jsonl").exists()


def test_processes_that_begin_at_once_take_a_name_each(path: Path) -> None:
    children, (go, start) = [], os.pipe()
    for number in range(8):
        pid = os.fork()
        if pid == 0:
            os.close(start)
            os.read(go, 1)  # all are let go when the last one that could write has closed the pipe
            file = TraceFile(path)
            file.frame(frame(number, "m", {"output": numbers(0.0, 1.0)}), traced=False)
            file.close()
            os._exit(0)
        children.append(pid)
    os.close(go)
    os.close(start)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 8
    files = list(path.parent.iterdir())
    assert len(files) == 8
    assert sorted(load_trace(file).batches[0] for file in files) == list(range(8))


@pytest.mark.parametrize(("rank", "size", "name"), [(0, 1, "run"), (1, 2, "run.rank1"), (3, 100, "run.rank03")])
def test_the_rank_is_in_the_name_where_there_are_several(
    path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, size: int, name: str
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    for ending in ("", "-1"):
        written = write(path, [])
        assert written.name == f"{name}{ending}.{path.name.partition('.')[2]}"
        header = load_trace(written).header
        assert (header.rank, header.world_size) == (rank, size)


@pytest.mark.parametrize(("rank", "size"), [("x", "2"), ("2", "2"), ("-1", "2"), ("", ""), ("1", "")])
def test_ranks_that_make_no_sense_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, size: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    assert write(tmp_path / "run.jsonl", []).name == "run.jsonl"


def test_torch_distributed_is_believed_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: Any
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert dist.get_world_size() == 1
    assert write(tmp_path / "run.jsonl", []).name == "run.jsonl"


def test_a_monitor_tells_which_file_it_writes(path: Path) -> None:
    path.touch()
    monitor = Monitor(nn.Linear(2, 2), trace_file=path)
    assert monitor.trace_file is not None and Path(monitor.trace_file).name.startswith("run-1.")
    monitor.remove()
    assert Monitor(nn.Linear(2, 2)).trace_file is None


# when it is written, and when it ends


def test_each_batch_is_readable_as_soon_as_it_has_ended(path: Path, recorder_name: RecorderName) -> None:
    model = Half()
    monitor = Monitor(model, recorder=recorder_name, trace_file=path)
    for number in range(3):
        model(torch.ones(1, 3))
        trace = load_trace(path)
        assert (trace.batches, len(trace.frames)) == (list(range(number + 1)), 3 * (number + 1))
        assert not trace.is_complete
    monitor.remove()
    assert load_trace(path).is_complete


@pytest.mark.filterwarnings("ignore:the forward of Half itself is never called")
@pytest.mark.parametrize("end", ["check", "step", "optimizer", "exception", "report"])
def test_what_else_makes_frames_readable(path: Path, end: str) -> None:
    model = Half(0 if end == "report" else 10**9)
    monitor = Monitor(model, trace_file=path, sinks=[])
    optimizer = torch.optim.SGD(model.parameters())
    if end == "exception":
        model.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(1, 3))
    elif end == "report":
        with pytest.raises(NonFiniteError):
            model(torch.ones(1, 3))
        assert len(load_trace(path).reports) == 1
    else:
        model.first(torch.ones(1, 3)).sum().backward()
        assert load_trace(path).frames == []
        {"check": monitor.check, "step": monitor.step, "optimizer": optimizer.step}[end]()
    assert load_trace(path).frames


def test_frames_of_a_forward_that_takes_long_are_written_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Half()
    read: list[int] = []
    model.second.register_forward_hook(lambda *_: read.append(len(load_trace(path).frames)))
    monitor = Monitor(model, trace_file=path)
    model(torch.ones(1, 3))
    monkeypatch.setattr(_Stream, "LONGEST_WAIT", 0.0)
    model(torch.ones(1, 3))
    assert read == [0, 4]  # the three of the first batch, and the first module of the second
    monitor.remove()


def test_a_monitor_ends_its_file_also_when_an_exception_leaves_its_block(path: Path) -> None:
    with pytest.raises(RuntimeError, match="mat1"), Monitor(Half(), trace_file=path) as monitor:
        monitor.model(torch.ones(1, 5))
    assert load_trace(path).is_complete


def test_a_limit_of_batches_leaves_all_of_them(path: Path) -> None:
    monitor = Monitor(Half(), trace_file=path, abort_after_batch_num=1)
    with pytest.raises(BatchLimitReached):
        run_batches(monitor.model, 5)
    assert load_trace(path).batches == [0, 1]
    with pytest.raises(BatchLimitReached):
        monitor.remove()
    assert load_trace(path).is_complete


def test_a_monitor_that_watches_again_after_its_removal_takes_the_next_name(path: Path) -> None:
    monitor = Monitor(Half(), trace_file=path)
    monitor.model(torch.ones(1, 3))
    monitor.remove()
    monitor.remove()
    before = path.read_bytes()
    monitor.enable()
    monitor.model(torch.ones(1, 3))
    monitor.remove()
    assert path.read_bytes() == before
    second = load_trace(monitor.trace_file or "")
    assert second.path != str(path) and second.batches == [1] and second.header.root_class == "Half"


def test_a_file_whose_sink_nobody_keeps_is_ended(path: Path) -> None:
    file = TraceFile(path)
    file.frame(frame(0, "m", {"output": numbers(0.0, 1.0)}), traced=False)
    del file
    gc.collect()
    trace = load_trace(path)
    assert trace.is_complete and len(trace.frames) == 1


def test_nothing_is_left_where_a_monitor_refuses_its_arguments(path: Path) -> None:
    wrong: list[dict[str, Any]] = [{"every_n": 0}, {"buffers": 1}, {"on_detect": "shout"}, {"gradients": None}]
    for options in wrong:
        with pytest.raises((TypeError, ValueError)):
            Monitor(nn.Linear(2, 2), trace_file=path, **options)
    assert not path.exists()


def test_a_policy_leaves_out_of_the_file_what_it_leaves_out(path: Path) -> None:
    with Monitor(Half(), trace_file=path, policy=Policy(include=["second:output"]), every_n=2) as monitor:
        for _ in range(3):
            monitor.model(torch.ones(1, 3))
    trace = load_trace(path)
    assert [(row.batch, row.module, row.label) for row in trace.rows] == [
        (0, "second", "output"),
        (2, "second", "output"),
    ]


SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
from overflowstat import Monitor

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

model = Model()
monitor = Monitor(model, trace_file=sys.argv[1])
for batch in range(int(sys.argv[2])):
    model(torch.ones(2, 8))
"""


def run_script(path: Path, ending: str, batches: int = 7) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(SCRIPT) + ending
    command = [sys.executable, "-c", script, str(path), str(batches)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_process_that_is_killed_loses_nothing_of_the_batches_that_ended(path: Path) -> None:
    ended = run_script(path, "model.layers[0](torch.ones(2, 8)); os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = load_trace(path)
    assert trace.batches == list(range(7)) and len(trace.frames) == 7 * 6
    assert not trace.is_complete and not trace.recovered


@pytest.mark.parametrize("ending", ["", "raise KeyboardInterrupt"])
def test_a_process_that_ends_by_itself_ends_the_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "run.jsonl.gz"
    run_script(path, f"model.layers[0](torch.ones(2, 8)); {ending}")
    trace = load_trace(path)
    assert trace.is_complete and len(trace.frames) == 7 * 6 + 1


def test_a_process_that_was_forked_writes_nothing_into_the_file_of_the_other(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    fork = """
    model.layers[0](torch.ones(2, 8))  # is waiting to be written
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        model.layers[1](torch.ones(2, 8))
        sys.exit()  # which runs what is to be run at the end
    os.waitpid(pid, 0)
    model.layers[2](torch.ones(2, 8))
    """
    ended = run_script(path, textwrap.dedent(fork), batches=1)
    assert ended.returncode == 0, ended.stderr
    mine = load_trace(path)
    its = load_trace(next(other for other in path.parent.iterdir() if other != path))
    assert [each.module for each in mine.frames[6:]] == ["layers.0", "layers.2"] and mine.is_complete
    assert [each.module for each in its.frames] == ["layers.1"] and its.is_complete


def test_a_disk_that_is_full_costs_the_trace_and_not_the_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Half()
    monitor = Monitor(model, trace_file=path)
    model(torch.ones(1, 3))
    assert monitor._trace_file is not None
    stream = monitor._trace_file._stream
    stream._file.flush()
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, stream._file.fileno())
    os.close(full)
    with pytest.warns(MonitorWarning, match="No space left on device"):
        model(torch.ones(1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(torch.ones(1, 3))
        monitor.remove()
        del monitor
        gc.collect()
    assert load_trace(path).batches == [0]


def test_a_ctrl_c_between_frames_leaves_a_file_that_can_be_read(path: Path) -> None:
    model = Half()
    seen: list[Any] = []

    def interrupt(told: Any) -> None:
        seen.append(told)
        if len(seen) == 5:
            raise KeyboardInterrupt

    monitor = Monitor(model, trace_file=path, sinks=[CallableSink(interrupt, every_frame=True)])
    model(torch.ones(1, 3))
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 3))
    model(torch.ones(1, 3))
    monitor.remove()
    trace = load_trace(path)
    assert trace.is_complete and [each.batch_number for each in trace.frames][:4] == [0, 0, 0, 1]


def test_a_compressed_file_is_what_gzip_reads(tmp_path: Path) -> None:
    import gzip

    path = write(tmp_path / "run.jsonl.gz", [frame(i, "m", {"output": numbers(0.0, 1.0)}) for i in range(500)])
    with gzip.open(path, "rt") as file:
        assert [json.loads(line)["type"] for line in file] == ["header", *["frame"] * 500, "end"]
    assert path.stat().st_size < len(opened(path)) / 5


# what the documents say


def test_the_pivot_of_the_readme_has_a_column_for_each_call(path: Path) -> None:
    twice = nn.Linear(2, 2)
    with Monitor(nn.Sequential(twice, nn.Sigmoid(), twice), trace_file=path, gradients=True) as monitor:
        for _ in range(3):
            monitor.model(torch.ones(1, 2)).sum().backward()
    shown = re.search(r"^trace(\.to_pandas\(\).*?)```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert shown is not None
    table = eval(f"load_trace(path){shown[1]}")
    assert list(table.index) == [0, 1, 2]
    assert set(table.columns) == {("0", 0), ("0", 1), ("1", 0), ("", 0)}


def test_the_example_of_the_format_is_read(tmp_path: Path) -> None:
    shown = re.search(r"```json\n(.*?)```", (ROOT / "docs/trace-format.md").read_text(), re.DOTALL)
    assert shown is not None
    (tmp_path / "run.jsonl").write_text(shown[1])
    trace = load_trace(tmp_path / "run.jsonl")
    assert trace.is_complete and trace.header.root_class == "Net"
    assert [row.is_bad for row in trace.rows] == [False, True]
    assert "".join(map(frame_line, trace.frames)) in shown[1]


def test_the_format_explains_every_key_that_is_written(tmp_path: Path) -> None:
    bad = numbers(0.5, 2.0, nan=1, posinf=1, neginf=1)
    lines = [Line("a", bad, False, ALLOWED), Line("b", "None", True, NOTHING)]
    report = Report(0, (), frame(0, "m", {"a": bad}), None, None)
    file = TraceFile(tmp_path / "run.jsonl")
    file.frame(frame(0, "m", lines, starts_batch=True, is_recompute=True), traced=False)
    file.report(report)
    file.close()
    explained = set(re.findall(r"`(\w+)`", (ROOT / "docs/trace-format.md").read_text()))
    written = lines_of(tmp_path / "run.jsonl")
    keys = {key for line in written for key in line} | {key for line in written[1]["lines"] for key in line}
    assert len(keys) > 25 and keys <= explained

"""A trace file that is cut gives what is before the cut; anything else that is no trace is one clear error."""

from __future__ import annotations

import gzip
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from traces import frame, numbers, opened, write

from overflowstat import Monitor, Trace, TraceError, TraceFile, load_trace
from overflowstat.errors import MonitorWarning

FRAMES = [frame(batch, "layer", {"output": numbers(0.125, 2.0**batch)}) for batch in range(6)]


def read(path: Path) -> tuple[Trace, bool]:
    """With whether a warning said that it is cut."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trace = load_trace(path)
    for warning in told:
        assert warning.category is MonitorWarning
        assert str(path) in str(warning.message) and "cut in its last line" in str(warning.message)
        assert warning.filename == __file__
    assert len(told) == trace.recovered
    return trace, bool(told)


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    return write(tmp_path / "whole.jsonl", FRAMES).read_bytes()


def test_a_file_cut_at_any_byte_of_its_last_lines_gives_all_that_is_before(tmp_path: Path, whole: bytes) -> None:
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]  # the header, six frames, the end
    for length in range(ends[-4], len(whole) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(whole[:length])
        trace, _ = read(path)
        # A line of which only the newline is missing is there.
        complete = sum(end - 1 <= length for end in ends)
        assert trace.frames == FRAMES[: complete - 1], length
        assert trace.is_complete == (complete == 8)
        assert trace.recovered == (not any(length in (end - 1, end) for end in ends)), length


def test_a_compressed_file_cut_at_any_byte_gives_all_that_is_before(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.jsonl.gz", FRAMES).read_bytes()
    path = tmp_path / "cut.jsonl.gz"
    counts = []
    for length in range(len(whole) - 150, len(whole) + 1):
        path.write_bytes(whole[:length])
        trace, _ = read(path)
        assert trace.frames == FRAMES[: len(trace.frames)]
        counts.append(len(trace.frames))
    assert counts == sorted(counts) and counts[-1] == 6
    assert trace.is_complete and not trace.recovered


def test_a_compressed_file_cut_in_its_beginning_is_empty_or_cut(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.jsonl.gz", FRAMES).read_bytes()
    path = tmp_path / "cut.jsonl.gz"
    for length in range(60):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError, match=r"is empty|is cut in its first line|is no trace"):
            load_trace(path)


def test_a_plain_file_cut_in_its_first_line_says_so(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.jsonl"
    for length in range(whole.index(b"\n")):
        path.write_bytes(whole[:length])
        with pytest.raises(TraceError, match="is cut in its first line" if length else "is empty"):
            load_trace(path)
    path.write_bytes(whole[: whole.index(b"\n")])
    assert read(path)[0].frames == []


def test_zeros_that_a_file_system_left_at_the_end_are_cut_off(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 1] + bytes(4096))
    trace, was_told = read(path)
    assert trace.frames == FRAMES and was_told and not trace.is_complete


def test_a_trace_that_was_compressed_or_unpacked_by_hand_is_read(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(whole))
    (tmp_path / "b.gz").write_bytes(whole)
    assert read(tmp_path / "a")[0].frames == read(tmp_path / "b.gz")[0].frames == FRAMES


def test_a_compressed_trace_larger_than_what_is_read_at_once(tmp_path: Path) -> None:
    frames = [frame(i, "m" * 3000, {"output": numbers(0.0, float(i))}) for i in range(2000)]
    path = write(tmp_path / "run.jsonl.gz", frames)
    assert len(opened(path)) > 6_000_000
    assert read(path)[0].frames == frames


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"run.{suffix}", FRAMES)
    lines = opened(path).splitlines(keepends=True)
    lines[3] = lines[3][:40] + b"\n"
    path = tmp_path / "damaged"
    path.write_bytes(b"".join(lines))
    with pytest.raises(TraceError, match="damaged in line 4"):
        load_trace(path)


def changed(key: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda line: {**line, key: value}


def without(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda line: {k: v for k, v in line.items() if k != key}


def of_line(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda line: {**line, "lines": [change(line["lines"][0])]}


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no type": (without("type"), "'type' is missing"),
    "no batch": (without("batch"), "'batch' is missing"),
    "batch is a text": (changed("batch", "1"), "'1' is no int"),
    "batch is true": (changed("batch", True), "True is no int"),
    "batch is a list": (changed("batch", [1]), "is no int"),
    "module is a number": (changed("module", 3), "3 is no str"),
    "lines is a number": (changed("lines", 3), "line 3"),
    "lines is null": (changed("lines", None), "line 3"),
    "a line is a number": (changed("lines", [3]), "line 3"),
    "no label": (of_line(without("label")), "'label' is missing"),
    "no dtype": (of_line(without("dtype")), "'dtype' is missing"),
    "an unknown dtype": (of_line(changed("dtype", "float3")), "float3"),
    "what is no dtype": (of_line(changed("dtype", "Tensor")), "'Tensor' is none of "),
    "shape of texts": (of_line(changed("shape", ["a"])), "'a' is no int"),
    "a number that is a text": (of_line(changed("abs_max", "1.0")), "'1.0' is none of 'nan', 'inf', '-inf'"),
    "a number that is null": (of_line(changed("abs_min", None)), "None is no number"),
    "an unknown kind": (of_line(changed("allowed", ["imaginary"])), "'imaginary' is none of 'nan', 'inf', '-inf'"),
    "a second header": (lambda line: {"type": "header"}, "a second trace begins there"),
    "a list": (lambda line: [line], "it is no object"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_line_that_is_json_and_not_what_it_should_be(tmp_path: Path, whole: bytes, name: str) -> None:
    change, told = DAMAGES[name]
    lines = whole.splitlines(keepends=True)
    lines[2] = json.dumps(change(json.loads(lines[2]))).encode() + b"\n"
    path = tmp_path / "damaged"
    path.write_bytes(b"".join(lines))
    with pytest.raises(TraceError, match="damaged in line 3") as raised:
        load_trace(path)
    assert told in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text", [b'{"abs_min": NaN}', b'{"n": 1' + b"0" * 5000 + b"}", b"[" * 100_000, b"\xff\xfe", b"nonsense", b"{}"]
)
def test_a_line_that_is_no_json(tmp_path: Path, whole: bytes, text: bytes) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(whole.replace(b"\n", b"\n" + text + b"\n", 1))
    with pytest.raises(TraceError, match="damaged in line 2"):
        load_trace(path)


def test_what_a_newer_version_adds_is_passed_over(tmp_path: Path, whole: bytes) -> None:
    lines = [json.loads(line) for line in whole.splitlines()]
    lines[0]["cluster"] = "new"
    lines[1]["speed"] = {"of": ["light"]}
    lines[1]["lines"][0]["median"] = 0.5
    lines.insert(2, {"type": "weather", "batch": "sunny"})
    path = tmp_path / "newer"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(path)[0].frames == FRAMES


@pytest.mark.parametrize("version", [2, 99, 2**70])
def test_a_version_that_is_too_new(tmp_path: Path, whole: bytes, version: int) -> None:
    path = tmp_path / "newer"
    path.write_bytes(whole.replace(b'"version":1', b'"version":%d' % version, 1))
    with pytest.raises(TraceError, match=f"of version {version}, and this overflowstat reads up to 1: use"):
        load_trace(path)


@pytest.mark.parametrize(
    ("key", "value"), [("rank", "zero"), ("rank", None), ("root", 3), ("started", 1.5), ("torch", None)]
)
def test_a_header_of_other_types(tmp_path: Path, whole: bytes, key: str, value: Any) -> None:
    header, _, rest = whole.partition(b"\n")
    path = tmp_path / "damaged"
    path.write_bytes(json.dumps({**json.loads(header), key: value}).encode() + b"\n" + rest)
    with pytest.raises(TraceError, match="damaged in line 1"):
        load_trace(path)


FOREIGN = {
    "text": b"hello\nworld\n",
    "json": b'{"type": "header"}\n',
    "a list": b"[1, 2]\n",
    "another format": b'{"type":"header","format":"other-trace","version":1}\n',
    "binary": bytes(range(256)) * 40,
    "one long line": b"x" * 300_000,
    "zeros": bytes(100_000),
    "a zip": b"PK\x03\x04" + bytes(100),
    "a compressed text": gzip.compress(b"hello\n"),
    "a blank line": b"\n",
    "a deep one": b"[" * 50_000 + b"\n",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_something_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(FOREIGN[name])
    with pytest.raises(TraceError, match=r"is no trace of overflowstat|is empty") as raised:
        load_trace(path)
    assert repr(str(path)) in str(raised.value)


def test_compressed_bytes_that_make_no_sense(tmp_path: Path) -> None:
    whole = write(tmp_path / "run.jsonl.gz", FRAMES * 50).read_bytes()
    path = tmp_path / "damaged.gz"
    path.write_bytes(whole[: len(whole) // 2] + b"\xff" * 40 + whole[len(whole) // 2 + 40 :])
    with pytest.raises(TraceError, match="damaged"):
        load_trace(path)


def test_two_compressed_traces_in_one_file(tmp_path: Path) -> None:
    whole = write(tmp_path / "run.jsonl.gz", FRAMES).read_bytes()
    path = tmp_path / "two.gz"
    path.write_bytes(whole + whole)
    with pytest.raises(TraceError, match="something follows its end"):
        load_trace(path)


@pytest.mark.parametrize("name", ["missing.jsonl", "folder", "missing/run.jsonl", "nul\0.jsonl"])
def test_what_cannot_be_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match="cannot be read") as raised:
        load_trace(tmp_path / name)
    assert name.replace("\0", "\\x00") in str(raised.value)


# what cannot be written


def test_a_folder_in_place_of_a_file_is_told_with_what_to_give(tmp_path: Path) -> None:
    for path in (str(tmp_path), f"{tmp_path}/", f"{tmp_path}/missing/"):
        with pytest.raises(TraceError, match=r"is a folder: give the name of a file in it, as '.*trace\.jsonl'"):
            TraceFile(path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"there is no folder '.*missing'"):
        TraceFile(tmp_path / "missing" / "run.jsonl")


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match=r"there is no folder '.*file'"):
        TraceFile(tmp_path / "file" / "run.jsonl")


@pytest.mark.parametrize(("name", "why"), [("nul\0.jsonl", "null"), ("x" * 300, "File name too long")])
def test_a_name_that_no_file_can_have(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(TraceError, match=f"cannot be written: .*{why}"):
        TraceFile(tmp_path / name)


def test_a_folder_that_must_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # who may write everywhere but in /proc

        def refuse(*_: object) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
    else:
        tmp_path.chmod(0o500)
    with pytest.raises(TraceError, match="cannot be written: Permission denied"):
        TraceFile(tmp_path / "run.jsonl")


def test_a_real_file_system_that_refuses() -> None:
    with pytest.raises(TraceError, match=r"'/proc/run\.jsonl' cannot be written: "):
        TraceFile("/proc/run.jsonl")


@pytest.mark.parametrize("path", [3, True, b"run.jsonl", ["run.jsonl"], object])
def test_a_path_that_is_none(path: Any) -> None:
    with pytest.raises(TypeError, match="trace_file"):
        TraceFile(path)


def test_a_model_stays_as_it_is_where_its_trace_cannot_be_written(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TraceError):
        Monitor(model, trace_file=tmp_path)
    assert not model._forward_hooks and not model._forward_pre_hooks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = Monitor(model)
        model(torch.ones(1, 2))
        monitor.remove()

"""Manners of the command line that all commands have."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from traces import frame, numbers, write

from overflowstat import cli, native
from overflowstat.commands import Command
from overflowstat.errors import TraceError
from overflowstat.terminal import Progress, on_one_line, printable

NAMES = [command.name for command in cli.COMMANDS]


def command(run: Any, needs_torch: bool = True) -> Command:
    return Command("do", "does it", "Does it.", "example", lambda parser: None, run, needs_torch)


def test_the_help_lists_all_commands_and_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--help"])
    told = capsys.readouterr().out
    assert re.findall(r"^    ([\w-]+)(?: |$)", told, re.MULTILINE) == NAMES
    assert re.findall(r"^  (\d+) ", told, re.MULTILINE) == ["0", "1", "2", "130", "141"]


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_an_example_and_its_exit_status_in_its_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main([name, "--help"])
    told = capsys.readouterr().out
    assert re.search(rf"  .*overflowstat {name}", told.partition("example")[2])
    assert "exit status:" in told and "\x1b" not in told
    assert all(len(line) <= 120 for line in told.splitlines())


def run_main(monkeypatch: pytest.MonkeyPatch, run: Any, needs_torch: bool = True) -> int:
    monkeypatch.setattr(cli, "COMMANDS", (command(run, needs_torch),))
    return cli.main(["do"])


def raising(error: BaseException) -> Any:
    def run(chosen: object) -> int:
        raise error

    return run


def test_a_bad_file_is_one_line_and_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, raising(TraceError("'a\nb\x1b[2J' is no trace"))) == 2
    assert capsys.readouterr().err == "overflowstat do: 'a\\nb\\x1b[2J' is no trace\n"


def test_ctrl_c_is_130_and_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


def test_an_error_of_our_own_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        run_main(monkeypatch, raising(ZeroDivisionError()))


def test_without_torch_only_that_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(native, "torch_problem", lambda: "needs torch, and there is none")
    assert run_main(monkeypatch, lambda chosen: 0) == 2
    assert capsys.readouterr().err == "overflowstat needs torch, and there is none\n"
    assert run_main(monkeypatch, lambda chosen: 0, needs_torch=False) == 0


def test_a_name_that_the_terminal_has_no_letters_for_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    run_main(monkeypatch, lambda chosen: print("é中"))
    stream.flush()
    assert written.getvalue() == b"\\xe9\\u4e2d\n"


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    frames = [frame(0, f"m.{i}", {"output": numbers(0.5, float(1 + i))}) for i in range(3000)]
    a, b = write(tmp_path / "a", frames), write(tmp_path / "b", frames[::-1])
    other = [frame(0, f"m.{i}", {"output": numbers(0.5, 1.0)}) for i in range(3000)]
    b = write(tmp_path / "c", other)
    shell = f"{sys.executable} -m overflowstat compare {a} {b} --top 3000 | head -1; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stderr == ""
    assert ended.stdout.splitlines()[1] == "141"


# what is shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layer.0 (Linear) é中😀", "layer.0 (Linear) é中😀"),
        ("a\x1b[31mb\x07\x7f\x9b", r"a\x1b[31mb\x07\x7f\x9b"),
        ("a\nb\tc", "a\nb\\tc"),
        ("\u202egnp\u2066\u200b", r"\u202egnp\u2066\u200b"),
        ("\ud83d|\u2028", r"\ud83d|\u2028"),
        ("", ""),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert on_one_line(text) == shown.replace("\n", "\\n")
    shown.encode()


class Terminal(io.StringIO):
    def __init__(self, is_one: bool = True) -> None:
        super().__init__()
        self._is_one = is_one

    def isatty(self) -> bool:
        return self._is_one


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_progress_is_shown_after_two_seconds_and_wiped_out(clock: list[float]) -> None:
    stream = Terminal()
    with Progress("reading a\x1bb", 200, stream) as progress:
        for seconds in range(1, 5):
            clock[0] = 100.0 + seconds
            progress.at(seconds * 50)
            assert bool(stream.getvalue()) == (seconds >= 2)
    first, second, third, wiped = stream.getvalue()[1:].split("\r")[:4]
    assert first == "reading a\\x1bb [##########          ]  50%"
    assert second.endswith("[###############     ]  75%") and third.endswith("[####################] 100%")
    assert wiped == " " * len(third)


def test_progress_is_not_shown_where_it_is_no_terminal_or_takes_no_time(clock: list[float]) -> None:
    for stream, seconds in ((Terminal(False), 10.0), (Terminal(), 1.9)):
        with Progress("reading", 0, stream) as progress:
            clock[0] += seconds
            progress.at(1)
        assert stream.getvalue() == ""


def test_a_total_that_is_not_known_or_too_small_does_not_matter(clock: list[float]) -> None:
    stream = Terminal()
    with Progress("reading", 0, stream) as progress:
        clock[0] += 3
        progress.at(7)
    with Progress("reading", 5, stream) as progress:
        clock[0] += 3
        progress.at(7)
    assert stream.getvalue().count("100%") == 2

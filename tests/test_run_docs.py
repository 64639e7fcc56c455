"""What docs/run.md shows is what happens."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from documents import code, commands, without_digits
from running import Server, write

FILE = "docs/run.md"
COMMANDS = commands(FILE)
RUN = "python -m overflowstat run "
STATUS = {
    "train.py 30": 1,
    "--on-detect warn train.py 40": 0,
    "--gradients --max-frames-to-save 5 train.py 1": 0,
    "--trace-batch-nums 0 --sink logging train.py 1": 0,
    "--trace-file run.jsonl train.py 1": 0,
    "--exclude '*.embed' --allow ':output=nan' --quiet train.py 2": 0,
    "train.py 3": 0,
    "-m train 1": 0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (script,) = code(FILE, "python")
    write(tmp_path, "train.py", script)
    return tmp_path


def test_all_commands_are_tested() -> None:
    assert [c.partition(RUN)[2] for c in COMMANDS if RUN in c] == list(STATUS)
    assert [c for c in COMMANDS if RUN not in c] == [
        "torchrun --nproc-per-node 2 -m overflowstat run --trace-file run.jsonl train.py 1"  # as in test_run_models.py
    ]


@pytest.mark.parametrize("command", [command for command in COMMANDS if RUN in command])
def test_a_command_does_what_it_is_said_to(server: Server, folder: Path, command: str) -> None:
    variable, _, words = command.partition(RUN)
    environment = dict(word.split("=", 1) for word in shlex.split(variable))
    ended = server.run(folder, *shlex.split(words), environment=environment)
    assert ended.status == STATUS[words], ended.errors
    assert (folder / "run.jsonl").exists() == ("--trace-file" in command)
    if words == "train.py 30":
        (shown,) = code(FILE, "")
        for line in shown.splitlines():
            assert line == "..." or without_digits(line) in without_digits(ended.errors)
    if words.startswith("--on-detect"):
        assert " (Scorer): bad numbers in " in ended.told[2] and "trained" in ended.output

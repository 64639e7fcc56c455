"""The options of `overflowstat run`: which argument of Monitor each one makes."""

from __future__ import annotations

import argparse
import inspect
import sys
import types
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from overflowstat import Monitor
from overflowstat.cli import main
from overflowstat.commands import run
from overflowstat.monitor import CheckName, WeightsName
from overflowstat.policy import Policy
from overflowstat.recorder import RecorderName
from overflowstat.report import OwnStyle
from overflowstat.reporter import ON_DETECT
from overflowstat.running.outputs import make_sink, of_model


def parsed(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return vars(parser.parse_args([*words, "train.py"]))


def test_no_argument_of_monitor_is_forgotten() -> None:
    arguments = inspect.signature(Monitor).parameters
    assert sorted(arguments) == sorted([*run.OPTIONS, *run.ELSEWHERE])


def test_an_option_is_called_as_its_argument_is() -> None:
    own = {"policy": ["include", "exclude", "allow"], "sinks": ["sink"]}
    for argument, options in run.OPTIONS.items():
        assert [option.name for option in options] == own.get(argument, [argument])


def test_the_choices_are_those_of_monitor() -> None:
    choices = {
        argument: option.how["choices"]
        for argument, options in run.OPTIONS.items()
        for option in options
        if "choices" in option.how
    }
    assert {name: list(words) for name, words in choices.items()} == {
        "check": list(get_args(CheckName)),
        "weights": list(get_args(WeightsName)),
        "recorder": list(get_args(RecorderName)),
        "on_detect": list(ON_DETECT),
    }


def test_what_is_not_given_is_left_to_monitor() -> None:
    given = parsed()
    assert run.options_of(given) == {} and run.sinks_of(given) == ["stdout"]


GIVEN = [
    (["--check", "step"], {"check": "step"}),
    (["--every-n", "3"], {"every_n": 3}),
    (["--no-nested", "--buffers"], {"nested": False, "buffers": True}),
    (["--gradients"], {"gradients": True}),
    (["--weights", "on_change"], {"weights": "on_change"}),
    (["--no-reuse-unchanged"], {"reuse_unchanged": False}),
    (["--recorder", "torch"], {"recorder": "torch"}),
    (["--on-detect", "warn", "--max-reports", "2"], {"on_detect": "warn", "max_reports": 2}),
    (["--max-reports", "all", "--max-frames-to-save", "all"], {"max_reports": None, "max_frames_to_save": None}),
    (["--max-frames-to-save", "0"], {"max_frames_to_save": 0}),
    (["--no-verdict", "--drill"], {"verdict": False, "drill": True}),
    (["--warn-at", "0.5"], {"warn_at": 0.5}),
    (["--detail"], {"detail": True}),
    (["--agree", "30"], {"agree": 30.0}),
    (["--trace-batch-nums", "0,149"], {"trace_batch_nums": [0, 149]}),
    (["--abort-after-batch-num", "7"], {"abort_after_batch_num": 7}),
    (["--trace-file", "t.jsonl"], {}),  # each model has one of its own
    (["--every-n", "3", "--every-n", "4"], {"every_n": 4}),
]


@pytest.mark.parametrize(("words", "expected"), GIVEN, ids=[" ".join(words) for words, _ in GIVEN])
def test_what_is_given_is_what_monitor_gets(words: list[str], expected: dict[str, Any]) -> None:
    options = run.options_of(parsed(*words))
    assert options == expected
    Monitor(nn.Identity(), **options).remove()


def test_every_option_is_in_these_tests() -> None:
    flags = {option.flag for options in run.OPTIONS.values() for option in options}
    tested = {word.replace("--no-", "--") for words, _ in GIVEN for word in words if word.startswith("--")}
    assert flags - tested == {"--include", "--exclude", "--allow", "--sink"}


def test_a_policy_is_made_of_three_options() -> None:
    words = ["--include", "a", "--include", "b", "--exclude", "*:input*", "--allow", "a:output=nan,inf"]
    policy = run.options_of(parsed(*words, "--allow", "b:input[x=y]=-inf", "--allow", "a:output=-inf"))["policy"]
    assert isinstance(policy, Policy)
    watched = [name for name in ("a", "b", "c") if policy.watches(name, nn.Identity())]
    rules = [policy.rule(name, nn.Identity(), label) for name, label in (("a", "output"), ("b", "input[x=y]"))]
    expected = Policy(include=["a", "b"], exclude=["*:input*"], allow={"a:output": ["nan", "inf", "-inf"]})
    assert watched == ["a", "b"] and rules[0] == expected.rule("a", nn.Identity(), "output")
    assert rules[1].allowed != rules[0].allowed and not rules[1].is_shown


def test_the_command_line_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run.VARIABLE, "--every-n 5 --exclude 'a b' --exclude c --no-drill --quiet")
    given = {**run._from_environment(), **parsed("--every-n", "2", "--exclude", "d")}
    assert given["every_n"] == 2 and given["exclude"] == ["d"] and given["drill"] is False and given["quiet"] is True
    assert run._from_environment()["exclude"] == ["a b", "c"]


def test_all_that_follows_the_script_is_the_scripts() -> None:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    for words in (["--check", "step"], ["-m", "x"], ["--", "y"], ["--help"]):
        assert parser.parse_args(["--buffers", "train.py", *words]).script == ["train.py", *words]
        assert parser.parse_args(["-m", "package", *words]).script == ["package", *words]


def test_sinks_have_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run.sinks_of(parsed("--sink", "none")) == []
    assert run.sinks_of(parsed("--sink", "stdout", "--sink", "logging")) == ["stdout", "logging"]
    said: list[tuple[object, ...]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            said.append(("folder", folder))

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            said.append((tag, value, step))

        def add_text(self, tag: str, text: str, step: int) -> None: ...

        def close(self) -> None:
            said.append(("closed",))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    model = nn.Identity()
    monitor = Monitor(model, sinks=[make_sink(f"tensorboard={tmp_path}", OwnStyle(), 3)])
    model(torch.tensor([2.0, -5.0]))
    monitor.remove()
    assert said == [
        ("folder", f"{tmp_path}/model-3"),
        ("abs max/the model itself", 5.0, 0),
        ("abs min/the model itself", 2.0, 0),
        ("closed",),
    ]


@pytest.mark.parametrize(
    ("path", "second"),
    [
        ("run.jsonl", "run.model2.jsonl"),
        ("a.b/run.jsonl.gz", "a.b/run.model2.jsonl.gz"),
        ("a.b/run", "a.b/run.model2"),
        ("run.1.JSONL.GZ", "run.1.model2.JSONL.GZ"),
    ],
)
def test_the_trace_of_another_model_has_its_number(path: str, second: str) -> None:
    assert of_model(path, 1) == path and of_model(path, 2) == second


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["--every-n", "0", "train.py"], "every_n=0: must be 1 or more"),
        (["--every-n", "two", "train.py"], "argument --every-n: invalid int value: 'two'"),
        (["--trace-batch-nums", "1,x", "train.py"], "argument --trace-batch-nums: invalid number value: '1,x'"),
        (["--warn-at", "2", "train.py"], "warn_at=2.0: must be above 0 and at most 1"),
        (["--allow", "mask", "train.py"], "--allow mask: says no kind of number, as mask=-inf would"),
        (["--allow", "mask=zero", "train.py"], "--allow: 'zero' is not one of 'nan', 'inf', '-inf'"),
        (["--exclude", "a:", "train.py"], "--exclude: 'a:' names no line behind its colon"),
        (["--sink", "paper", "train.py"], "sink 'paper': must be stdout, logging, tensorboard=FOLDER or none"),
        (
            ["--sink", "tensorboard=/dev/null/x", "train.py"],
            "sink 'tensorboard=/dev/null/x': the folder cannot be made: Not a directory",
        ),
        (["--trace-file", "no/t.jsonl", "train.py"], "'no/t.jsonl' cannot be written: there is no folder 'no'"),
        (["--trace-file", "empty", "train.py"], "'empty' is a folder: give the name of a file in it"),
    ],
)
def test_options_that_make_no_sense_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["run", *command])
    output, errors = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert words in errors and errors.count("\n") == 1 and errors.startswith("overflowstat run: ")


@pytest.mark.parametrize("words", ["--every-n 'two", "--every-n two", "train.py", "--help"])
def test_options_in_the_environment_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    monkeypatch.setenv(run.VARIABLE, words)
    with pytest.raises(SystemExit) as ended:
        main(["run", "train.py"])
    output, errors = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert run.VARIABLE in errors and errors.count("\n") == 1
    assert f"{run.VARIABLE} --help" not in errors

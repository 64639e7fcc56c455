"""What docs/mixed-precision.md shows is what happens. `overflowstat run` reads with the recorder that is built."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import ROOT, code, commands, section, without_digits
from running import Server, python, write
from torch import nn

from overflowstat import Monitor, cli

FILE = "docs/mixed-precision.md"
RUN = "python -m overflowstat run "
SCAN = "python -m overflowstat scan "
SKIPPED = re.compile(r"^step \d+: OVERFLOW, skipped; scale (\S+), reduced to (\S+)$", re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "train.py", code(FILE, "python", "What a scaler does")[0])
    return tmp_path


def test_all_commands_are_tested() -> None:
    assert commands(FILE) == [
        *TRAINING,
        *WATCHED,
        *list(INITIAL),
        *SCANNED,
        "torchrun --nproc_per_node 1 killed.py",
        "grep oom_kill /proc/vmstat",
        "grep MemAvailable /proc/meminfo",
    ]
    assert len(code(FILE, "python")) == 2 and len(code(FILE, "json")) == 2


TRAINING = {
    "python train.py 1 1": (0, 0),
    "python train.py 1 40": (2, 0),
    "python train.py 1e5": (24, 0),
    "python train.py 1 1e-7 0": (0, 3),
}
INITIAL = {
    "python train.py 1 1e-7 16": (0, 0),
    "python train.py 1 1 32": (13, 0),
    "python train.py 1e5 1 32": (24, 0),
}


@pytest.mark.parametrize("command", [*TRAINING, *INITIAL])
def test_the_scaler_skips_as_many_steps_as_is_said(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many it takes at the edge of float16 may differ by one or two between kinds of CPU."""
    monkeypatch.setattr("sys.argv", shlex.split(command)[1:])
    runpy.run_path(str(folder / "train.py"), run_name="__main__")
    output = capsys.readouterr().out
    skipped, vanished = {**TRAINING, **INITIAL}[command]
    lines = [(float(before), float(after)) for before, after in SKIPPED.findall(output)]
    assert all(before == pytest.approx(2 * after, rel=1e-4) for before, after in lines)
    assert len(lines) == skipped if skipped in (0, 24) else abs(len(lines) - skipped) <= 2
    assert output.endswith(f", and {vanished} of 3 gradients are all zero\n")


WATCHED = {
    f"{RUN}train.py 1e5": 1,
    f"{RUN}--gradients --on-detect warn train.py 1 40": 0,
}


@pytest.mark.parametrize("command", WATCHED)
def test_what_is_watched_is_told_as_it_is_shown(server: Server, folder: Path, command: str) -> None:
    ended = server.run(folder, *shlex.split(command.removeprefix(RUN)))
    assert ended.status == WATCHED[command], ended.errors
    shown = code(FILE, "", "OVERFLOW lines")[1 + list(WATCHED).index(command)]
    told = without_digits(ended.output + ended.errors)
    for line in shown.splitlines():
        assert without_digits(line.partition(": 11 of ")[0].partition(": 24 of ")[0]) in told
    assert ("in the end scale" in ended.output) == (ended.status == 0)


def test_a_grad_scaler_s_gradients_do_not_raise_and_those_of_another_scaler_do(server: Server, folder: Path) -> None:
    scaled = server.run(folder, "--gradients", "train.py", "1", "40")
    assert scaled.status == 0 and "GradScaler will skip this step" in scaled.output
    text = (folder / "train.py").read_text()
    another = re.sub(r"scaler = .*", "scale = 2.0 ** int(power)", text)
    another = another.replace("scaler.scale(loss).backward()", "(scale * loss).backward()\n        continue")
    write(folder, "another.py", another.partition("    vanished")[0] + "\n\ntrain(*sys.argv[1:])\n")
    assert server.run(folder, "--gradients", "another.py", "1", "40").status == 1
    ended = server.run(folder, "--gradients", "--on-detect", "warn", "another.py", "1", "40")
    assert ended.status == 0 and "grad weight" in ended.output and "GradScaler will" not in ended.output


SCANNED = {
    f"{SCAN}model.safetensors --fail-on fp16-overflow": 1,
    f"{SCAN}model.safetensors --fail-on nan,inf": 0,
}


@pytest.mark.parametrize("command", SCANNED)
def test_weights_that_float16_does_not_hold_are_found_before_anything_runs(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weights = {"fits": torch.ones(4, dtype=torch.bfloat16), "does_not": torch.tensor([1.0, 1e5], dtype=torch.bfloat16)}
    safetensors.save_file(weights, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)[3:]) == SCANNED[command]
    assert "does_not: bfloat16, shape [2]; abs max 9.984e+04; fp16-overflow 1" in capsys.readouterr().out


def test_headroom_tells_which_activations_float16_would_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity()).bfloat16()
    with torch.no_grad():
        model.get_parameter("0.weight").fill_(1e5)
    names: dict[str, Any] = {"Monitor": Monitor, "model": model, "x": torch.ones(1, 4, dtype=torch.bfloat16)}
    exec(code(FILE, "python", "Weights trained in bf16, run in fp16")[0], names)
    nearest = next(iter(names["monitor"].headroom()))
    assert nearest.powers_left_in_float16 is not None and nearest.powers_left_in_float16 < 0
    assert str(names["monitor"].headroom()) in capsys.readouterr().out


def test_the_table_has_the_limits_of_the_formats() -> None:
    table = (ROOT / FILE).read_text().partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line.startswith("|")][2:]
    assert [name for name, *_ in rows] == ["float16", "bfloat16", "float32"]
    for name, *cells in rows:
        limits, (largest, smallest, next_after_1) = torch.finfo(getattr(torch, name)), map(float, cells)
        assert [largest, smallest] == pytest.approx([limits.max, limits.smallest_normal], rel=5e-3)
        assert next_after_1 - 1 == pytest.approx(limits.eps, rel=0.05)


def test_deepspeed_s_configurations_are_json_with_the_keys_that_the_text_names() -> None:
    scale, offload = (json.loads(block) for block in code(FILE, "json"))
    text = section(FILE, "The initial scale")
    assert all(
        f"`{key}`" in text for key in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    )
    assert scale["fp16"]["loss_scale"] == 0 and scale["fp16"]["initial_scale_power"] == 32
    assert offload["zero_optimization"]["stage"] == 3
    assert {"offload_optimizer", "offload_param"} <= set(offload["zero_optimization"])


def test_a_process_that_is_killed_is_shown_by_the_launcher_as_it_is_said(tmp_path: Path) -> None:
    write(tmp_path, "killed.py", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    command = next(each for each in commands(FILE) if each.startswith("torchrun "))
    ended = python(tmp_path, "-m", "torch.distributed.run", "--standalone", *shlex.split(command)[1:])
    assert ended.status == 1 and "Signal 9 (SIGKILL) received by PID" in ended.errors


@pytest.mark.parametrize("command", [each for each in commands(FILE) if each.startswith("grep ")])
def test_what_the_kernel_counts_is_where_it_is_said(command: str) -> None:
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"oom_kill \d+\n|MemAvailable: +\d+ kB\n", ended.stdout)

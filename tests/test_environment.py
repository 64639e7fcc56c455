"""What `python -m overflowstat env` tells, and what it advises."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch
from test_toolkit import CPU_TORCH, CUDA_12_4, EVERYTHING, NO_TOOLKIT, facts

from overflowstat import cli, environment, native, toolkit
from overflowstat.environment import Device, Environment
from overflowstat.toolkit import BuildRecord, Facts

ONE_DEVICE = (Device("GPU", "9.0", True),)
NOT_COVERED = (Device("GPU", "11.0", False), Device("GPU", "9.0", True))
LACKING = native.Status(None, "runs without its C++ extension: ...")
FINE = native.Status(environment, "")  # any module stands for the extension


@pytest.mark.parametrize(
    ("status", "extension", "devices", "found", "expected"),
    [
        (FINE, "cuda", ONE_DEVICE, EVERYTHING, "nothing to do"),
        (FINE, "cpu", (), facts(**CPU_TORCH), "nothing to do"),
        (FINE, "cuda", NOT_COVERED, EVERYTHING, "not covered by what was built: TORCH_CUDA_ARCH_LIST='11.0' COMMAND"),
        (LACKING, "none", (), EVERYTHING, "a build would give cuda now: COMMAND"),
        (LACKING, "none", (), facts(**NO_TOOLKIT), "a build would give cpu now: COMMAND"),
        (LACKING, "cpu", (), EVERYTHING, "a build would give cuda now: COMMAND"),
        (LACKING, "cpu", (), facts(toolkit=CUDA_12_4), "set CUDA_HOME to one, then COMMAND"),
        (LACKING, "cpu", (), facts(**CPU_TORCH), "nothing to do: torch 2.13.0+cpu is built without CUDA"),
        (LACKING, "none", (), facts(compiler=None, compiler_problem="no g++"), "no g++: install g++ or set CXX, then"),
        (LACKING, "none", (), facts(arch_list="7.0"), "a build would fail now: TORCH_CUDA_ARCH_LIST: 7.0"),
    ],
)
def test_the_next_step_follows_from_what_is_lacking_and_what_a_build_would_give(
    status: native.Status,
    extension: str,
    devices: tuple[Device, ...],
    found: Facts,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "mend_command", lambda: "COMMAND")
    assert expected in environment._next_step(status, extension, devices, found)


def test_the_environment_is_the_one_that_runs() -> None:
    found = environment.describe()
    built = BuildRecord.load(native.PACKAGE)
    assert built is not None
    assert (found.torch, found.torch_cuda) == (torch.__version__, torch.version.cuda)
    assert found.executable == sys.executable
    assert found.extension == built.kind == toolkit.make_plan(toolkit.gather_facts()).kind
    assert found.reason == native.reason()
    assert len(found.devices) == torch.cuda.device_count()
    assert found.compiler_version


def test_the_json_holds_every_fact_of_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {field.name for field in dataclasses.fields(Environment)}
    assert told["torch"] == torch.__version__
    assert told["built"]["python"] == toolkit.python_tag()


def test_the_text_names_versions_build_devices_and_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = {line[:14].strip(): line[14:] for line in lines}
    assert torch.__version__ in told["torch"]
    assert f"for torch {torch.__version__}" in told["built"]
    assert told["next"] == environment.describe().next_step
    assert {"overflowstat", "Python", "system", "extension", "CUDA toolkit", "C++ compiler", "CUDA device"} <= set(told)


def test_a_device_and_a_lack_are_shown_in_the_text() -> None:
    found = dataclasses.replace(
        environment.describe(), devices=NOT_COVERED, extension="cpu", reason="has no CUDA kernels", torch_hip="7.0"
    )
    text = environment.render(found)
    assert "GPU, compute capability 11.0, NOT covered by what was built" in text
    assert "GPU, compute capability 9.0, covered by what was built" in text
    assert "extension     cpu: has no CUDA kernels" in text
    assert "ROCm 7.0" in text


def test_a_command_that_does_not_exist_is_refused_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["evn"])
    assert "'env', 'demo'" in capsys.readouterr().err.replace("env, demo", "'env', 'demo'")


def test_the_demo_s_exit_status_is_the_command_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from overflowstat import demo

    monkeypatch.setattr(demo, "run", lambda: 3)
    assert cli.main(["demo"]) == 3

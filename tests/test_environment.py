"""What `python -m overflowstat env` tells and advises: on machines made of a few files, since none has all faults."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_toolkit import Machine, compiler, cuda_home, executable
from test_building import CPU_TORCH, CUDA_12_4, CUDA_13, EVERYTHING, facts

from overflowstat import cli, environment, native
from overflowstat.building.compiler import Compiler
from overflowstat.building.plan import Facts, gather_facts, make_plan
from overflowstat.building.record import BuildRecord, python_tag
from overflowstat.environment.facts import Device, Driver, Environment
from overflowstat.environment.machine import COMPILERS
from overflowstat.environment.privacy import shortened
from overflowstat.environment.problems import find_problems
from overflowstat.environment.toolkits import version_in_files

AGAIN = native.mend_command()
INSTALL = f"conda install -c nvidia cuda-toolkit=13.0 && export CUDA_HOME=$CONDA_PREFIX && {AGAIN}"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """With a CUDA torch, a toolkit that fits, a compiler and ninja."""
    made = Machine(tmp_path / "machine")
    made.toolkit("13.0", architectures="compute_75 compute_80 compute_90 compute_120", newest_gcc=15, newest_clang=20)
    made.variables["CUDA_HOME"] = str(made.root / "usr/local/cuda-13.0")
    return made


def problems(told: dict[str, Any]) -> dict[str, str]:
    """All but that nothing is built for this torch, which none of these machines can have."""
    found = {problem["what"]: problem["command"] for problem in told["problems"]}
    found.pop("there is no extension that can be used, and a build would give cuda now", None)
    return found


def test_a_machine_that_has_everything_has_no_problem_but_that_nothing_is_built(machine: Machine) -> None:
    told = machine.told()
    built = {"what": "there is no extension that can be used, and a build would give cuda now", "command": AGAIN}
    assert told["problems"] == [built]
    assert (told["torch"], told["torch_cuda"], told["ninja"]) == ("2.14.1+cu130", "13.0", "1.13.0")
    assert told["toolkit"]["architectures"] == ["7.5", "8.0", "9.0", "12.0"]
    assert [(each["version"], each["named_by"], each["is_used"]) for each in told["toolkits"]] == [
        ("13.0", ["CUDA_HOME"], True)
    ]
    assert [(each["family"], each["release"]) for each in told["compilers"]] == [("g++", 12)]


# Each fault: what is done to that machine, what is said of it, and what mends it, where {} is the machine's folder.


def of_another_major(machine: Machine) -> None:
    machine.toolkit("12.4")
    machine.variables["CUDA_HOME"] = str(machine.root / "usr/local/cuda-12.4")


def of_another_major_alone(machine: Machine, manager: str) -> None:
    (machine.root / "usr/local/cuda-13.0").rename(machine.root / "away")
    of_another_major(machine)
    (machine.bin / "apt-get").rename(machine.bin / manager)


def without_a_part(machine: Machine, part: str, other: str = "") -> None:
    (machine.root / "usr/local/cuda-13.0" / part).unlink()
    if other:
        machine.toolkit(other)


def nvcc_of_another_on_path(machine: Machine) -> None:
    machine.variables["PATH"] = f"{machine.toolkit('13.2')}/bin:{machine.bin}"


def libraries_of_another(machine: Machine) -> None:
    other = machine.toolkit("12.4")
    (machine.root / "lib").mkdir()
    machine.variables["LD_LIBRARY_PATH"] = f"{machine.root}/lib:{other}/lib64:{other}/include"


def too_new(machine: Machine, name: str, release: int, *others: tuple[str, int]) -> None:
    (machine.bin / "g++").unlink()
    for each, number in ((name, release), *others):
        compiler(machine.bin / each, number)


def no_compiler(machine: Machine) -> None:
    (machine.bin / "g++").unlink()


def cxx_that_is_not_there(machine: Machine, value: str = "g++-99") -> None:
    machine.variables["CXX"] = value


def ninja_that_fails(machine: Machine) -> None:
    (machine.bin / "ninja").unlink()
    executable(machine.bin / "ninja", "exit 1")


def no_ninja(machine: Machine) -> None:
    (machine.bin / "ninja").unlink()


def arch_list(machine: Machine, value: str, *devices: str) -> None:
    machine.variables["TORCH_CUDA_ARCH_LIST"] = value
    machine.devices = tuple(("NVIDIA X", capability) for capability in devices)


def extension_that_is_not_one(machine: Machine) -> None:
    machine.variables["OVERFLOWSTAT_EXT"] = "gpu"


def only_for_cpus_by_choice(machine: Machine) -> None:
    machine.variables["OVERFLOWSTAT_EXT"] = "cpu"


def folders_of_cuda_that_have_gone(machine: Machine) -> None:
    machine.variables["LD_LIBRARY_PATH"] = f"{machine.root}/usr/local/cuda-11.8/lib64:{machine.root}/home"


def old_driver(machine: Machine) -> None:
    machine.driver_cuda = "12.4"
    (machine.root / "driver").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12\n"
    )


def hidden_devices(machine: Machine) -> None:
    machine.nvidia_smi("NVIDIA X", "9.0", "580.10")
    machine.variables["CUDA_VISIBLE_DEVICES"] = "-1"


def devices_that_do_not_start(machine: Machine) -> None:
    machine.devices, machine.problem = (("NVIDIA X", "9.0"),), "CUDA unknown error"


def torch_without_cuda(machine: Machine) -> None:
    machine.torch, machine.cuda = "2.14.1+cpu", None
    machine.nvidia_smi("NVIDIA X, with a comma", "9.0", "580.10")


FAULTS: dict[str, tuple[Callable[[Machine], None], str, str]] = {
    "a toolkit of another major version, and one that fits": (
        of_another_major,
        "the CUDA toolkit in {}/usr/local/cuda-12.4 is 12.4 and torch's CUDA is 13.0",
        f"export CUDA_HOME={{}}/usr/local/cuda-13.0 PATH={{}}/usr/local/cuda-13.0/bin:$PATH && {AGAIN}",
    ),
    "a toolkit of another major version, Debian": (
        lambda machine: of_another_major_alone(machine, "apt-get"),
        "the CUDA toolkit in {}/usr/local/cuda-12.4 is 12.4 and torch's CUDA is 13.0",
        f"sudo apt-get install cuda-toolkit-13-0 && export CUDA_HOME=/usr/local/cuda-13.0 && {AGAIN}",
    ),
    "a toolkit of another major version, Red Hat": (
        lambda machine: of_another_major_alone(machine, "dnf"),
        "the CUDA toolkit in {}/usr/local/cuda-12.4 is 12.4 and torch's CUDA is 13.0",
        f"sudo dnf install cuda-toolkit-13-0 && export CUDA_HOME=/usr/local/cuda-13.0 && {AGAIN}",
    ),
    "a toolkit of another major version, conda": (
        lambda machine: of_another_major_alone(machine, "conda"),
        "the CUDA toolkit in {}/usr/local/cuda-12.4 is 12.4 and torch's CUDA is 13.0",
        INSTALL,
    ),
    "a toolkit without its library": (
        lambda machine: without_a_part(machine, "lib64/libcudart_static.a"),
        "CUDA_HOME={}/usr/local/cuda-13.0 has no libcudart_static.a",
        f"sudo apt-get install cuda-toolkit-13-0 && export CUDA_HOME=/usr/local/cuda-13.0 && {AGAIN}",
    ),
    "a toolkit without its headers, and a whole one": (
        lambda machine: without_a_part(machine, "include/cuda_runtime_api.h", other="13.2"),
        "CUDA_HOME={}/usr/local/cuda-13.0 has no include/cuda_runtime_api.h",
        f"export CUDA_HOME={{}}/usr/local/cuda-13.2 PATH={{}}/usr/local/cuda-13.2/bin:$PATH && {AGAIN}",
    ),
    "a toolkit without its compiler, and one of another major version": (
        lambda machine: without_a_part(machine, "bin/nvcc", other="12.4"),
        "CUDA_HOME={}/usr/local/cuda-13.0 has no bin/nvcc",
        f"sudo apt-get install cuda-toolkit-13-0 && export CUDA_HOME=/usr/local/cuda-13.0 && {AGAIN}",
    ),
    "several toolkits, of which PATH has another": (
        nvcc_of_another_on_path,
        "several toolkits: nvcc on PATH is 13.2 in {}/usr/local/cuda-13.2, and a build would take 13.0 in "
        "{}/usr/local/cuda-13.0",
        "export PATH={}/usr/local/cuda-13.0/bin:$PATH",
    ),
    "several toolkits, of which LD_LIBRARY_PATH has another": (
        libraries_of_another,
        "several toolkits: LD_LIBRARY_PATH has the libraries of CUDA 12.4 in {}/usr/local/cuda-12.4, and a build would "
        "take 13.0",
        "export LD_LIBRARY_PATH=$(echo \"$LD_LIBRARY_PATH\" | tr : '\\n' | grep -vxF -e {}/usr/local/cuda-12.4/lib64 "
        "-e {}/usr/local/cuda-12.4/include | paste -sd:)",
    ),
    "a compiler too new for nvcc": (
        lambda machine: too_new(machine, "g++", 16),
        "{}/bin/g++ is g++ 16, and nvcc 13.0 in {}/usr/local/cuda-13.0 takes none newer than 15",
        f"sudo apt-get install g++-15 && export CXX=g++-15 && {AGAIN}",
    ),
    "a compiler too new for nvcc, and an older one": (
        lambda machine: too_new(machine, "g++", 16, ("g++-11", 11), ("g++-15", 15), ("clang++", 20)),
        "{}/bin/g++ is g++ 16, and nvcc 13.0 in {}/usr/local/cuda-13.0 takes none newer than 15",
        f"export CXX={{}}/bin/g++-15 && {AGAIN}",
    ),
    "a clang too new for nvcc": (
        lambda machine: too_new(machine, "clang++", 21),
        "{}/bin/clang++ is clang++ 21, and nvcc 13.0 in {}/usr/local/cuda-13.0 takes none newer than 20",
        f"sudo apt-get install clang-20 && export CXX=clang++-20 && {AGAIN}",
    ),
    "no compiler": (no_compiler, "there is no C++ compiler", f"sudo apt-get install g++ && {AGAIN}"),
    "CXX": (cxx_that_is_not_there, "CXX=g++-99 is not there", f"unset CXX && {AGAIN}"),
    "CXX that no shell would take": (
        lambda machine: cxx_that_is_not_there(machine, 'g++ "-O2'),
        'CXX=g++ "-O2 is not there',
        f"unset CXX && {AGAIN}",
    ),
    "a ninja that does not run": (
        ninja_that_fails,
        "no ninja on PATH that runs: without it torch compiles one file after the other, and all of them each time",
        "python -m pip install ninja",
    ),
    "no ninja": (
        no_ninja,
        "no ninja on PATH that runs: without it torch compiles one file after the other, and all of them each time",
        "python -m pip install ninja",
    ),
    "an architecture that was dropped": (
        lambda machine: arch_list(machine, "7.0;9.0"),
        "a build would fail: TORCH_CUDA_ARCH_LIST: 7.0 has been dropped by this nvcc; nvcc 13.0 in "
        "{}/usr/local/cuda-13.0 compiles for 7.5, 8.0, 9.0, 12.0",
        "unset TORCH_CUDA_ARCH_LIST",
    ),
    "an architecture that was dropped, and the GPUs that are here": (
        lambda machine: arch_list(machine, "7.0", "9.0", "12.1", "8.0"),
        "a build would fail: TORCH_CUDA_ARCH_LIST: 7.0 has been dropped by this nvcc; nvcc 13.0 in "
        "{}/usr/local/cuda-13.0 compiles for 7.5, 8.0, 9.0, 12.0",
        "export TORCH_CUDA_ARCH_LIST='8.0;9.0;12.0+PTX'",
    ),
    "an architecture that is not that of the GPU": (
        lambda machine: arch_list(machine, "8.0", "8.0", "9.0"),
        "TORCH_CUDA_ARCH_LIST=8.0 is nothing for NVIDIA X (9.0)",
        "export TORCH_CUDA_ARCH_LIST='8.0;9.0'",
    ),
    "an extension that does not exist": (
        extension_that_is_not_one,
        "a build would fail: OVERFLOWSTAT_EXT=gpu is none of auto, cuda, cpu, none",
        "unset OVERFLOWSTAT_EXT",
    ),
    "less than there could be, by choice": (
        only_for_cpus_by_choice,
        "it was built with OVERFLOWSTAT_EXT=cpu",
        f"unset OVERFLOWSTAT_EXT && {AGAIN}",
    ),
    "a folder of CUDA that has gone": (
        folders_of_cuda_that_have_gone,
        "LD_LIBRARY_PATH names {}/usr/local/cuda-11.8/lib64, which is not there",
        "export LD_LIBRARY_PATH=$(echo \"$LD_LIBRARY_PATH\" | tr : '\\n' | grep -vxF -e {}/usr/local/cuda-11.8/lib64 "
        "| paste -sd:)",
    ),
    "a driver too old for torch": (
        old_driver,
        "the driver 550.54.15 serves CUDA up to 12.4, and torch's CUDA is 13.0",
        "sudo apt-get install cuda-drivers",
    ),
    "GPUs that are hidden": (
        hidden_devices,
        "CUDA_VISIBLE_DEVICES=-1 hides from torch the GPUs that are here",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "GPUs that do not start": (
        devices_that_do_not_start,
        "torch cannot use the GPUs that are here: CUDA unknown error",
        "nvidia-smi -q  # what the driver says",
    ),
    "a GPU, and a torch without CUDA": (
        torch_without_cuda,
        "there is NVIDIA X, with a comma, and torch 2.14.1+cpu is built without CUDA",
        f"python -m pip install --force-reinstall torch && {AGAIN}",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_the_command_that_mends_it(machine: Machine, fault: str) -> None:
    spoil, what, command = FAULTS[fault]
    spoil(machine)
    what, command = (text.replace("{}", str(machine.root)) for text in (what, command))
    told = problems(machine.told())
    allowed = {
        "there is no extension that can be used, and a build would give cpu now"
    }  # where CUDA is what is lacking
    assert told[what] == command and set(told) - allowed == {what}
    wanted = command.removesuffix(f" && {AGAIN}")
    if wanted.startswith(("export ", "unset ")) and fault != "GPUs that are hidden":  # nvidia-smi is all that sees them
        assert problems(machine.told(after=wanted)) == {}


def test_nvcc_that_is_told_to_take_any_compiler_takes_a_new_one(machine: Machine) -> None:
    too_new(machine, "g++", 16)
    machine.variables["NVCC_APPEND_FLAGS"] = "-O2 -allow-unsupported-compiler"
    assert problems(machine.told()) == {}


def test_all_folders_that_are_missing_are_told_and_only_those_of_cuda_are_a_problem(machine: Machine) -> None:
    machine.variables["PATH"] = f"{machine.bin}:/nowhere/bin:/nowhere/bin"
    told = machine.told()
    assert told["missing"] == {"PATH": ["/nowhere/bin"]} and problems(told) == {}
    assert "\nmissing       /nowhere/bin of PATH\n" in machine.ask()


@pytest.mark.parametrize(
    ("version", "import_error", "what", "how"),
    [
        (None, "", "there is none here", ""),
        ("2.10.0", "", "this is 2.10.0", "--upgrade "),
        (
            "2.14.1",
            "libcudart.so.13:\n no such file",
            "the one here does not import (libcudart.so.13: no such file)",
            "--force-reinstall ",
        ),
    ],
)
def test_without_a_torch_that_can_be_used_the_rest_is_told(
    machine: Machine, version: str | None, import_error: str, what: str, how: str
) -> None:
    machine.torch, machine.import_error = version, import_error
    told = machine.told()
    expected = {
        "what": f"overflowstat needs torch 2.11 or newer, and {what}",
        "command": f"python -m pip install {how}torch && {AGAIN}",
    }
    assert told["problems"] == [expected] and told["torch"] is None
    assert [each["version"] for each in told["toolkits"]] == ["13.0"]


def test_a_version_comes_from_a_toolkit_s_files_and_no_nvcc_but_the_one_that_is_used_is_run(machine: Machine) -> None:
    for version in ("12.9", "12.1", "11.8"):
        home = machine.toolkit(version)
        executable(home / "bin" / "nvcc", f"touch {machine.root}/was_run", "/bin/sleep 60")
    folder = machine.root / "usr" / "local"
    told = {"cuda": {"version": "12.9.0"}, "cuda_nvcc": {"name": "CUDA NVCC", "version": "12.9.41"}}
    (folder / "cuda-12.9" / "version.json").write_text(json.dumps(told))
    (folder / "cuda-12.1" / "version.txt").write_text("CUDA Version 12.1.66\n")
    (folder / "cuda-11.8" / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  11080\n")
    found = {Path(each["home"]).name: each["version"] for each in machine.told()["toolkits"]}
    assert found == {"cuda-13.0": "13.0", "cuda-12.9": "12.9", "cuda-12.1": "12.1", "cuda-11.8": "11.8"}
    assert not (machine.root / "was_run").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cuda": 3}', '{"cuda_nvcc": {"version": "new"}}', '{"other": {}}'])
def test_a_version_file_that_tells_nothing_leaves_it_to_the_next(tmp_path: Path, text: str) -> None:
    home = cuda_home(tmp_path / "cuda")
    (home / "version.json").write_text(text)
    assert version_in_files(home) == ""
    (home / "version.txt").write_text("CUDA Version 10.2.89")
    assert version_in_files(home) == "10.2"


def test_an_nvcc_that_hangs_is_ended_with_what_it_started_and_told(machine: Machine) -> None:
    home = machine.root / "usr/local/cuda-13.0"
    executable(home / "bin" / "nvcc", f"/bin/sleep 300 & echo $! >> {machine.root}/started", "wait")
    machine.seconds = 0.5
    begin = time.monotonic()
    told = machine.told()
    assert time.monotonic() - begin < 30
    what = f"CUDA_HOME={home} has an nvcc that does not run "
    assert told["toolkit"] is None and told["toolkit_problem"].startswith(what)
    assert "timed out after 0.5 seconds" in told["toolkit_problem"]
    assert [(each["version"], each["is_used"]) for each in told["toolkits"]] == [("", False)]
    for started in (machine.root / "started").read_text().split():
        state = Path(f"/proc/{started}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_script_that_calls_nvcc_is_asked_and_said_to_be_no_toolkit_of_its_own(machine: Machine) -> None:
    real = machine.root / "usr/local/cuda-13.0/bin/nvcc"
    machine.variables.pop("CUDA_HOME")
    (machine.root / "usr/local/cuda").symlink_to(real.parents[1])
    executable(machine.bin / "nvcc", f'exec {real} "$@"')
    told = machine.told()
    found = {(each["home"], each["version"], each["missing"], each["is_used"]) for each in told["toolkits"]}
    no_headers = "include/cuda_runtime_api.h"
    assert found == {(str(real.parents[1]), "13.0", "", True), (str(machine.root), "13.0", no_headers, False)}
    assert f"13.0 in {machine.root}, by PATH; has no {no_headers}\n" in machine.ask()
    assert problems(told) == {}


def test_the_home_folder_and_the_domain_of_the_host_are_not_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = machine.root / "home"
    cuda_home(home / "my cuda", "12.4")
    machine.variables["CUDA_HOME"] = str(home / "my cuda")
    machine.variables["LD_LIBRARY_PATH"] = f"{home}/cuda lib:{home}"
    text = machine.ask()
    assert str(home) not in text and "set           CUDA_HOME=~/my cuda\n" in text
    assert "grep -vxF -e ~/'cuda lib' | " in text
    assert str(home) not in machine.ask("--json")

    monkeypatch.setattr(socket, "gethostname", lambda: "node17.cluster.example.org")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "")
    monkeypatch.setenv("CUDA_PATH", "/net/node17.cluster.example.org/cuda")
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert "example.org" not in text and ", host node17\n" in text and "CUDA_PATH=/net/node17/cuda\n" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/me/x", "~/x"),
        ("a=/home/me:/home/me/lib", "a=~:~/lib"),
        ("/home/me-too /mnt/home/me /home/me.old", "/home/me-too /mnt/home/me /home/me.old"),
        ("in /home/me.", "in /home/me."),
    ],
)
def test_only_the_home_folder_itself_is_shortened(text: str, expected: str) -> None:
    assert shortened([text], "/home/me", "host") == [expected]
    assert shortened(text, "/", "host") == text


def test_packages_that_a_report_needs_are_told_where_they_are_installed(machine: Machine) -> None:
    machine.ask()
    (machine.root / "packages" / "deepspeed-0.99.1.dist-info").mkdir()
    (machine.root / "packages" / "deepspeed-0.99.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.99.1\n"
    )
    assert machine.told()["packages"]["deepspeed"] == "0.99.1"
    assert "deepspeed 0.99.1" in machine.ask()


def test_gpus_and_driver_are_told(machine: Machine) -> None:
    old_driver(machine)
    machine.driver_cuda = "13.1"
    machine.devices = (("NVIDIA X", "9.0"), ("NVIDIA Y", "12.0"))
    text = machine.ask()
    assert "\ndriver        550.54.15, for CUDA up to 13.1\n" in text
    assert "\nCUDA device   NVIDIA X, compute capability 9.0\nCUDA device   NVIDIA Y, compute capability 12.0\n" in text


@pytest.mark.parametrize(("told", "capability"), [("9.0", "9.0"), ("[N/A]", ""), ("", "")])
def test_a_compute_capability_that_is_not_told_is_none(machine: Machine, told: str, capability: str) -> None:
    machine.nvidia_smi("NVIDIA X", told, "460.32")
    assert [(each["name"], each["capability"]) for each in machine.told()["devices"]] == [("NVIDIA X", capability)]


# Without a machine: what follows from what is found.


def here(**differences: Any) -> Environment:
    """The environment of the tests, which has nothing that its machine has."""
    found = dataclasses.replace(
        environment.describe({"PATH": ""}),
        torch="2.14.1+cu130",
        torch_cuda="13.0",
        ninja="1.13",
        devices=(),
        driver=None,
    )
    return dataclasses.replace(found, **differences)


X, Y = Device("X", "9.0", True), Device("Y", "11.0", False)
BUILT = BuildRecord("cuda", "", "", "2.14.1", "13.0", "13.0", ("8.0", "9.0"), python_tag())


@pytest.mark.parametrize(
    ("differences", "facts_now", "expected"),
    [
        ({"extension": "cuda", "devices": (X,)}, EVERYTHING, {}),
        ({"extension": "cpu", "torch_cuda": None}, facts(**CPU_TORCH), {}),
        (
            {"extension": "cuda", "devices": (Y, X), "built": BUILT},
            EVERYTHING,
            {"the extension has no code for Y (11.0), but for 8.0;9.0": f"TORCH_CUDA_ARCH_LIST='9.0;11.0' {AGAIN}"},
        ),
        (
            {"extension": "cuda", "devices": (Device("W", "", None), X, dataclasses.replace(Y, covered=True))},
            facts(arch_list="8.0 9.0"),
            {"TORCH_CUDA_ARCH_LIST=8.0 9.0 is nothing for Y (11.0)": "export TORCH_CUDA_ARCH_LIST='9.0;11.0'"},
        ),
        (
            {"extension": "cuda", "devices": (Device("Z", "5.0", None),)},
            facts(arch_list="8.0"),
            {"TORCH_CUDA_ARCH_LIST=8.0 is nothing for Z (5.0)": "export OVERFLOWSTAT_EXT=cpu"},
        ),
        (
            {"extension": "cuda", "devices": (Device("Z", "5.0", False),), "built": BUILT},
            EVERYTHING,
            {"the extension has no code for Z (5.0), but for 8.0;9.0": f"OVERFLOWSTAT_EXT=cpu {AGAIN}"},
        ),
        (
            {"extension": "none"},
            facts(toolkit=None, toolkit_problem="no CUDA toolkit was found"),
            {
                "there is no extension that can be used, and a build would give cpu now": AGAIN,
                "no CUDA toolkit was found": INSTALL,
            },
        ),
        (
            {"extension": "cpu"},
            facts(toolkit=CUDA_12_4),
            {"the CUDA toolkit in /opt/cuda is 12.4 and torch's CUDA is 13.0": INSTALL},
        ),
        (
            {"extension": "none", "package_manager": "dnf"},
            facts(python_header=None),
            {"Python's C headers (Python.h) are not installed": f"sudo dnf install python3-devel && {AGAIN}"},
        ),
        ({"extension": "none"}, facts(platform="darwin"), {}),
        (
            {"extension": "cpu", "package_manager": "dnf"},
            facts(
                compiler=Compiler("/usr/bin/g++", "g++", 16),
                toolkit=dataclasses.replace(CUDA_13, newest_gcc=15),
            ),
            {
                "/usr/bin/g++ is g++ 16, and nvcc 13.0 in /opt/cuda takes none newer than 15": "sudo dnf install "
                f"gcc-toolset-15-gcc-c++ && export CXX=/opt/rh/gcc-toolset-15/root/usr/bin/g++ && {AGAIN}"
            },
        ),
        (
            {"extension": "cuda"},
            facts(toolkit=dataclasses.replace(CUDA_13, architectures=("13.0",))),
            {
                "a build would fail: nvcc 13.0 in /opt/cuda compiles for 13.0, none of which is compiled by default: "
                "set TORCH_CUDA_ARCH_LIST": "export TORCH_CUDA_ARCH_LIST=13.0+PTX"
            },
        ),
        (
            {"extension": "cuda", "driver": Driver("", "12.9")},
            EVERYTHING,
            {"the driver serves CUDA up to 12.9, and torch's CUDA is 13.0": "sudo zypper install cuda-drivers"},
        ),
    ],
)
def test_problems_follow_from_what_is_found_and_what_a_build_would_give(
    differences: dict[str, Any], facts_now: Facts, expected: dict[str, str]
) -> None:
    found = here(**{"toolkits": (), "package_manager": "", "variables": {}, "missing": {}, **differences})
    told = {problem.what: problem.command for problem in find_problems(found, facts_now, None)}
    assert told == expected


def test_a_device_is_told_with_whether_what_was_built_has_code_for_it() -> None:
    unseen = Device("Z", "", None, visible=False)
    text = environment.render(
        here(devices=(Y, X, unseen), extension="cpu", reason="has no CUDA kernels", torch_hip="7.0")
    )
    assert "CUDA device   Y, compute capability 11.0, NOT covered by what was built\n" in text
    assert "CUDA device   X, compute capability 9.0, covered by what was built\n" in text
    assert "CUDA device   Z, compute capability unknown, not seen by torch\n" in text
    assert "extension     cpu: has no CUDA kernels\n" in text and "ROCm 7.0" in text


def test_a_name_with_a_newline_stays_in_its_line() -> None:
    text = environment.render(here(variables={"CXX": "a\nproblem       none\x1b[2J"}))
    assert "set           CXX=a\\nproblem       none\\x1b[2J\n" in text


# On the machine that runs the tests.


def test_the_environment_is_the_one_that_runs() -> None:
    found = environment.describe()
    built = BuildRecord.load(native.PACKAGE)
    assert built is not None
    assert (found.torch, found.torch_cuda) == (torch.__version__, torch.version.cuda)
    assert found.executable == sys.executable
    assert found.extension == built.kind == make_plan(gather_facts()).kind
    assert found.reason == native.reason()
    assert len([device for device in found.devices if device.visible]) == torch.cuda.device_count()
    assert found.compiler and found.compiler.family == "g++" and found.compiler.release >= 9
    assert found.compiler in found.compilers and len(COMPILERS) > len(found.compilers)
    assert found.ninja


def test_the_json_holds_every_fact_of_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {field.name for field in dataclasses.fields(Environment)}
    assert told["torch"] == torch.__version__
    assert told["built"]["python"] == python_tag()


def test_the_text_names_versions_build_devices_and_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = {line[:14].strip(): line[14:] for line in lines}
    assert torch.__version__ in told["torch"]
    assert f"for torch {torch.__version__}" in told["built"]
    assert {"overflowstat", "Python", "system", "extension", "driver", "C++ compiler", "CUDA device", "ninja"} <= set(
        told
    )
    assert "problems" in told or "problem" in told


def test_a_command_that_does_not_exist_is_refused_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["evn"])
    assert "'env', 'demo'" in capsys.readouterr().err.replace("env, demo", "'env', 'demo'")


def test_the_demo_s_exit_status_is_the_command_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from overflowstat import demo

    monkeypatch.setattr(demo, "run", lambda: 3)
    assert cli.main(["demo"]) == 3

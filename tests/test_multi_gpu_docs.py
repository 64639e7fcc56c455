"""What docs/multi-gpu.md shows is what happens, on one machine with gloo."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from documents import code
from ranks import GLOO_ENDS, free_port
from running import ENVIRONMENT, Ended, write

from overflowstat.commands.check_distributed import COMMAND

GUIDE = "docs/multi-gpu.md"
BLOCKS = code(GUIDE, "bash")
COMMANDS = [line for block in BLOCKS if "SBATCH" not in block for line in block.splitlines()]
JOB = next(block for block in BLOCKS if "SBATCH" in block)
SCRIPT = next(block for block in code(GUIDE, "python") if "import torch" in block)
SHOWN = next(block for block in code(GUIDE, "") if block.startswith("overflowstat: "))
HOST = socket.gethostname()

# What stands in the place of a machine that is not here.
HERE = {"--nproc-per-node 8": "--nproc-per-node 1", "10.0.0.1": "localhost"}


def here(command: str, port: int) -> str:
    for there, instead in {**HERE, "29500": str(port)}.items():
        command = command.replace(there, instead)
    return command


def start(folder: Path, command: str, **environment: str) -> subprocess.Popen[str]:
    """In a shell where `python` and `torchrun` are those of this environment."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, words in (("python", ""), ("torchrun", "-m torch.distributed.run ")):
        program = bin_folder / name
        if program.exists():  # and another node may be about to run it: it cannot be written then
            continue
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}"$@"\n')
        program.chmod(0o755)
    path = f"{bin_folder}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        # The port that torchrun takes where none is told, which another run may have.
        env={**os.environ, **ENVIRONMENT, "PATH": path, "PET_MASTER_PORT": str(free_port()), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> Ended:
    output, errors = process.communicate(timeout=200)
    return Ended(process.returncode, output, errors)


def ok(rank: int, local_rank: int, size: int) -> str:
    return f"[{HOST}-{local_rank}] is OK (global rank: {rank}/{size})"


def test_all_commands_are_tested() -> None:
    checks = [command for command in COMMANDS if command.endswith("check-distributed") or "--timeout" in command]
    assert len(checks) == 4 and len(COMMANDS) == 7
    assert [command for command in COMMANDS if command not in checks] == [AGREE, TRACE, COMPARE]


AGREE = "torchrun --nproc-per-node 2 -m overflowstat run --agree 60 train.py"
TRACE = "torchrun --nproc-per-node 2 -m overflowstat run --on-detect warn --trace-file run.jsonl train.py"
COMPARE = "python -m overflowstat compare run.rank0.jsonl run.rank1.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS[:2])
def test_the_check_is_passed_on_one_node(tmp_path: Path, command: str) -> None:
    found = ended(start(tmp_path, f"{command} --backend gloo" if "gloo" not in command else command))
    assert found.status == 0, found.errors
    assert {ok(0, 0, 2), ok(1, 1, 2)} < set(found.output.splitlines())


@pytest.mark.slow
def test_the_check_is_passed_on_two_nodes(tmp_path: Path) -> None:
    """Both of which are here, with a rank each."""
    port = free_port()
    nodes = [start(tmp_path, f"{here(command, port)} --backend gloo") for command in COMMANDS[2:4]]
    for number, node in enumerate(map(ended, nodes)):
        assert node.status == 0, node.errors
        assert ok(number, 0, 2) in node.output.splitlines()


def alone(command: str) -> str:
    return re.sub(r"timeout=\d+", "timeout=5", here(command, free_port()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (COMMANDS[2], "1/2 clients joined"),
        (COMMANDS[3], "trying to connect"),
        (JOB.splitlines()[-1].removeprefix("srun "), "RendezvousTimeoutError"),
    ],
    ids=["the first", "the second", "c10d"],
)
def test_a_node_that_is_alone_ends_in_the_time_that_torchrun_is_given(tmp_path: Path, command: str, said: str) -> None:
    found = ended(start(tmp_path, alone(command), SLURM_NNODES="2", SLURM_JOB_ID="17", first="localhost"))
    assert found.status == 1 and said in found.errors and found.output == ""


@pytest.mark.slow
def test_the_example_of_the_help_is_passed_on_two_nodes(tmp_path: Path) -> None:
    found = re.search(r"torchrun --nnodes 2 .*\\\n.*?check-distributed", COMMAND.examples)
    assert found is not None
    port = free_port()
    command = here(found[0].replace("HOST", "localhost"), port).replace("--nproc_per_node 8", "--nproc_per_node 1")
    nodes = [start(tmp_path, f"{command} --backend gloo") for _ in range(2)]
    both = [ended(node) for node in nodes]
    assert [each.status for each in both] == [0, 0], both
    assert {ok(0, 0, 2), ok(1, 0, 2)} < {line for each in both for line in each.output.splitlines()}


@pytest.mark.slow
def test_the_job_of_slurm_does_the_check(tmp_path: Path) -> None:
    """With programs in place of SLURM's own, on one node."""
    programs = {"scontrol": 'test "$*" = "show hostnames node[1-2]" && echo localhost', "srun": 'exec "$@"'}
    (tmp_path / "bin").mkdir()
    for name, does in programs.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
    job = here(JOB, free_port()).rstrip() + " --backend gloo"
    variables = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "1", "SLURM_JOB_ID": "17"}
    found = ended(start(tmp_path, job, **variables))
    assert found.status == 0, found.errors
    assert ok(0, 0, 1) in found.output.splitlines()


@pytest.mark.slow
def test_all_ranks_of_the_script_raise_what_is_shown(tmp_path: Path) -> None:
    write(tmp_path, "train.py", SCRIPT + GLOO_ENDS)
    found = ended(start(tmp_path, AGREE))
    assert found.status == 1
    first, second = SHOWN.replace("node-7", HOST).splitlines()
    assert found.output.splitlines().count(first) == 1  # by the rank that detects
    raised = [line.partition("NonFiniteError: ")[2] for line in found.errors.splitlines() if "NonFiniteError: " in line]
    assert raised == [first] * 2
    assert second in found.output.splitlines()


@pytest.mark.slow
def test_traces_of_two_ranks_are_compared(tmp_path: Path) -> None:
    write(tmp_path, "train.py", SCRIPT + GLOO_ENDS)
    traced = ended(start(tmp_path, TRACE))
    assert traced.status == 0, traced.errors
    compared = ended(start(tmp_path, COMPARE))
    assert compared.status == 1
    assert re.search(r"inf +\S+ +inf .*batch 2, the model itself \(Scorer\), output\n", compared.output)

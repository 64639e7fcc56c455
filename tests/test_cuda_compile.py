"""nvcc compiles the device code for every architecture that is shipped: no warning, no register spilled to memory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from overflowstat import toolkit

REDUCE = Path(__file__).parent.parent / "csrc" / "cuda" / "reduce.cu"
ARCHITECTURES = ["7.5", "8.0", "8.6", "9.0", "10.0", "12.0"]
MOST_REGISTERS = 64  # for a thread, so that four blocks of 256 fit the 65536 of a multiprocessor

CUDA, PROBLEM = toolkit.find_cuda_toolkit()

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CUDA is None, reason=f"nvcc is needed, and {PROBLEM}")]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_device_code_compiles_without_warnings_or_spills(architecture: str, tmp_path: Path) -> None:
    assert CUDA is not None
    if architecture not in CUDA.architectures:
        pytest.skip(f"nvcc {CUDA.version} does not compile for {architecture}")
    command = [
        CUDA.nvcc,
        "-std=c++17",
        "-O3",
        "-fmad=false",
        "-Xcompiler=-Wall,-Wextra",
        "-Xptxas=-v",
        "-c",
        str(REDUCE),
    ]
    command += [*toolkit.nvcc_architecture_flags((architecture,)), "-o", str(tmp_path / "reduce.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "warning" not in log.lower(), log
    for kernel in ("dense_kernel", "strided_kernel"):
        assert re.search(rf"Compiling entry function '\w*{kernel}\w*' for 'sm_{architecture.replace('.', '')}'", log), (
            log
        )
    spills = [int(size) for size in re.findall(r"(\d+) bytes spill", log)]
    assert len(spills) >= 4 and not any(spills), log
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == 2 and max(registers) <= MOST_REGISTERS, log

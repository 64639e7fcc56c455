"""nvcc compiles the device code for every architecture that is shipped: no warning, no register spilled to memory."""

from __future__ import annotations

import re

import pytest
from sass import ARCHITECTURES, build, most_registers

from overflowstat.building.cuda_toolkit import find_cuda_toolkit

CUDA, PROBLEM = find_cuda_toolkit()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.any_torch,
    pytest.mark.skipif(CUDA is None, reason=f"nvcc is needed, and {PROBLEM}"),
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_device_code_compiles_without_warnings_or_spills(architecture: str) -> None:
    assert CUDA is not None
    if architecture not in CUDA.architectures:
        pytest.skip(f"nvcc {CUDA.version} does not compile for {architecture}")
    _, log = build(architecture, CUDA)
    assert "warning" not in log.lower(), log
    for kernel in ("dense_kernel", "strided_kernel"):
        assert re.search(rf"Compiling entry function '\w*{kernel}\w*' for 'sm_{architecture.replace('.', '')}'", log), (
            log
        )
    kernels = log.count("Compiling entry function")
    spills = [int(size) for size in re.findall(r"(\d+) bytes spill", log)]
    assert len(spills) >= 2 * kernels and sum(spills) == 0, log
    registers = re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", log, re.DOTALL)
    assert len(registers) == kernels, log
    for name, count in registers:
        assert int(count) <= most_registers(name), log

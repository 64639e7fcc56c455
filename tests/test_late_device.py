"""The log of calls in C++ with numbers that are late, as those of a GPU are: its own readings, and not those of Python.

The extension is built once more, with a recorder that takes host memory for a device's (tests/late_device), and a copy
of the package that has it runs tests/late_device/scenarios.py in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from compile_once import compile_once
from device_on_cpu import compiler
from torch.utils import cpp_extension

import overflowstat

TESTS = Path(__file__).resolve().parent
CSRC = TESTS.parent / "csrc"
PACKAGE = Path(overflowstat.__file__).resolve().parent
SOURCES = [
    TESTS / "late_device" / "recorder.cpp",
    *sorted(path for path in CSRC.glob("*.cpp") if path.name != "recorder.cpp"),
    *sorted(CSRC.glob("cpu/*.cpp")),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.any_torch,
    pytest.mark.skipif(compiler() is None, reason="compiling the extension needs a C++ compiler"),
]


def extension() -> Path:
    includes = [str(CSRC), *cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = cpp_extension.library_paths()
    command = [
        *(str(compiler()), "-std=c++20", "-O0", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off"),
        *("-fvisibility=hidden", *(f"-I{path}" for path in includes), *map(str, SOURCES)),
        *(f"-L{path}" for path in libraries),
        *("-lc10", "-ltorch_cpu", "-ltorch_python"),
    ]
    headers = [*CSRC.glob("*.h"), *CSRC.glob("cpu/*.h"), CSRC / "recorder.cpp"]
    identity = [torch.__version__, sys.version, *command[:7]]
    name = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    return compile_once(command, name, [*SOURCES, *headers], identity=[command[0], *identity])


def test_the_log_in_cpp_does_with_late_numbers_what_it_has_to(tmp_path: Path) -> None:
    copy = tmp_path / "overflowstat"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("_C*", "__pycache__"))
    shutil.copy(extension(), copy)
    paths = os.pathsep.join([str(tmp_path), str(TESTS)])
    scenarios = TESTS / "late_device" / "scenarios.py"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--noconftest",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            str(scenarios),
        ],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 passed" in done.stdout

"""Importing the package needs torch alone, and is quick."""

from __future__ import annotations

import compileall
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import overflowstat

# Seconds of CPU time beyond the import of torch, and what it takes on two busy cores.
LIMITS = {
    "import overflowstat": 0.05,  # 0.011
    "import overflowstat.cli": 0.05,  # 0.02
    "from overflowstat import Monitor": 0.1,  # 0.045: all of the package but what is asked for later
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and its byte code, as an installation has it."""
    folder = tmp_path_factory.mktemp("installed")
    package = Path(overflowstat.__file__).parent
    shutil.copytree(package, folder / "overflowstat", ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(folder, quiet=1)
    return folder


def run(script: str, folder: Path) -> str:
    command = [sys.executable, "-W", "error", "-c", f"import torch\n{script}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True).stdout


def test_nothing_is_imported_but_torch_and_what_comes_with_python(compiled: Path) -> None:
    script = """
import sys
before = set(sys.modules)
import overflowstat
from overflowstat import *
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*(name for name in names - set(sys.stdlib_module_names) if not name.startswith("_sysconfigdata")))
"""
    assert run(script, compiled).split() == ["overflowstat"]


def test_a_torch_that_has_no_distributed_will_do(compiled: Path) -> None:
    """Made by taking out of it what such a build lacks."""
    script = """
import torch.distributed as dist
from torch import nn
dist.is_available = lambda: False
for name in ("ProcessGroup", "Store", "PrefixStore", "TCPStore", "is_initialized", "get_rank", "get_world_size"):
    delattr(dist, name)
from overflowstat import *
monitor = Monitor(model := nn.Linear(2, 2), recorder="torch", agree=True, sinks=[Printer()])
model(torch.ones(1, 2))
print(len(monitor.merge()))
try:
    model(torch.full((1, 2), float("inf")))
except NonFiniteError as error:
    print(error.process.rank, error.process.world_size)
"""
    printed = run(script, compiled).splitlines()
    assert (printed[0], printed[-1]) == ("1", "0 1")


@pytest.mark.slow
@pytest.mark.parametrize("what", LIMITS)
def test_the_import_is_quick(compiled: Path, what: str) -> None:
    # A collection of all that torch has made takes 70 ms, and falls on whatever import is the next when it is due.
    script = f"import gc, time\ngc.disable()\nstart = time.process_time()\n{what}\nprint(time.process_time() - start)"
    assert min(float(run(script, compiled)) for _ in range(5)) < LIMITS[what]


def test_every_public_name_is_there_and_told() -> None:
    for name in overflowstat.__all__:
        assert getattr(overflowstat, name) is not None
    assert set(overflowstat.__all__) == set(overflowstat._HOME) <= set(dir(overflowstat))
    with pytest.raises(AttributeError, match="has no attribute 'Monitr'"):
        overflowstat.Monitr  # type: ignore[attr-defined]  # noqa: B018

"""CUDA toolkits, compilers and machines made of scripts and small files: to be found and asked, not to compile."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Machine", "compiler", "cuda_home", "executable"]

ROOT = Path(__file__).resolve().parents[1]


def executable(path: Path, *lines: str) -> Path:
    """A shell script of these lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def cuda_home(
    home: Path,
    version: str = "12.4",
    architectures: str = "compute_90 compute_80 compute_100",
    newest_gcc: int | None = None,
    newest_clang: int | None = None,
) -> Path:
    """A folder that looks like a CUDA toolkit from outside; its nvcc only tells what it is."""
    for file in (home / "include" / "cuda_runtime_api.h", home / "lib64" / "libcudart_static.a"):
        file.parent.mkdir(parents=True)
        file.touch()
    told = f'case "$1" in --version) echo "Cuda compilation tools, release {version}, V{version}.1";;'
    executable(home / "bin" / "nvcc", told, f"--list-gpu-arch) printf '%s\\n' {architectures};; *) exit 1;; esac")
    bounds = f"#if __GNUC__ > {newest_gcc}\n" if newest_gcc else ""
    if newest_clang:
        bounds += f"#if (__clang_major__ >= {newest_clang + 1}) || (__clang_major__ < 3)\n"
    if bounds:
        (home / "include" / "crt").mkdir()
        (home / "include" / "crt" / "host_config.h").write_text(bounds)
    return home


def compiler(path: Path, release: int) -> Path:
    """That says it is g++ or clang++, by its name."""
    if path.name.startswith("clang"):
        return executable(path, f"echo 'Ubuntu clang version {release}.0.7 (1ubuntu1)'")
    says = f"g++ (Debian 11.9.0-1) {release}.1.0"
    return executable(path, f"echo '{says}'", "echo 'Copyright (C) 2026 Free Software Foundation, Inc.'")


TORCH = """
import types
if {import_error!r}:
    raise OSError({import_error!r})
__version__ = {version!r}
version = types.SimpleNamespace(cuda={cuda!r}, hip=None)
def _get(index, what):
    if {problem!r}:
        raise RuntimeError({problem!r})
    return {devices!r}[index][what]
cuda = types.SimpleNamespace(
    device_count=lambda: len({devices!r}),
    get_device_name=lambda index: _get(index, 0),
    get_device_capability=lambda index: tuple(map(int, _get(index, 1).split("."))),
)
"""
ASK = """
import sys
if {torch!r} is None:
    sys.modules["torch"] = None
from pathlib import Path
from overflowstat import cli
from overflowstat.building import cuda_toolkit, processes
from overflowstat.environment import gpus, toolkits
root = Path({root!r})
cuda_toolkit.USUAL_HOME = root / "usr/local/cuda"
toolkits.USUAL_HOMES = (str(root / "usr/local/cuda"), str(root / "usr/local/cuda-*"))
gpus.VERSION_FILE, gpus.LIBRARY = root / "driver", "libnone.so.1"
if {driver_cuda!r}:
    gpus._newest_cuda = lambda: {driver_cuda!r}
processes.SECONDS = {seconds!r}
sys.exit(cli.main(["env", *{arguments!r}]))
"""


@dataclass
class Machine:
    """Of which only the Python is real. Nothing of the machine that runs the tests is on its PATH."""

    root: Path
    torch: str | None = "2.14.1+cu130"
    cuda: str | None = "13.0"
    devices: tuple[tuple[str, str], ...] = ()
    """Names and compute capabilities that torch tells."""
    problem: str = ""
    """That torch has with them."""
    import_error: str = ""
    """That it has with itself."""
    driver_cuda: str = ""
    seconds: float = 20.0
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        compiler(self.bin / "g++", 12)
        executable(self.bin / "ninja", "echo 1.13.0")
        executable(self.bin / "apt-get", "exit 1")
        (self.root / "home").mkdir()

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    def toolkit(self, version: str, **told: Any) -> Path:
        """One more in the usual folder."""
        return cuda_home(self.root / "usr" / "local" / f"cuda-{version}", version, **told)

    def nvidia_smi(self, name: str, capability: str, driver: str) -> None:
        executable(self.bin / "nvidia-smi", f"echo '{name}, {capability}, {driver}'")

    def ask(self, *arguments: str, after: str = "") -> str:
        """What `python -m overflowstat env` prints.

        Args:
            after: a command of a shell, as one that mends a problem, that comes before it.
        """
        packages = self.root / "packages"
        (packages / "torch").mkdir(parents=True, exist_ok=True)
        told = {"version": self.torch, "cuda": self.cuda, "devices": self.devices, "problem": self.problem}
        told["import_error"] = self.import_error
        (packages / "torch" / "__init__.py").write_text(TORCH.format(**told))
        (packages / "torch" / "version.py").write_text(
            f"__version__, cuda, hip = {self.torch!r}, {self.cuda!r}, None\n"
        )
        said = {"torch": self.torch, "driver_cuda": self.driver_cuda, "seconds": self.seconds, "arguments": arguments}
        program = self.root / "ask.py"
        program.write_text(ASK.format(root=str(self.root), **said))
        environ = {"PATH": str(self.bin), "HOME": str(self.root / "home"), **self.variables}
        environ["PYTHONPATH"] = os.pathsep.join([str(packages), str(ROOT)])
        tools = "/usr/bin:/bin"  # of the shell
        for_tools = f'tr() {{ PATH={tools} command tr "$@"; }}; grep() {{ PATH={tools} command grep "$@"; }}; '
        for_tools += f'paste() {{ PATH={tools} command paste "$@"; }}; '
        line = f"{for_tools}{after or ':'}; exec '{sys.executable}' -W ignore '{program}'"
        ended = subprocess.run(
            ["/bin/bash", "-c", line], env=environ, cwd=self.root, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def told(self, after: str = "") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask("--json", after=after))
        return found

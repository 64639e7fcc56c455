"""A CUDA toolkit made of a script and empty files: enough to be found and asked, not to compile."""

from __future__ import annotations

import stat
from pathlib import Path


def executable(path: Path, *lines: str) -> Path:
    """A shell script of these lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def cuda_home(home: Path, version: str = "12.4", architectures: str = "compute_90 compute_80 compute_100") -> Path:
    """A folder that looks like a CUDA toolkit from outside; its nvcc only tells what it is."""
    for file in (home / "include" / "cuda_runtime_api.h", home / "lib64" / "libcudart_static.a"):
        file.parent.mkdir(parents=True)
        file.touch()
    told = f'case "$1" in --version) echo "Cuda compilation tools, release {version}, V{version}.1";;'
    executable(home / "bin" / "nvcc", told, f"--list-gpu-arch) printf '%s\\n' {architectures};; *) exit 1;; esac")
    return home

"""What else of a machine decides what can be built and what runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from ..building.compiler import Compiler, inspect_compiler
from ..building.processes import output_of

__all__ = ["find_compilers", "find_ninja", "find_package_manager", "find_packages", "missing_folders", "set_variables"]

PACKAGES = ("accelerate", "deepspeed", "lightning", "numpy", "pytorch-lightning", "transformers", "triton")
COMPILERS = ("c++", "g++", "clang++", *(f"{family}-{n}" for family in ("g++", "clang++") for n in range(30, 6, -1)))
VARIABLES = (
    "CC",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "LD_LIBRARY_PATH",
    "NVCC_APPEND_FLAGS",
    "NVCC_PREPEND_FLAGS",
    "OVERFLOWSTAT_EXT",
    "OVERFLOWSTAT_OPTIONS",
    "TORCH_CUDA_ARCH_LIST",
)
PACKAGE_MANAGERS = ("apt-get", "dnf", "conda")


def find_packages() -> dict[str, str]:
    """Versions of those that a report of a bug should name, of what is installed of them. Imports none."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def find_compilers(environ: Mapping[str, str], used: Compiler | None) -> tuple[Compiler, ...]:
    """The one that is used, then all on PATH with a usual name; each once, whatever links to it."""
    found = {os.path.realpath(used.path): used} if used else {}
    for name in COMPILERS:
        path = shutil.which(name, path=environ.get("PATH"))
        if path is not None and os.path.realpath(path) not in found:
            found[os.path.realpath(path)] = inspect_compiler(path)
    return tuple(found.values())


def find_ninja(environ: Mapping[str, str]) -> str | None:
    """Its version, where torch finds it: on PATH."""
    path = shutil.which("ninja", path=environ.get("PATH"))
    try:
        return output_of(path, "--version").strip() if path else None
    except (OSError, subprocess.SubprocessError):
        return None


def find_package_manager(environ: Mapping[str, str]) -> str:
    """Empty where there is none that is known here."""
    return next((name for name in PACKAGE_MANAGERS if shutil.which(name, path=environ.get("PATH"))), "")


def set_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in VARIABLES if name in environ}


def missing_folders(environ: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Entries of PATH and LD_LIBRARY_PATH that are no folders."""
    found = {}
    for name in ("PATH", "LD_LIBRARY_PATH"):
        folders = dict.fromkeys(filter(None, environ.get(name, "").split(os.pathsep)))
        if missing := tuple(folder for folder in folders if not Path(folder).is_dir()):
            found[name] = missing
    return found

"""The CUDA toolkit that an extension is built with."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .processes import output_of

__all__ = ["USUAL_HOME", "CudaToolkit", "find_cuda_toolkit", "include_folder", "inspect_cuda_toolkit", "missing_part"]

USUAL_HOME = Path("/usr/local/cuda")


@dataclass(frozen=True)
class CudaToolkit:
    """A folder with nvcc, the runtime's headers and its static library.

    `architectures` are the compute capabilities that this nvcc compiles for, ascending ("7.5", ..., "12.1").
    `newest_gcc` and `newest_clang` are the major versions of host compilers beyond which it compiles nothing, None
    where its headers have no such bound.
    """

    home: str
    nvcc: str
    include: str
    library: str
    version: str
    architectures: tuple[str, ...]
    newest_gcc: int | None = None
    newest_clang: int | None = None

    def newest_compiler(self, family: str) -> int | None:
        """The bound for a `Compiler.family`."""
        return {"g++": self.newest_gcc, "clang++": self.newest_clang}.get(family)


def find_cuda_toolkit(environ: Mapping[str, str] = os.environ) -> tuple[CudaToolkit | None, str]:
    """(the CUDA toolkit or None, why it is None).

    CUDA_HOME or CUDA_PATH decides where it is set. Else a toolkit is a folder that has the headers, not just the one
    above nvcc, which may be a script that calls the real one.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if named := environ.get(name):
            found = inspect_cuda_toolkit(Path(named))
            return (found, "") if isinstance(found, CudaToolkit) else (None, f"{name}={named} {found}")
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    homes = [Path(nvcc).resolve().parents[1], Path(nvcc).parents[1]] if nvcc else []
    lacks = ""
    for home in dict.fromkeys([*homes, USUAL_HOME]):
        found = inspect_cuda_toolkit(home)
        if isinstance(found, CudaToolkit):
            return found, ""
        if (home / "bin" / "nvcc").exists():
            lacks = lacks or f"the CUDA toolkit in {home} {found}"
    return None, lacks or "no CUDA toolkit was found"


@functools.cache
def inspect_cuda_toolkit(home: Path) -> CudaToolkit | str:
    """The toolkit in a folder, or what that folder lacks, as the end of a sentence about it."""
    include, library, nvcc = include_folder(home), _library_folder(home), home / "bin" / "nvcc"
    if include is None or library is None or missing_part(home):
        return f"has no {missing_part(home)}"
    try:
        version = re.search(r"release (\d+\.\d+)", output_of(nvcc, "--version"))
        numbers = re.findall(r"compute_(\d+)\b", output_of(nvcc, "--list-gpu-arch"))
    except (OSError, subprocess.SubprocessError) as error:
        return f"has an nvcc that does not run ({error})"
    if version is None:
        return "has an nvcc that does not tell its version"
    capabilities = sorted({(int(number[:-1]), int(number[-1])) for number in numbers})
    architectures = tuple(f"{major}.{minor}" for major, minor in capabilities)
    return CudaToolkit(
        str(home), str(nvcc), str(include), str(library), version[1], architectures, *_newest_compilers(include)
    )


def missing_part(home: Path) -> str:
    """What a folder lacks of a toolkit that can be built with, by its files alone; empty where nothing is lacking."""
    if include_folder(home) is None:
        return "include/cuda_runtime_api.h"
    if _library_folder(home) is None:
        return "libcudart_static.a"
    return "" if os.access(home / "bin" / "nvcc", os.X_OK) else "bin/nvcc"


def include_folder(home: Path) -> Path | None:
    """The folder with the runtime's headers."""
    return _first_with("cuda_runtime_api.h", home / "include", _target(home) / "include")


def _library_folder(home: Path) -> Path | None:
    multiarch = home / "lib" / f"{platform.machine()}-linux-gnu"
    return _first_with("libcudart_static.a", home / "lib64", home / "lib", _target(home) / "lib", multiarch)


def _target(home: Path) -> Path:
    return home / "targets" / f"{platform.machine()}-linux"


def _newest_compilers(include: Path) -> tuple[int | None, int | None]:
    """The bounds that nvcc's crt/host_config.h has for gcc and clang, beyond which it stops with an #error."""
    try:
        text = (include / "crt" / "host_config.h").read_text("utf-8", errors="replace")
    except OSError:
        return None, None
    gcc = re.search(r"#if __GNUC__ > (\d+)", text)
    clang = re.search(r"\(__clang_major__ (>=?) (\d+)\)", text)
    return int(gcc[1]) if gcc else None, int(clang[2]) - (clang[1] == ">=") if clang else None


def _first_with(name: str, *folders: Path) -> Path | None:
    return next((folder for folder in folders if (folder / name).is_file()), None)

"""All CUDA toolkits that are here.

A version is read from a toolkit's files. Only an nvcc that has none beside it, as a script that calls another, is run,
for a limited time.
"""

from __future__ import annotations

import glob
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..building.cuda_toolkit import CudaToolkit, include_folder, missing_part
from ..building.processes import output_of
from .facts import FoundToolkit

__all__ = ["USUAL_HOMES", "find_toolkits", "version_in_files"]

USUAL_HOMES = ("/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda", "/opt/cuda-*", "/usr/lib/cuda")


def find_toolkits(environ: Mapping[str, str], used: CudaToolkit | None) -> tuple[FoundToolkit, ...]:
    """Those that variables name, in their order, then those in the usual folders; each once, whatever links to it."""
    named_by: dict[Path, list[str]] = {}
    for home, name in _candidates(environ):
        real = home.resolve()
        if not (real / "bin" / "nvcc").exists() and not version_in_files(real):
            continue
        names = named_by.setdefault(real, [])
        if name and name not in names:
            names.append(name)
    used_home = Path(used.home).resolve() if used else None
    libraries = list(dict.fromkeys(filter(None, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))))
    return tuple(
        FoundToolkit(
            home=str(home),
            version=version_in_files(home) or _version_told(home),
            named_by=tuple(names),
            libraries=tuple(folder for folder in libraries if Path(folder).resolve().is_relative_to(home)),
            missing=missing_part(home),
            is_used=home == used_home,
        )
        for home, names in named_by.items()
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(name):
            yield Path(environ[name]), name
    for folder in environ.get("PATH", "").split(os.pathsep):
        nvcc = Path(folder) / "nvcc"
        if folder and nvcc.is_file():
            yield nvcc.resolve().parents[1], "PATH"
    for pattern in USUAL_HOMES:
        yield from ((Path(home), "") for home in sorted(glob.glob(pattern)))


def version_in_files(home: Path) -> str:
    """The release ("13.0") that version.json, version.txt or the runtime's header tells, or nothing."""
    try:
        told = json.loads((home / "version.json").read_text("utf-8", errors="replace"))
        text = str((told.get("cuda_nvcc") or told["cuda"])["version"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        text = ""
    for each in (text, _read(home / "version.txt").removeprefix("CUDA Version ")):
        if found := re.match(r"\d+\.\d+", each):
            return found[0]
    include = include_folder(home)
    header = _read(include / "cuda_runtime_api.h") if include else ""
    if number := re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", header, re.MULTILINE):  # 13000 is 13.0
        return f"{int(number[1]) // 1000}.{int(number[1]) % 1000 // 10}"
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _version_told(home: Path) -> str:
    try:
        found = re.search(r"release (\d+\.\d+)", output_of(home / "bin" / "nvcc", "--version"))
    except (OSError, subprocess.SubprocessError):
        return ""
    return found[1] if found else ""

"""The C++ compiler."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .processes import output_of

__all__ = ["ALLOW_ANY", "Compiler", "find_compiler", "inspect_compiler"]

LAUNCHERS = {"ccache", "sccache", "distcc", "icecc"}
ALLOW_ANY = "-allow-unsupported-compiler"
"""With which nvcc does not look at its host compiler's version; from NVCC_PREPEND_FLAGS or NVCC_APPEND_FLAGS."""


@dataclass(frozen=True)
class Compiler:
    """`family` is g++, clang++ or empty, `release` a major version or 0, `version` the first line it says of itself."""

    path: str
    family: str = ""
    release: int = 0
    version: str = ""


def find_compiler(environ: Mapping[str, str] = os.environ) -> tuple[Compiler | None, str]:
    """(the C++ compiler or None, why it is None).

    CXX decides where it is set; a launcher such as ccache is looked through.
    """
    named = environ.get("CXX")
    search = environ.get("PATH")
    for command in [named] if named else [sysconfig.get_config_var("CXX"), "c++", "g++", "clang++"]:
        words = [word for word in _words(command or "") if Path(word).name not in LAUNCHERS]
        if words and (path := shutil.which(words[0], path=search)):
            return inspect_compiler(path), ""
    return None, f"CXX={named} is not there" if named else "there is no C++ compiler"


def _words(command: str) -> list[str]:
    """As a shell has them; none where it would find a quotation without an end."""
    try:
        return shlex.split(command)
    except ValueError:
        return []


def inspect_compiler(path: str) -> Compiler:
    """Asks it for its version, and takes it as it is where it has none to tell."""
    try:
        lines = output_of(path, "--version").splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return Compiler(path, version=f"does not run ({error})")
    first = next(iter(lines), "")
    # "g++ (Debian 12.2.0-14) 12.2.0", "Ubuntu clang version 15.0.7": that of a distribution comes in brackets.
    number = re.search(r"\b(\d+)\.\d+", re.sub(r"\(.*?\)", "", first))
    is_gcc = any("Free Software Foundation" in line for line in lines)
    family = "clang++" if "clang" in first else "g++" if is_gcc else ""
    return Compiler(path, family, int(number[1]) if number else 0, first)

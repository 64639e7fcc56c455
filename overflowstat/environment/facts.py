"""What is known of an environment."""

from __future__ import annotations

from dataclasses import dataclass

from ..building.compiler import Compiler
from ..building.cuda_toolkit import CudaToolkit
from ..building.record import BuildRecord

__all__ = ["Device", "Driver", "Environment", "FoundToolkit", "Problem"]


@dataclass(frozen=True)
class Device:
    """A GPU of NVIDIA's.

    `covered` says whether the extension has code for it, None where it has no CUDA code; `visible` whether torch sees
    it. `capability` is empty where an old driver does not tell it.
    """

    name: str
    capability: str
    covered: bool | None
    visible: bool = True


@dataclass(frozen=True)
class Driver:
    """`cuda` is the newest that it serves; either is empty where it cannot be told."""

    version: str
    cuda: str


@dataclass(frozen=True)
class FoundToolkit:
    """A CUDA toolkit that is here, used or not.

    `home` has no links in it, `named_by` is what leads to it (CUDA_HOME, PATH, or nothing where it lies in a usual
    folder), `version` its release ("13.0") or empty, `libraries` what of it LD_LIBRARY_PATH names, `missing` what it
    lacks to build with, as a script that calls the nvcc of another does.
    """

    home: str
    version: str
    named_by: tuple[str, ...]
    libraries: tuple[str, ...]
    missing: str
    is_used: bool


@dataclass(frozen=True)
class Problem:
    what: str
    command: str
    """That mends it, in a shell."""


@dataclass(frozen=True)
class Environment:
    """`extension` is what can be used now (cuda, cpu or none), `built` what the build left, if there was one.

    `reason` is empty when nothing of the extension is lacking. Of what a build would use there is `toolkit` and
    `compiler`, with a sentence where it is None; `toolkits` and `compilers` are all that were found.
    """

    overflowstat: str
    python: str
    executable: str
    system: str
    host: str
    torch: str | None
    torch_cuda: str | None
    torch_hip: str | None
    packages: dict[str, str]
    driver: Driver | None
    devices: tuple[Device, ...]
    devices_problem: str
    extension: str
    reason: str
    built: BuildRecord | None
    toolkit: CudaToolkit | None
    toolkit_problem: str
    toolkits: tuple[FoundToolkit, ...]
    compiler: Compiler | None
    compiler_problem: str
    compilers: tuple[Compiler, ...]
    ninja: str | None
    package_manager: str
    variables: dict[str, str]
    """Those set that decide what is built and what is seen."""
    missing: dict[str, tuple[str, ...]]
    """Folders that PATH and LD_LIBRARY_PATH name, and that are not there."""
    problems: tuple[Problem, ...] = ()

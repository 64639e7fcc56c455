"""How much is built from what is there, and why not more."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .architectures import choose_architectures
from .compiler import ALLOW_ANY, Compiler, find_compiler
from .cuda_toolkit import CudaToolkit, find_cuda_toolkit
from .errors import BuildError
from .installed_torch import MINIMUM_TORCH, Torch, find_torch
from .versions import major, release

__all__ = ["KINDS", "Facts", "Plan", "gather_facts", "make_plan"]

KINDS = ("cuda", "cpu", "none")


@dataclass(frozen=True)
class Facts:
    """All that a plan depends on. A `*_problem` says in half a sentence why its neighbour is None."""

    torch: Torch | None
    compiler: Compiler | None
    compiler_problem: str
    toolkit: CudaToolkit | None
    toolkit_problem: str
    python_header: str | None
    platform: str
    wanted: str
    arch_list: str
    any_compiler: bool = False
    """Whether nvcc is told to take any, however new."""


@dataclass(frozen=True)
class Plan:
    """What to build.

    `reason` says why it is not more than `kind` (empty for cuda), `remedy` what has to be done first to get more, if
    anything can be done. `architectures` are in the notation of TORCH_CUDA_ARCH_LIST.
    """

    kind: str
    reason: str = ""
    remedy: str = ""
    architectures: tuple[str, ...] = ()


def make_plan(facts: Facts) -> Plan:
    """As much as these facts allow, or exactly what OVERFLOWSTAT_EXT wants.

    Raises BuildError when OVERFLOWSTAT_EXT is none of its values or wants what is not possible, and when
    TORCH_CUDA_ARCH_LIST holds something that this nvcc cannot compile for: whoever names an architecture is not served
    by a build without it.
    """
    if facts.wanted not in ("auto", *KINDS):
        raise BuildError(f"OVERFLOWSTAT_EXT={facts.wanted} is none of auto, cuda, cpu, none")
    if facts.wanted == "none":
        return Plan("none", "it was built with OVERFLOWSTAT_EXT=none", "unset OVERFLOWSTAT_EXT")

    if lack := _lacking_for_cpu(facts):
        return _fall_back_to("none", lack, facts.wanted)
    if facts.wanted == "cpu":
        return Plan("cpu", "it was built with OVERFLOWSTAT_EXT=cpu", "unset OVERFLOWSTAT_EXT")
    if lack := _lacking_for_cuda(facts):
        return _fall_back_to("cpu", lack, facts.wanted)
    assert facts.toolkit is not None
    return Plan("cuda", architectures=choose_architectures(facts.arch_list, facts.toolkit))


def _fall_back_to(kind: str, lack: tuple[str, str], wanted: str) -> Plan:
    reason, remedy = lack
    if wanted != "auto":
        raise BuildError(f"OVERFLOWSTAT_EXT={wanted} is not possible: {reason}" + (f"; {remedy}" if remedy else ""))
    return Plan(kind, reason, remedy)


def _lacking_for_cpu(facts: Facts) -> tuple[str, str] | None:
    if facts.torch is None:
        return "torch was not installed when it was built", f"install torch {MINIMUM_TORCH} or newer"
    if release(facts.torch.version) < release(MINIMUM_TORCH):
        return f"torch {facts.torch.version} is older than {MINIMUM_TORCH}", f"install torch {MINIMUM_TORCH} or newer"
    if not facts.platform.startswith("linux"):
        return f"the extension is built on Linux only, not on {facts.platform}", "use Linux"
    if facts.compiler is None:
        return facts.compiler_problem, "install g++ or set CXX"
    if facts.python_header is None:
        return "Python's C headers (Python.h) are not installed", "install them (python3-dev on Debian and Ubuntu)"
    return None


def _lacking_for_cuda(facts: Facts) -> tuple[str, str] | None:
    assert facts.torch is not None
    if facts.torch.hip is not None:
        return f"torch {facts.torch.version} is built for ROCm, which has no kernels here", ""
    if facts.torch.cuda is None:
        return f"torch {facts.torch.version} is built without CUDA", ""
    remedy = f"install the CUDA toolkit {major(facts.torch.cuda)}.x or set CUDA_HOME to one"
    if facts.toolkit is None:
        return facts.toolkit_problem, remedy
    cuda = facts.toolkit
    if major(cuda.version) != major(facts.torch.cuda):
        return f"the CUDA toolkit in {cuda.home} is {cuda.version} and torch's CUDA is {facts.torch.cuda}", remedy
    if facts.compiler and not facts.any_compiler and (newest := cuda.newest_compiler(facts.compiler.family)):
        found = facts.compiler
        if found.release > newest:
            return (
                f"{found.path} is {found.family} {found.release}, and nvcc {cuda.version} in {cuda.home} takes none "
                f"newer than {newest}",
                f"set CXX to {found.family} {newest} or older",
            )
    return None


def gather_facts(environ: Mapping[str, str] = os.environ) -> Facts:
    """Look at this machine; imports nothing, needs no GPU, runs the compiler once and nvcc twice if they are there."""
    compiler, compiler_problem = find_compiler(environ)
    cuda, cuda_problem = find_cuda_toolkit(environ)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return Facts(
        torch=find_torch(),
        compiler=compiler,
        compiler_problem=compiler_problem,
        toolkit=cuda,
        toolkit_problem=cuda_problem,
        python_header=str(header) if header.is_file() else None,
        platform=sys.platform,
        wanted=environ.get("OVERFLOWSTAT_EXT") or "auto",
        arch_list=environ.get("TORCH_CUDA_ARCH_LIST", ""),
        any_compiler=any(ALLOW_ANY in environ.get(f"NVCC_{when}_FLAGS", "") for when in ("PREPEND", "APPEND")),
    )

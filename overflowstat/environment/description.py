"""Looking at all of it."""

from __future__ import annotations

import dataclasses
import importlib
import os
import platform
import socket
import sys
from collections.abc import Mapping
from importlib import metadata

from .. import native
from ..building.plan import gather_facts
from ..building.record import BuildRecord
from .facts import Environment
from .gpus import find_gpus
from .machine import (
    find_compilers,
    find_ninja,
    find_package_manager,
    find_packages,
    missing_folders,
    set_variables,
)
from .privacy import without_domain
from .problems import find_problems
from .toolkits import find_toolkits

__all__ = ["describe", "version"]


def describe(environ: Mapping[str, str] = os.environ) -> Environment:
    """Look at everything: asks torch for its devices, and runs compilers, nvcc and ninja for their versions, each for a
    limited time.
    """
    status = native.status()
    built = BuildRecord.load(native.PACKAGE)
    extension = built.kind if built and status.module else "none"
    facts = gather_facts(environ)
    lack_of_torch = native.torch_lack()
    torch = None if lack_of_torch else importlib.import_module("torch")
    driver, devices, devices_problem = find_gpus(
        environ, torch, built.arch_list if built and extension == "cuda" else ()
    )
    found = Environment(
        overflowstat=version(),
        python=platform.python_version(),
        executable=sys.executable,
        system=" ".join(filter(None, [platform.system(), platform.machine(), *platform.libc_ver()])),
        host=without_domain(socket.gethostname()),
        torch=torch.__version__ if torch else None,
        torch_cuda=torch.version.cuda if torch else None,
        torch_hip=torch.version.hip if torch else None,
        packages=find_packages(),
        driver=driver,
        devices=devices,
        devices_problem=devices_problem,
        extension=extension,
        reason=status.reason,
        built=built,
        toolkit=facts.toolkit,
        toolkit_problem=facts.toolkit_problem,
        toolkits=find_toolkits(environ, facts.toolkit),
        compiler=facts.compiler,
        compiler_problem=facts.compiler_problem,
        compilers=find_compilers(environ, facts.compiler),
        ninja=find_ninja(environ),
        package_manager=find_package_manager(environ),
        variables=set_variables(environ),
        missing=missing_folders(environ),
    )
    return dataclasses.replace(found, problems=find_problems(found, facts, lack_of_torch))


def version() -> str:
    """The installed version, or "not installed" in a source folder that never was."""
    try:
        return metadata.version("overflowstat")
    except metadata.PackageNotFoundError:
        return "not installed"

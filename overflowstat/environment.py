"""What is built, what it was built for, what is here to build with, and what would have to be done to get more."""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

from overflowstat import native, toolkit
from overflowstat.toolkit import BuildRecord, CudaToolkit


@dataclass(frozen=True)
class Device:
    """A visible CUDA device; `covered` says whether the extension has code for it (None where it has no CUDA code)."""

    name: str
    capability: str
    covered: bool | None


@dataclass(frozen=True)
class Environment:
    """`extension` is what can be used now (cuda, cpu or none), `built` what the build left, if there was one.

    `reason` is empty when nothing is lacking; `next_step` is one sentence in any case.
    """

    overflowstat: str
    python: str
    executable: str
    system: str
    torch: str | None
    torch_cuda: str | None
    torch_hip: str | None
    extension: str
    reason: str
    built: BuildRecord | None
    toolkit: CudaToolkit | None
    toolkit_problem: str
    compiler: str | None
    compiler_version: str
    devices: tuple[Device, ...]
    next_step: str


def describe() -> Environment:
    """Look at everything: asks torch for its devices, and runs the C++ compiler and nvcc for their versions."""
    status = native.status()
    built = BuildRecord.load(native.PACKAGE)
    extension = built.kind if built and status.module else "none"
    facts = toolkit.gather_facts()
    torch = None if native.torch_problem() else importlib.import_module("torch")
    devices = tuple(_devices(built.arch_list if built and extension == "cuda" else ())) if torch else ()
    return Environment(
        overflowstat=version(),
        python=platform.python_version(),
        executable=sys.executable,
        system=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__ if torch else None,
        torch_cuda=torch.version.cuda if torch else None,
        torch_hip=torch.version.hip if torch else None,
        extension=extension,
        reason=status.reason,
        built=built,
        toolkit=facts.toolkit,
        toolkit_problem=facts.toolkit_problem,
        compiler=facts.compiler,
        compiler_version=_first_line(facts.compiler) if facts.compiler else facts.compiler_problem,
        devices=devices,
        next_step=_next_step(status, extension, devices, facts),
    )


def version() -> str:
    """The installed version, or "not installed" in a source folder that never was."""
    try:
        return metadata.version("overflowstat")
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices(arch_list: tuple[str, ...]) -> list[Device]:
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.version.cuda else 0):
        capability = torch.cuda.get_device_capability(index)
        covered = toolkit.covers(arch_list, capability) if arch_list else None
        found.append(Device(torch.cuda.get_device_name(index), "{}.{}".format(*capability), covered))
    return found


def _first_line(compiler: str) -> str:
    try:
        shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not run ({error})"
    return shown.partition("\n")[0]


def _next_step(status: native.Status, extension: str, devices: tuple[Device, ...], facts: toolkit.Facts) -> str:
    again = native.mend_command()
    if uncovered := sorted({device.capability for device in devices if device.covered is False}):
        wanted = ";".join(uncovered)
        return f"a device is not covered by what was built: TORCH_CUDA_ARCH_LIST='{wanted}' {again}"
    if not status.reason:
        return "nothing to do"
    if problem := native.torch_problem():
        return f"overflowstat {problem}"
    try:
        plan = toolkit.make_plan(facts)
    except toolkit.BuildError as error:
        return f"a build would fail now: {error}"
    if toolkit.KINDS.index(plan.kind) < toolkit.KINDS.index(extension):
        return f"a build would give {plan.kind} now: {again}"
    if plan.remedy:
        return f"{plan.reason}: {plan.remedy}, then {again}"
    return f"nothing to do: {plan.reason}"


def render(found: Environment) -> str:
    """The text of `python -m overflowstat env`."""
    gpus = {"CUDA": found.torch_cuda, "ROCm": found.torch_hip}
    gpu = " ".join(f"{name} {version}" for name, version in gpus.items() if version)
    cuda = found.toolkit
    lines = [
        ("overflowstat", f"{found.overflowstat}, in {native.PACKAGE}"),
        ("Python", f"{found.python}, {found.executable}"),
        ("system", found.system),
        ("torch", f"{found.torch}, {gpu or 'built without CUDA'}" if found.torch else "none that could be used"),
        ("extension", found.extension + (f": {found.reason}" if found.reason else "")),
        ("built", _built(found.built)),
        ("CUDA toolkit", f"{cuda.version} in {cuda.home}" if cuda else found.toolkit_problem),
        ("C++ compiler", ", ".join(filter(None, [found.compiler, found.compiler_version]))),
        *[("CUDA device", _device(device)) for device in found.devices or [None]],
        ("next", found.next_step),
    ]
    return "\n".join(f"{name:<14}{text}" for name, text in lines)


def _built(record: BuildRecord | None) -> str:
    if record is None:
        return "never"
    if record.kind == "none":
        return f"none: {record.reason}"
    text = f"{record.kind}, for torch {record.torch} and {record.python}"
    if record.kind == "cuda":
        return f"{text}, by CUDA toolkit {record.toolkit}, for {';'.join(record.arch_list)}"
    return f"{text}: {record.reason}"


def _device(device: Device | None) -> str:
    if device is None:
        return "none is visible"
    covered = {True: ", covered by what was built", False: ", NOT covered by what was built", None: ""}[device.covered]
    return f"{device.name}, compute capability {device.capability}{covered}"

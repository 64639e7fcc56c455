"""The text of `python -m overflowstat env`."""

from __future__ import annotations

from collections.abc import Iterator

from .. import native
from ..building.record import BuildRecord
from ..terminal import on_one_line
from .facts import Device, Environment

__all__ = ["render"]

WIDTH = 14


def render(found: Environment) -> str:
    """A line for each fact, problems and what mends them last."""
    return "\n".join(f"{name:<{WIDTH}}{on_one_line(text)}" for name, text in _lines(found))


def _lines(found: Environment) -> Iterator[tuple[str, str]]:
    gpus = {"CUDA": found.torch_cuda, "ROCm": found.torch_hip}
    gpu = " ".join(f"{name} {version}" for name, version in gpus.items() if version)
    yield "overflowstat", f"{found.overflowstat}, in {native.PACKAGE}"
    yield "Python", f"{found.python}, {found.executable}"
    yield "system", f"{found.system}, host {found.host}"
    yield "torch", f"{found.torch}, {gpu or 'built without CUDA'}" if found.torch else "none that could be used"
    yield "packages", ", ".join(f"{name} {version}" for name, version in found.packages.items()) or "none of interest"
    yield "driver", _driver(found)
    for device in found.devices or [None]:
        yield "CUDA device", _device(device) if device else "none is visible"
    yield "extension", found.extension + (f": {found.reason}" if found.reason else "")
    yield "built", _built(found.built)
    for toolkit in found.toolkits:
        named = f", by {' and '.join(toolkit.named_by)}" if toolkit.named_by else ""
        used = "; a build would use it" if toolkit.is_used else f"; has no {toolkit.missing}" * bool(toolkit.missing)
        yield "CUDA toolkit", f"{toolkit.version or 'of unknown version'} in {toolkit.home}{named}{used}"
    if found.toolkit is None:
        yield "CUDA toolkit", f"none for a build: {found.toolkit_problem}"
    for compiler in found.compilers:
        used = "; a build would use it" if compiler == found.compiler else ""
        yield "C++ compiler", f"{compiler.path}, {compiler.version}{used}"
    if found.compiler is None:
        yield "C++ compiler", f"none for a build: {found.compiler_problem}"
    yield "ninja", found.ninja or "none on PATH that runs"
    for name, value in found.variables.items():
        yield "set", f"{name}={value}"
    for name, folders in found.missing.items():
        yield "missing", f"{', '.join(folders)} of {name}"
    for problem in found.problems:
        yield "problem", problem.what
        yield "", problem.command
    if not found.problems:
        yield "problems", "none"


def _driver(found: Environment) -> str:
    if found.driver is None:
        return "no driver of NVIDIA's"
    serves = f", for CUDA up to {found.driver.cuda}" if found.driver.cuda else ""
    return (found.driver.version or "of unknown version") + serves


def _built(record: BuildRecord | None) -> str:
    if record is None:
        return "never"
    if record.kind == "none":
        return f"none: {record.reason}"
    text = f"{record.kind}, for torch {record.torch} and {record.python}"
    if record.kind == "cuda":
        return f"{text}, by CUDA toolkit {record.toolkit}, for {';'.join(record.arch_list)}"
    return f"{text}: {record.reason}"


def _device(device: Device) -> str:
    covered = {True: ", covered by what was built", False: ", NOT covered by what was built", None: ""}[device.covered]
    unseen = "" if device.visible else ", not seen by torch"
    return f"{device.name}, compute capability {device.capability or 'unknown'}{covered}{unseen}"

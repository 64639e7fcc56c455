"""The driver, and the GPUs that it has."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from ..building.architectures import covers
from ..building.processes import output_of
from ..building.versions import release
from .facts import Device, Driver

__all__ = ["LIBRARY", "VERSION_FILE", "find_gpus"]

VERSION_FILE = Path("/proc/driver/nvidia/version")
LIBRARY = "libcuda.so.1"


def find_gpus(
    environ: Mapping[str, str], torch: ModuleType | None, architectures: tuple[str, ...]
) -> tuple[Driver | None, tuple[Device, ...], str]:
    """(the driver, all GPUs, why torch cannot use those that are here).

    Asks torch; and where that sees none, as a build without CUDA does not, nvidia-smi, for a limited time.

    Args:
        architectures: what the extension has code for.
    """
    devices, problem = _seen_by(torch, architectures) if torch is not None and torch.version.cuda else ((), "")
    told = [] if devices else _told_by_nvidia_smi(environ)
    version = _version_in_file() or next((version for _, _, version in told), "")
    cuda = _newest_cuda()
    driver = Driver(version, cuda) if version or cuda else None
    hidden = tuple(
        Device(name, capability, _covered(architectures, capability), visible=False) for name, capability, _ in told
    )
    return driver, devices or hidden, problem


def _seen_by(torch: ModuleType, architectures: tuple[str, ...]) -> tuple[tuple[Device, ...], str]:
    found = []
    try:
        for index in range(torch.cuda.device_count()):
            capability = "{}.{}".format(*torch.cuda.get_device_capability(index))
            covered = _covered(architectures, capability)
            found.append(Device(torch.cuda.get_device_name(index), capability, covered))
    except (RuntimeError, AssertionError) as error:
        return (), str(error).partition("\n")[0]
    return tuple(found), ""


def _covered(architectures: tuple[str, ...], capability: str) -> bool | None:
    return covers(architectures, release(capability)) if architectures and capability else None


def _told_by_nvidia_smi(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Name, compute capability and the driver's version, for each GPU."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return []
    query = "--query-gpu=name,compute_cap,driver_version"
    try:
        lines = output_of(program, query, "--format=csv,noheader").splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[field.strip() for field in line.rsplit(",", 2)] for line in lines]
    number = re.compile(r"\d+\.\d+")  # "[N/A]" is what it says where it cannot tell
    return [(row[0], row[1] if number.fullmatch(row[1]) else "", row[2]) for row in rows if len(row) == 3]


def _version_in_file() -> str:
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", VERSION_FILE.read_text("utf-8", errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""


def _newest_cuda() -> str:
    """Of the driver's library, which tells it without a GPU."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL(LIBRARY).cuDriverGetVersion(ctypes.byref(number)):
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"

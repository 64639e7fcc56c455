"""Is the C++ extension usable here, and if not, why not: in one sentence.

Nothing is compiled at import. What the build left in its record is compared with the torch that runs *before* the
extension is imported: a module built for torch 2.13 imports under 2.11 and then misreads tensors without a word.
"""

from __future__ import annotations

import functools
import importlib
import json
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlparse

from overflowstat.building.installed_torch import MINIMUM_TORCH
from overflowstat.building.record import BuildRecord, python_tag
from overflowstat.building.versions import major, release
from overflowstat.terminal import in_shell

PACKAGE = Path(__file__).resolve().parent


class NativeWarning(UserWarning):
    """Something of the C++ extension is lacking: overflowstat works, but slower than it could."""


@dataclass(frozen=True)
class Status:
    """`module` is overflowstat._C or None; `reason` is one sentence about what is lacking, empty when nothing is."""

    module: ModuleType | None
    reason: str


def load() -> ModuleType | None:
    """overflowstat._C, or None where it cannot be used. The first call warns with `reason()`, if there is one."""
    return _status_and_warning().module


def reason() -> str:
    """Why there is no extension, or none for CUDA, and the command that mends it; empty when nothing is lacking."""
    return _status_and_warning().reason


def torch_problem() -> str:
    """Why nothing of overflowstat works here, in one sentence; empty where a torch that is new enough is installed."""
    lack = torch_lack()
    return f"{lack.what}: {lack.remedy}, then {mend_command()}" if lack else ""


def torch_lack() -> Lack | None:
    """The same in its parts."""
    needed = f"needs torch {MINIMUM_TORCH} or newer, and"
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return Lack(f"{needed} there is none here", "install it")
        return Lack(f"{needed} the one here does not import ({' '.join(str(error).split())})", "install it anew")
    if release(torch.__version__) < release(MINIMUM_TORCH):
        return Lack(f"{needed} this is {torch.__version__}", "install a newer one")
    return None


@functools.cache
def _status_and_warning() -> Status:
    found = status()
    if found.reason:
        warnings.warn(f"overflowstat {found.reason}", NativeWarning, stacklevel=3)
    return found


def status() -> Status:
    """Look for the extension, without a warning."""
    if problem := torch_problem():
        return Status(None, problem)
    import torch

    record = BuildRecord.load(PACKAGE)
    lack = what_is_lacking(record, torch.__version__, torch.version.cuda or torch.version.hip)
    if lack is not None and not lack.usable:
        return Status(None, _sentence(lack))
    try:
        module = importlib.import_module("overflowstat._C")
    except ImportError as error:
        return Status(None, _sentence(Lack(f"its extension does not import ({error})")))
    return Status(module, _sentence(lack) if lack else "")


@dataclass(frozen=True)
class Lack:
    """What is lacking, what must be done before installing again, and whether the extension is usable all the same."""

    what: str
    remedy: str = ""
    usable: bool = False


def architectures() -> tuple[str, ...]:
    """The GPUs that the extension was built for, in the notation of TORCH_CUDA_ARCH_LIST."""
    record = BuildRecord.load(PACKAGE)
    return () if record is None else tuple(record.arch_list)


def what_is_lacking(record: BuildRecord | None, torch_version: str, torch_gpu: str | None) -> Lack | None:
    """Compare what was built with the torch that runs; None when the extension fits and could not be more.

    `torch_gpu` is the CUDA or ROCm version of that torch, None for a CPU build.
    """
    if record is None:
        return Lack("its extension was never built here")
    if record.kind == "none":
        return Lack(record.reason, record.remedy)
    if record.python != python_tag():
        return Lack(f"its extension was built for {record.python}, and this Python is {python_tag()}")
    if record.torch is None or release(record.torch) != release(torch_version):
        return Lack(f"its extension was built for torch {record.torch}, and this is torch {torch_version}")
    if record.kind == "cuda" and major(record.cuda) != major(torch_gpu):
        now = f"built for CUDA {torch_gpu}" if torch_gpu else "built without CUDA"
        return Lack(f"its extension was built for CUDA {record.cuda}, and torch {torch_version} is {now}")
    if record.kind == "cpu" and torch_gpu:
        return Lack(record.reason, record.remedy, usable=True)
    return None


def _sentence(lack: Lack) -> str:
    if lack.usable:
        effect = "has no CUDA kernels and reads CUDA tensors with plain torch operations, slower"
    else:
        effect = "runs without its C++ extension, on plain torch operations, slower"
    if hidden := _hidden_installation():
        return (
            f"{effect}: this is the source folder {PACKAGE.parent}, which hides the package installed in {hidden}; "
            "leave that folder, or install it with -e"
        )
    return f"{effect}: {lack.what}; " + (f"{lack.remedy}, then " if lack.remedy else "") + mend_command()


def _distributions() -> list[metadata.Distribution]:
    return list(metadata.distributions(name="overflowstat"))


def _hidden_installation() -> Path | None:
    """Where the package is installed, if not here: then a source folder on sys.path came first."""
    for distribution in _distributions():
        folder = Path(str(distribution.locate_file("overflowstat"))).resolve()
        if (folder / "__init__.py").is_file() and folder != PACKAGE:
            return folder.parent
    return None


def mend_command() -> str:
    """The command that installs this very package again, built for the torch that is here now."""
    pip = "python -m pip install --force-reinstall --no-deps"
    if (PACKAGE.parent / "setup.py").is_file():
        return f"{pip} -e {in_shell(str(PACKAGE.parent))}"
    for distribution in _distributions():
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if "dir_info" in origin:
            return f"{pip} {in_shell(unquote(urlparse(origin['url']).path))}"
    return f"{pip} --no-cache-dir overflowstat"  # the cache may hold the wheel built for another torch

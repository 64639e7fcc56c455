"""The torch that an extension is built for."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import runpy
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MINIMUM_TORCH", "Torch", "find_torch"]

MINIMUM_TORCH = "2.11"


@dataclass(frozen=True)
class Torch:
    """The torch that the extension would be built for; `cuda` and `hip` are None for a build without them."""

    version: str
    cuda: str | None = None
    hip: str | None = None


def find_torch() -> Torch | None:
    """The installed torch, or None.

    Read from torch's version.py: importing torch takes seconds, and setup.py runs three times for one install.
    pip builds in an environment of its own, where the torch that will run the extension cannot be seen. Then sys.path
    is extended, at its end, by the folders where this Python keeps its packages; only if that is not enough, by what
    .pth files there name.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None:
        folders = _package_folders()
        sys.path.extend(folder for folder in folders if folder not in sys.path)
        spec = _find_torch_again()
        if spec is None:
            for folder in folders:
                site.addsitedir(folder)
            spec = _find_torch_again()
    if spec is None or spec.origin is None:
        return None
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return Torch(version["__version__"], version["cuda"], version.get("hip"))


def _find_torch_again() -> importlib.machinery.ModuleSpec | None:
    importlib.invalidate_caches()
    return importlib.util.find_spec("torch")


def _package_folders() -> list[str]:
    paths = sysconfig.get_paths()
    folders = [paths["purelib"], paths["platlib"]]
    in_venv = sys.prefix != sys.base_prefix
    if not in_venv or _sees_system_packages(Path(sys.prefix) / "pyvenv.cfg"):
        folders += [site.getusersitepackages(), *site.getsitepackages([sys.base_prefix])]
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


def _sees_system_packages(config: Path) -> bool:
    wanted = r"(?im)^include-system-site-packages\s*=\s*true"
    return config.is_file() and re.search(wanted, config.read_text("utf-8")) is not None

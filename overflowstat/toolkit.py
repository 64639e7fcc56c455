"""What there is to build with, and what to build from it.

Standard library only and no import of its own package: setup.py loads this file by its path, before anything is
installed. `gather_facts` looks at the machine; `make_plan` decides and looks at nothing but the facts, so that every
case can be tested anywhere.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

MINIMUM_TORCH = (2, 11)
KINDS = ("cuda", "cpu", "none")
BUILD_RECORD = "_build.json"

# Compiled when TORCH_CUDA_ARCH_LIST is not set, as far as this nvcc knows them. Code of one major version runs on its
# later minor ones (8.0 on 8.7, 12.0 on 12.1); PTX from 9.0 on lets the driver compile for what has no code here (11.0,
# and whatever comes next).
DEFAULT_ARCHITECTURES = ("7.5", "8.0", "8.6", "9.0+PTX", "10.0+PTX", "12.0+PTX")

# The names that torch documents for TORCH_CUDA_ARCH_LIST, oldest first.
ARCHITECTURE_FAMILIES = {
    "kepler": ("3.5", "3.7"),
    "maxwell": ("5.0", "5.2"),
    "maxwell+tegra": ("5.3",),
    "pascal": ("6.0", "6.1"),
    "volta": ("7.0",),
    "volta+tegra": ("7.2",),
    "turing": ("7.5",),
    "ampere": ("8.0", "8.6"),
    "ampere+tegra": ("8.7",),
    "ada": ("8.9",),
    "hopper": ("9.0",),
    "blackwell": ("10.0", "10.3", "12.0", "12.1"),
    "blackwell+tegra": ("11.0",),
}

COMPILER_LAUNCHERS = {"ccache", "sccache", "distcc", "icecc"}


class BuildError(Exception):
    """The build was asked for something that cannot be had here; the text says what, and what can."""


@dataclass(frozen=True)
class CudaToolkit:
    """A folder with nvcc, the runtime's headers and its static library.

    `architectures` are the compute capabilities that this nvcc compiles for, ascending ("7.5", ..., "12.1").
    """

    home: str
    nvcc: str
    include: str
    library: str
    version: str
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class Torch:
    """The torch that the extension would be built for; `cuda` and `hip` are None for a build without them."""

    version: str
    cuda: str | None = None
    hip: str | None = None


@dataclass(frozen=True)
class Facts:
    """All that a plan depends on. A `*_problem` says in half a sentence why its neighbour is None."""

    torch: Torch | None
    compiler: str | None
    compiler_problem: str
    toolkit: CudaToolkit | None
    toolkit_problem: str
    python_header: str | None
    platform: str
    wanted: str
    arch_list: str


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


@dataclass(frozen=True)
class BuildRecord:
    """What a build left beside the extension, since pip hides what a build prints."""

    kind: str
    reason: str
    remedy: str
    torch: str | None
    cuda: str | None
    toolkit: str | None
    arch_list: tuple[str, ...]
    python: str

    def save(self, folder: Path) -> None:
        """Write the record into a package folder."""
        (folder / BUILD_RECORD).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> BuildRecord | None:
        """The record in a package folder, or None where no build left a readable one."""
        try:
            fields = json.loads((folder / BUILD_RECORD).read_text(encoding="utf-8"))
            return BuildRecord(**(fields | {"arch_list": tuple(fields["arch_list"])}))
        except (OSError, ValueError, TypeError, KeyError):
            return None


def python_tag() -> str:
    """The Python that an extension module built here can be imported by, such as cpython-311-x86_64-linux-gnu."""
    return str(sysconfig.get_config_var("SOABI"))


def make_record(plan: Plan, facts: Facts) -> BuildRecord:
    """What `native.py` must know of a build made by this plan."""
    built = plan.kind != "none"
    return BuildRecord(
        kind=plan.kind,
        reason=plan.reason,
        remedy=plan.remedy,
        torch=facts.torch.version if built and facts.torch else None,
        cuda=facts.torch.cuda if built and facts.torch else None,
        toolkit=facts.toolkit.version if plan.kind == "cuda" and facts.toolkit else None,
        arch_list=plan.architectures,
        python=python_tag(),
    )


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as 2.14.1+cu130 or 2.15.0a0+git123; (0, 0) when there is none to read."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


# The decision


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
    minimum = ".".join(map(str, MINIMUM_TORCH))
    if facts.torch is None:
        return "torch was not installed when it was built", f"install torch {minimum} or newer"
    if release(facts.torch.version) < MINIMUM_TORCH:
        return f"torch {facts.torch.version} is older than {minimum}", f"install torch {minimum} or newer"
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
    major = facts.torch.cuda.split(".")[0]
    remedy = f"install the CUDA toolkit {major}.x or set CUDA_HOME to one"
    if facts.toolkit is None:
        return facts.toolkit_problem, remedy
    if facts.toolkit.version.split(".")[0] != major:
        cuda = facts.toolkit
        return f"the CUDA toolkit in {cuda.home} is {cuda.version} and torch's CUDA is {facts.torch.cuda}", remedy
    return None


def choose_architectures(arch_list: str, toolkit: CudaToolkit) -> tuple[str, ...]:
    """The architectures to compile for, in the notation of TORCH_CUDA_ARCH_LIST ("8.6", "9.0a", "12.0+PTX").

    `arch_list` is that variable's value; empty means DEFAULT_ARCHITECTURES, as far as the toolkit knows them.
    Raises BuildError for one that is malformed, dropped from the toolkit or not yet known to it.
    """
    if not arch_list.strip():
        chosen = tuple(arch for arch in DEFAULT_ARCHITECTURES if arch.split("+")[0] in toolkit.architectures)
        if not chosen:
            raise BuildError(f"{_supports(toolkit)}, none of which is compiled by default: set TORCH_CUDA_ARCH_LIST")
        return chosen
    chosen = ()
    for word in re.split(r"[;,\s]+", arch_list.strip(" ;,\t\n")):
        if word.lower() in ARCHITECTURE_FAMILIES:
            family = ARCHITECTURE_FAMILIES[word.lower()]
            known = [arch for arch in family if arch in toolkit.architectures]
            if not known:
                raise BuildError(_unsupported(f"{word} ({', '.join(family)})", family[-1], toolkit))
            chosen += (*known[:-1], f"{known[-1]}+PTX")
        elif found := re.fullmatch(r"(\d+\.\d)[af]?(\+PTX)?", word):
            if found[1] not in toolkit.architectures:
                raise BuildError(_unsupported(word, found[1], toolkit))
            chosen += (word,)
        else:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST={arch_list!r} holds {word!r}, which is neither a compute capability (8.6, 9.0a, "
                f"12.0+PTX) nor one of {', '.join(name.title() for name in ARCHITECTURE_FAMILIES)}"
            )
    return tuple(dict.fromkeys(chosen))


def _supports(toolkit: CudaToolkit) -> str:
    return f"nvcc {toolkit.version} in {toolkit.home} compiles for {', '.join(toolkit.architectures)}"


def _unsupported(word: str, capability: str, toolkit: CudaToolkit) -> str:
    dropped = release(capability) < release(toolkit.architectures[0]) if toolkit.architectures else False
    verdict = "has been dropped by" if dropped else "is not known to"
    return f"TORCH_CUDA_ARCH_LIST: {word} {verdict} this nvcc; {_supports(toolkit)}"


def nvcc_architecture_flags(architectures: tuple[str, ...]) -> list[str]:
    """nvcc's -gencode options: machine code for each architecture, and PTX where it ends in +PTX."""
    flags = []
    for arch in architectures:
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def covers(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code for these architectures runs on a device of this compute capability."""
    return any(_covers(arch, capability) for arch in architectures)


def _covers(arch: str, capability: tuple[int, int]) -> bool:
    number, _, ptx = arch.partition("+")
    built = release(number)
    if number.endswith("a"):  # for this very architecture only
        return built == capability
    same_family = built[0] == capability[0] and built <= capability
    return same_family or (bool(ptx) and not number.endswith("f") and built <= capability)


# The facts


def gather_facts(environ: Mapping[str, str] = os.environ) -> Facts:
    """Look at this machine; imports nothing, needs no GPU, runs nvcc twice if there is one."""
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
    )


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


def find_compiler(environ: Mapping[str, str] = os.environ) -> tuple[str | None, str]:
    """(path of the C++ compiler or None, why it is None).

    CXX decides where it is set; a launcher such as ccache is looked through.
    """
    named = environ.get("CXX")
    search = environ.get("PATH")
    for command in [named] if named else [sysconfig.get_config_var("CXX"), "c++", "g++", "clang++"]:
        words = [word for word in shlex.split(command or "") if Path(word).name not in COMPILER_LAUNCHERS]
        if words and (path := shutil.which(words[0], path=search)):
            return path, ""
    return None, f"CXX={named} is not there" if named else "there is no C++ compiler"


def find_cuda_toolkit(environ: Mapping[str, str] = os.environ) -> tuple[CudaToolkit | None, str]:
    """(the CUDA toolkit or None, why it is None).

    CUDA_HOME or CUDA_PATH decides where it is set. Else a toolkit is a folder that has the headers, not just the one
    above nvcc, which may be a script that calls the real one.
    """
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if named := environ.get(name):
            found = inspect_cuda_toolkit(Path(named))
            return (found, "") if isinstance(found, CudaToolkit) else (None, f"{name}={named} {found}")
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    homes = [Path(nvcc).resolve().parents[1], Path(nvcc).parents[1]] if nvcc else []
    lacks = ""
    for home in dict.fromkeys([*homes, Path("/usr/local/cuda")]):
        found = inspect_cuda_toolkit(home)
        if isinstance(found, CudaToolkit):
            return found, ""
        if (home / "bin" / "nvcc").exists():
            lacks = lacks or f"the CUDA toolkit in {home} {found}"
    return None, lacks or "no CUDA toolkit was found"


@functools.cache
def inspect_cuda_toolkit(home: Path) -> CudaToolkit | str:
    """The toolkit in a folder, or what that folder lacks, as the end of a sentence about it."""
    target = home / "targets" / f"{platform.machine()}-linux"
    include = _first_with("cuda_runtime_api.h", home / "include", target / "include")
    if include is None:
        return "has no include/cuda_runtime_api.h"
    multiarch = home / "lib" / f"{platform.machine()}-linux-gnu"
    library = _first_with("libcudart_static.a", home / "lib64", home / "lib", target / "lib", multiarch)
    if library is None:
        return "has no libcudart_static.a"
    nvcc = home / "bin" / "nvcc"
    if not os.access(nvcc, os.X_OK):
        return "has no bin/nvcc"
    try:
        version = re.search(r"release (\d+\.\d+)", _output_of(nvcc, "--version"))
        numbers = re.findall(r"compute_(\d+)\b", _output_of(nvcc, "--list-gpu-arch"))
    except (OSError, subprocess.SubprocessError) as error:
        return f"has an nvcc that does not run ({error})"
    if version is None:
        return "has an nvcc that does not tell its version"
    capabilities = sorted({(int(number[:-1]), int(number[-1])) for number in numbers})
    architectures = tuple(f"{major}.{minor}" for major, minor in capabilities)
    return CudaToolkit(str(home), str(nvcc), str(include), str(library), version[1], architectures)


def _first_with(name: str, *folders: Path) -> Path | None:
    return next((folder for folder in folders if (folder / name).is_file()), None)


def _output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

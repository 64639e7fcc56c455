"""GPU architectures, in the notation of TORCH_CUDA_ARCH_LIST."""

from __future__ import annotations

import re

from .cuda_toolkit import CudaToolkit
from .errors import BuildError
from .versions import release

__all__ = ["DEFAULT_ARCHITECTURES", "choose_architectures", "covers", "nvcc_architecture_flags"]

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

"""Commands of a shell that mend what is wrong. Packages of CUDA come from NVIDIA's repository of the system."""

from __future__ import annotations

from collections.abc import Sequence

from ..terminal import in_shell

__all__ = [
    "install_compiler",
    "install_driver",
    "install_older",
    "install_python_headers",
    "install_toolkit",
    "without",
]


def install_compiler(manager: str) -> str:
    return {"apt-get": "sudo apt-get install g++", "dnf": "sudo dnf install gcc-c++"}.get(
        manager, "conda install -c conda-forge gxx"
    )


def install_older(manager: str, family: str, release: int) -> str:
    """A compiler of this release, and have it used."""
    if manager == "apt-get":
        package = "clang" if family == "clang++" else family
        return f"sudo apt-get install {package}-{release} && export CXX={family}-{release}"
    if manager == "dnf" and family == "g++":
        toolset = f"gcc-toolset-{release}"
        return f"sudo dnf install {toolset}-gcc-c++ && export CXX=/opt/rh/{toolset}/root/usr/bin/g++"
    package = "clangxx" if family == "clang++" else "gxx"
    return f"conda install -c conda-forge '{package}<{release + 1}' && export CXX=$CONDA_PREFIX/bin/{family}"


def install_python_headers(manager: str) -> str:
    return {"apt-get": "sudo apt-get install python3-dev", "dnf": "sudo dnf install python3-devel"}.get(
        manager, "conda install python"
    )


def install_toolkit(manager: str, version: str) -> str:
    """And have it used, whatever CUDA_HOME and PATH name."""
    if manager in ("apt-get", "dnf"):
        package = f"cuda-toolkit-{version.replace('.', '-')}"
        return f"sudo {manager} install {package} && export CUDA_HOME=/usr/local/cuda-{version}"
    return f"conda install -c nvidia cuda-toolkit={version} && export CUDA_HOME=$CONDA_PREFIX"


def install_driver(manager: str) -> str:
    return f"sudo {manager if manager in ('apt-get', 'dnf') else 'zypper'} install cuda-drivers"


def without(variable: str, folders: Sequence[str]) -> str:
    """Takes folders out of a variable that lists them, and leaves the others as they are."""
    patterns = " ".join(f"-e {in_shell(folder)}" for folder in folders)
    return f"export {variable}=$(echo \"${variable}\" | tr : '\\n' | grep -vxF {patterns} | paste -sd:)"

"""What is wrong with an environment, each with the command that mends it. Looks at nothing but what was found."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from .. import native
from ..building.architectures import covers
from ..building.errors import BuildError
from ..building.plan import KINDS, Facts, make_plan
from ..building.versions import major, release
from ..terminal import in_shell
from . import commands
from .facts import Device, Environment, Problem

__all__ = ["find_problems"]


def find_problems(found: Environment, facts: Facts, lack_of_torch: native.Lack | None) -> tuple[Problem, ...]:
    """In the order in which they are to be mended.

    Args:
        facts: what a build would be made from now.
        lack_of_torch: what there is if none can be used.
    """
    if lack_of_torch is not None:
        how = {"install it": "", "install it anew": "--force-reinstall "}.get(lack_of_torch.remedy, "--upgrade ")
        command = f"python -m pip install {how}torch && {native.mend_command()}"
        return (Problem(f"overflowstat {lack_of_torch.what}", command),)
    return (
        *_with_the_driver(found),
        *_with_folders(found),
        *_with_toolkits(found),
        *_with_a_build(found, facts),
        *_with_what_is_built(found, facts),
    )


def _with_the_driver(found: Environment) -> Iterator[Problem]:
    if found.torch_cuda is None:
        if found.devices and found.torch_hip is None:
            what = f"there is {found.devices[0].name}, and torch {found.torch} is built without CUDA"
            yield Problem(what, f"python -m pip install --force-reinstall torch && {native.mend_command()}")
        return
    driver = found.driver
    if driver and driver.cuda and int(major(driver.cuda)) < int(major(found.torch_cuda)):
        name = f"the driver {driver.version}".rstrip()
        what = f"{name} serves CUDA up to {driver.cuda}, and torch's CUDA is {found.torch_cuda}"
        yield Problem(what, commands.install_driver(found.package_manager))
    elif found.devices_problem or any(not device.visible for device in found.devices):
        hides = "CUDA_VISIBLE_DEVICES"
        if hides in found.variables and not found.devices_problem:
            yield Problem(f"{hides}={found.variables[hides]} hides from torch the GPUs that are here", _set(hides, ""))
        else:
            said = found.devices_problem or "it does not say why"
            yield Problem(f"torch cannot use the GPUs that are here: {said}", "nvidia-smi -q  # what the driver says")


def _with_folders(found: Environment) -> Iterator[Problem]:
    """Those of CUDA alone. PATH of most machines names others that are not there, which does no harm."""
    for name, missing in found.missing.items():
        of_cuda = [folder for folder in missing if "cuda" in folder.lower()]
        if of_cuda:
            what = f"{name} names {', '.join(of_cuda)}, which is not there"
            yield Problem(what, commands.without(name, of_cuda))


def _with_toolkits(found: Environment) -> Iterator[Problem]:
    """That are there beside the one that a build would use, and come before it elsewhere."""
    used = found.toolkit
    if used is None or (found.torch_cuda and major(used.version) != major(found.torch_cuda)):
        return
    others = [each for each in found.toolkits if not each.is_used and each.version not in ("", used.version)]
    on_path = next((each for each in found.toolkits if "PATH" in each.named_by), None)
    if on_path in others and on_path is not None:
        yield Problem(
            f"several toolkits: nvcc on PATH is {on_path.version} in {on_path.home}, and a build would take "
            f"{used.version} in {used.home}",
            f"export PATH={in_shell(used.home)}/bin:$PATH",
        )
    for other in others:
        if other.libraries:
            what = f"several toolkits: LD_LIBRARY_PATH has the libraries of CUDA {other.version} in {other.home}"
            mend = commands.without("LD_LIBRARY_PATH", other.libraries)
            yield Problem(f"{what}, and a build would take {used.version}", mend)


def _with_a_build(found: Environment, facts: Facts) -> Iterator[Problem]:
    """With one that would be made now."""
    if not facts.platform.startswith("linux"):
        return
    again = native.mend_command()
    listed = "TORCH_CUDA_ARCH_LIST"
    try:
        plan = make_plan(facts)
    except BuildError as error:
        of_the_list = listed in str(error)
        wanted = _architectures_for(found.devices, facts)
        if facts.toolkit and facts.toolkit.architectures and not facts.arch_list.strip():  # it knows none of the usual
            wanted = wanted or f"{facts.toolkit.architectures[-1]}+PTX"
        yield Problem(f"a build would fail: {error}", _set(listed, wanted) if of_the_list else "unset OVERFLOWSTAT_EXT")
        return
    known = [each for each in found.devices if each.capability]
    device = next((each for each in known if not covers(plan.architectures, release(each.capability))), None)
    if plan.kind == "cuda" and facts.arch_list.strip() and device is not None:
        what = f"{listed}={facts.arch_list} is nothing for {device.name} ({device.capability})"
        wanted = _architectures_for(found.devices, facts)
        yield Problem(what, _set(listed, wanted) if wanted else "export OVERFLOWSTAT_EXT=cpu")  # nvcc has dropped it
    if plan.kind != "none" and found.ninja is None:
        what = (
            "no ninja on PATH that runs: without it torch compiles one file after the other, and all of them each time"
        )
        yield Problem(what, "python -m pip install ninja")
    if KINDS.index(plan.kind) < KINDS.index(found.extension):
        lacking = {"none": "there is no extension that can be used", "cpu": "the extension has no CUDA kernels"}
        yield Problem(f"{lacking[found.extension]}, and a build would give {plan.kind} now", again)
    if plan.remedy and (facts.wanted == "auto" or found.torch_cuda):
        yield Problem(plan.reason, f"{_first(found, facts)} && {again}")


def _first(found: Environment, facts: Facts) -> str:
    """What must be done before a build can give more."""
    manager = found.package_manager
    if facts.wanted != "auto":
        return "unset OVERFLOWSTAT_EXT"
    if facts.compiler is None:
        return "unset CXX" if "CXX" in found.variables else commands.install_compiler(manager)
    if facts.python_header is None:
        return commands.install_python_headers(manager)
    used, wanted = facts.toolkit, str(found.torch_cuda)
    if used is None or major(used.version) != major(wanted):
        whole = [each for each in found.toolkits if not each.is_used and not each.missing]
        fitting = [each.home for each in whole if major(each.version) == major(wanted)]
        if not fitting:
            return commands.install_toolkit(manager, wanted)
        return "export CUDA_HOME={home} PATH={home}/bin:$PATH".format(home=in_shell(fitting[0]))
    family, newest = facts.compiler.family, used.newest_compiler(facts.compiler.family) or 0
    for other in found.compilers:
        if other.family == family and 0 < other.release <= newest:
            return f"export CXX={in_shell(other.path)}"
    return commands.install_older(manager, family, newest)


def _with_what_is_built(found: Environment, facts: Facts) -> Iterator[Problem]:
    not_covered = [device for device in found.devices if device.covered is False]
    if not_covered and found.built:
        device, built = not_covered[0], ";".join(found.built.arch_list)
        what = f"the extension has no code for {device.name} ({device.capability}), but for {built}"
        wanted = _architectures_for(found.devices, facts)
        how = f"TORCH_CUDA_ARCH_LIST={shlex.quote(wanted)}" if wanted else "OVERFLOWSTAT_EXT=cpu"
        yield Problem(what, f"{how} {native.mend_command()}")


def _set(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)}" if value else f"unset {name}"


def _architectures_for(devices: tuple[Device, ...], facts: Facts) -> str:
    """For TORCH_CUDA_ARCH_LIST: those of the GPUs that are here, or PTX of the next below it where nvcc is older."""
    known = facts.toolkit.architectures if facts.toolkit else None
    wanted = []
    for capability in sorted({device.capability for device in devices if device.capability}, key=release):
        below = [each for each in known or () if release(each) < release(capability)]
        if known is None or capability in known:
            wanted.append(capability)
        elif below:
            wanted.append(f"{below[-1]}+PTX")
    return ";".join(dict.fromkeys(wanted))

"""What is built from what is there: the decision from facts alone, and the facts from machines made of a few files."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_toolkit import cuda_home, executable

from overflowstat import building
from overflowstat.building.architectures import (
    DEFAULT_ARCHITECTURES,
    choose_architectures,
    covers,
    nvcc_architecture_flags,
)
from overflowstat.building.compiler import Compiler, find_compiler, inspect_compiler
from overflowstat.building.cuda_toolkit import CudaToolkit, find_cuda_toolkit
from overflowstat.building.errors import BuildError
from overflowstat.building.installed_torch import Torch
from overflowstat.building.local_version import local_version
from overflowstat.building.plan import Facts, Plan, gather_facts, make_plan
from overflowstat.building.record import BUILD_RECORD, BuildRecord, make_record

CUDA_13 = CudaToolkit(
    home="/opt/cuda",
    nvcc="/opt/cuda/bin/nvcc",
    include="/opt/cuda/include",
    library="/opt/cuda/lib64",
    version="13.0",
    architectures=("7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"),
)
CUDA_12_4 = dataclasses.replace(
    CUDA_13,
    version="12.4",
    architectures=("5.0", "5.2", "6.0", "6.1", "7.0", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0"),
)
EVERYTHING = Facts(
    torch=Torch("2.14.1+cu130", cuda="13.0"),
    compiler=Compiler("/usr/bin/g++", "g++", 12, "g++ (Debian 12.2.0-14) 12.2.0"),
    compiler_problem="",
    toolkit=CUDA_13,
    toolkit_problem="",
    python_header="/usr/include/python3.11/Python.h",
    platform="linux",
    wanted="auto",
    arch_list="",
)


def facts(**differences: object) -> Facts:
    return dataclasses.replace(EVERYTHING, **differences)  # type: ignore[arg-type]


NO_COMPILER = {"compiler": None, "compiler_problem": "there is no C++ compiler"}
NO_TOOLKIT = {"toolkit": None, "toolkit_problem": "no CUDA toolkit was found"}
TOO_NEW = {
    "compiler": Compiler("/usr/bin/g++", "g++", 16),
    "toolkit": dataclasses.replace(CUDA_13, newest_gcc=15, newest_clang=20),
}
CPU_TORCH = {"torch": Torch("2.13.0+cpu")}


def test_with_everything_there_cuda_is_built_and_nothing_is_lacking() -> None:
    plan = make_plan(EVERYTHING)
    assert plan == Plan("cuda", architectures=("7.5", "8.0", "8.6", "9.0+PTX", "10.0+PTX", "12.0+PTX"))


@pytest.mark.parametrize(
    ("differences", "kind", "in_reason", "in_remedy"),
    [
        (CPU_TORCH, "cpu", "torch 2.13.0+cpu is built without CUDA", ""),
        ({"torch": Torch("2.13.0", hip="7.0")}, "cpu", "ROCm", ""),
        (NO_TOOLKIT, "cpu", "no CUDA toolkit was found", "install the CUDA toolkit 13.x or set CUDA_HOME"),
        ({"toolkit": CUDA_12_4}, "cpu", "/opt/cuda is 12.4 and torch's CUDA is 13.0", "CUDA toolkit 13.x"),
        (NO_COMPILER, "none", "there is no C++ compiler", "install g++ or set CXX"),
        ({"torch": None}, "none", "torch was not installed", "install torch 2.11 or newer"),
        ({"torch": Torch("2.10.0+cu130", "13.0")}, "none", "torch 2.10.0+cu130 is older than 2.11", "install torch"),
        ({"torch": Torch("1.13.1")}, "none", "torch 1.13.1 is older than 2.11", "install torch"),
        ({"python_header": None}, "none", "Python.h", "python3-dev"),
        ({"platform": "darwin"}, "none", "not on darwin", "use Linux"),
        (NO_COMPILER | NO_TOOLKIT, "none", "there is no C++ compiler", "install g++"),
        (
            TOO_NEW,
            "cpu",
            "/usr/bin/g++ is g++ 16, and nvcc 13.0 in /opt/cuda takes none newer than 15",
            "set CXX to g++ 15",
        ),
    ],
)
def test_less_is_built_where_something_is_lacking_and_the_reason_names_it(
    differences: dict[str, object], kind: str, in_reason: str, in_remedy: str
) -> None:
    plan = make_plan(facts(**differences))
    assert plan.kind == kind
    assert in_reason in plan.reason
    assert in_remedy in plan.remedy
    assert bool(plan.remedy) == bool(in_remedy)
    assert plan.architectures == ()


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git1234", "2.12.1+cu126", "2.100.0", "3.0.0"])
def test_torch_from_the_minimum_on_is_taken(version: str) -> None:
    assert make_plan(facts(torch=Torch(version, "13.2"))).kind == "cuda"


def test_a_toolkit_of_the_same_major_but_another_minor_version_is_taken() -> None:
    assert make_plan(facts(torch=Torch("2.12.0+cu126", "12.6"), toolkit=CUDA_12_4)).kind == "cuda"


@pytest.mark.parametrize(
    "differences",
    [
        {"compiler": Compiler("/usr/bin/g++", "g++", 15)},
        {"compiler": Compiler("/usr/bin/clang++", "clang++", 20)},
        {"compiler": Compiler("/opt/icpx", "", 2026)},
        {"any_compiler": True},
        {"toolkit": CUDA_13},
        {**CPU_TORCH, "wanted": "cpu"},
    ],
)
def test_a_compiler_that_nvcc_takes_or_that_it_is_not_known_to_refuse_is_taken(differences: dict[str, object]) -> None:
    assert make_plan(facts(**TOO_NEW | differences)).kind == ("cpu" if "wanted" in differences else "cuda")


@pytest.mark.parametrize("wanted", ["cuda", "cpu", "none"])
def test_a_wanted_kind_is_built_where_it_is_possible(wanted: str) -> None:
    plan = make_plan(facts(wanted=wanted))
    assert plan.kind == wanted
    assert plan.reason == ("" if wanted == "cuda" else f"it was built with OVERFLOWSTAT_EXT={wanted}")


def test_wanting_no_extension_asks_for_nothing_else_to_be_there() -> None:
    bare = facts(wanted="none", torch=None, python_header=None, platform="win32", **NO_COMPILER, **NO_TOOLKIT)
    assert make_plan(bare).kind == "none"


@pytest.mark.parametrize(
    ("differences", "wanted", "named"),
    [
        (CPU_TORCH, "cuda", "built without CUDA"),
        (NO_TOOLKIT, "cuda", "no CUDA toolkit was found; install the CUDA toolkit 13.x"),
        ({"toolkit": CUDA_12_4}, "cuda", "12.4"),
        (NO_COMPILER, "cuda", "C[+][+] compiler"),
        (TOO_NEW, "cuda", "takes none newer than 15; set CXX to g[+][+] 15 or older"),
        (NO_COMPILER, "cpu", "C[+][+] compiler"),
        ({"torch": None}, "cpu", "torch was not installed"),
        ({"torch": Torch("2.9.1")}, "cpu", "older than 2.11"),
    ],
)
def test_a_wanted_kind_that_is_not_possible_is_an_error_and_not_less(
    differences: dict[str, object], wanted: str, named: str
) -> None:
    with pytest.raises(BuildError, match=f"OVERFLOWSTAT_EXT={wanted} is not possible: .*{named}"):
        make_plan(facts(wanted=wanted, **differences))


@pytest.mark.parametrize("wanted", ["gpu", "CUDA", "0", " cpu"])
def test_a_wanted_kind_that_does_not_exist_is_an_error_that_lists_those_that_do(wanted: str) -> None:
    with pytest.raises(BuildError, match=f"OVERFLOWSTAT_EXT={wanted} is none of auto, cuda, cpu, none"):
        make_plan(facts(wanted=wanted, torch=None))


@pytest.mark.parametrize(
    ("arch_list", "expected"),
    [
        ("8.0", ("8.0",)),
        ("8.0;9.0a", ("8.0", "9.0a")),
        ("7.5 8.6+PTX", ("7.5", "8.6+PTX")),
        ("7.5, 8.0,12.0f+PTX;", ("7.5", "8.0", "12.0f+PTX")),
        ("Turing", ("7.5+PTX",)),
        ("Ampere;Hopper", ("8.0", "8.6+PTX", "9.0+PTX")),
        ("blackwell", ("10.0", "10.3", "12.0", "12.1+PTX")),
        ("Ampere+Tegra", ("8.7+PTX",)),
        ("8.0;8.0", ("8.0",)),
        ("  ", ("7.5", "8.0", "8.6", "9.0+PTX", "10.0+PTX", "12.0+PTX")),
    ],
)
def test_the_architectures_asked_for_are_built(arch_list: str, expected: tuple[str, ...]) -> None:
    assert make_plan(facts(arch_list=arch_list)).architectures == expected


def test_the_default_architectures_are_those_that_this_nvcc_knows() -> None:
    assert choose_architectures("", CUDA_12_4) == ("7.5", "8.0", "8.6", "9.0+PTX")


def test_a_family_gives_those_of_its_architectures_that_this_nvcc_knows() -> None:
    blackwell_only_in_part = dataclasses.replace(CUDA_13, version="12.8", architectures=("9.0", "10.0", "12.0"))
    assert choose_architectures("Blackwell", blackwell_only_in_part) == ("10.0", "12.0+PTX")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("arch_list", "cuda", "named"),
    [
        ("7.0", CUDA_13, "7.0 has been dropped by this nvcc"),
        ("8.0;6.1+PTX", CUDA_13, "6.1[+]PTX has been dropped by this nvcc"),
        ("Volta", CUDA_13, "Volta .7.0. has been dropped by this nvcc"),
        ("10.0", CUDA_12_4, "10.0 is not known to this nvcc"),
        ("Blackwell", CUDA_12_4, "Blackwell .10.0, 10.3, 12.0, 12.1. is not known to this nvcc"),
        ("13.0a", CUDA_13, "13.0a is not known to this nvcc"),
    ],
)
def test_an_architecture_that_this_nvcc_does_not_have_is_an_error_that_names_it_and_those_it_has(
    arch_list: str, cuda: CudaToolkit, named: str, wanted: str
) -> None:
    torch = Torch("2.14.0", f"{cuda.version.split('.')[0]}.9")
    with pytest.raises(BuildError, match=named) as error:
        make_plan(facts(torch=torch, toolkit=cuda, arch_list=arch_list, wanted=wanted))
    assert f"nvcc {cuda.version} in /opt/cuda compiles for {', '.join(cuda.architectures)}" in str(error.value)


@pytest.mark.parametrize("word", ["sm_80", "80", "8", "Tesla", "8.0+ptx", "native"])
def test_a_word_that_is_no_architecture_is_an_error_that_quotes_it(word: str) -> None:
    with pytest.raises(BuildError, match=f"holds '{word.replace('+', '[+]')}', which is neither"):
        make_plan(facts(arch_list=f"8.0;{word}"))


def test_the_architectures_are_not_looked_at_where_no_cuda_is_built() -> None:
    assert make_plan(facts(arch_list="3.5;nonsense", **CPU_TORCH)).kind == "cpu"


def test_nvcc_is_given_machine_code_for_each_architecture_and_ptx_where_asked() -> None:
    assert nvcc_architecture_flags(("7.5", "9.0a", "12.0+PTX")) == [
        "-gencode=arch=compute_75,code=sm_75",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]


@pytest.mark.parametrize(
    ("architectures", "capability", "covered"),
    [
        (("8.0",), (8, 0), True),
        (("8.0",), (8, 9), True),
        (("8.6",), (8, 0), False),
        (("8.0",), (9, 0), False),
        (("8.0+PTX",), (9, 0), True),
        (("9.0+PTX",), (8, 0), False),
        (("9.0a",), (9, 0), True),
        (("9.0a+PTX",), (10, 0), False),
        (("10.0f",), (10, 3), True),
        (("10.0f+PTX",), (12, 0), False),
        (DEFAULT_ARCHITECTURES, (11, 0), True),
        (DEFAULT_ARCHITECTURES, (7, 0), False),
        ((), (8, 0), False),
    ],
)
def test_code_covers_later_minor_versions_and_ptx_all_later_ones(
    architectures: tuple[str, ...], capability: tuple[int, int], covered: bool
) -> None:
    assert covers(architectures, capability) is covered


def test_a_record_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    record = make_record(make_plan(EVERYTHING), EVERYTHING)
    record.save(tmp_path)
    assert BuildRecord.load(tmp_path) == record
    assert (record.kind, record.torch, record.cuda, record.toolkit) == ("cuda", "2.14.1+cu130", "13.0", "13.0")


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"kind": "cpu"}', '{"kind": "cpu", "arch_list": []}'])
def test_a_record_that_is_missing_or_unreadable_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / BUILD_RECORD).write_text(text)
    assert BuildRecord.load(tmp_path) is None


def test_a_toolkit_tells_its_version_and_its_architectures_in_order(tmp_path: Path) -> None:
    home = cuda_home(tmp_path / "cuda")
    found, problem = find_cuda_toolkit({"CUDA_HOME": str(home)})
    assert found == CudaToolkit(
        home=str(home),
        nvcc=str(home / "bin" / "nvcc"),
        include=str(home / "include"),
        library=str(home / "lib64"),
        version="12.4",
        architectures=("8.0", "9.0", "10.0"),
    )
    assert problem == ""


def test_cuda_home_decides_even_where_path_has_an_nvcc(tmp_path: Path) -> None:
    on_path = cuda_home(tmp_path / "on_path")
    named = tmp_path / "named"
    found, problem = find_cuda_toolkit({"CUDA_HOME": str(named), "PATH": str(on_path / "bin")})
    assert found is None
    assert problem == f"CUDA_HOME={named} has no include/cuda_runtime_api.h"


def test_a_script_that_calls_nvcc_does_not_make_its_folder_a_toolkit(tmp_path: Path) -> None:
    real = cuda_home(tmp_path / "cuda")
    script = executable(tmp_path / "prefix" / "bin" / "nvcc", f'exec "{real}/bin/nvcc" "$@"')
    found, _ = find_cuda_toolkit({"PATH": str(script.parent)})
    assert found is None or found.home != str(tmp_path / "prefix")


def test_a_link_to_nvcc_leads_to_its_toolkit(tmp_path: Path) -> None:
    real = cuda_home(tmp_path / "cuda")
    link = tmp_path / "bin" / "nvcc"
    link.parent.mkdir()
    link.symlink_to(real / "bin" / "nvcc")
    found, _ = find_cuda_toolkit({"PATH": str(link.parent)})
    assert found is not None
    assert found.home == str(real)


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        ("include/cuda_runtime_api.h", "has no include/cuda_runtime_api.h"),
        ("lib64/libcudart_static.a", "has no libcudart_static.a"),
        ("bin/nvcc", "has no bin/nvcc"),
    ],
)
def test_a_toolkit_without_one_of_its_parts_is_none_and_the_part_is_named(
    tmp_path: Path, missing: str, problem: str
) -> None:
    home = cuda_home(tmp_path / "cuda")
    (home / missing).unlink()
    assert find_cuda_toolkit({"CUDA_PATH": str(home)}) == (None, f"CUDA_PATH={home} {problem}")


@pytest.mark.parametrize(
    ("line", "problem"), [("exit 3", "an nvcc that does not run"), ("true", "an nvcc that does not tell its version")]
)
def test_an_nvcc_that_fails_or_says_nothing_is_no_toolkit(tmp_path: Path, line: str, problem: str) -> None:
    home = cuda_home(tmp_path / "cuda")
    executable(home / "bin" / "nvcc", line)
    found, told = find_cuda_toolkit({"CUDA_HOME": str(home)})
    assert found is None
    assert problem in told


@pytest.mark.parametrize(
    ("says", "family", "release"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "g++", 12),
        ("g++ (GCC) 11.4.1 20231218 (Red Hat 11.4.1-3)", "g++", 11),
        ("x86_64-conda-linux-gnu-c++ (conda-forge gcc 13.3.0-1) 14.3.0", "g++", 14),
        ("Debian clang version 14.0.6", "clang++", 14),
        ("clang version 18.1.8 (https://example.org/llvm 3b5b5c1ec4a3095ab096dd780e84d7ab81f3d7ff)", "clang++", 18),
        ("Intel(R) oneAPI DPC++/C++ Compiler 2024.1.0 (2024.1.0.20240308)", "", 2024),
        ("what it is", "", 0),
    ],
)
def test_a_compiler_is_known_by_what_it_says(tmp_path: Path, says: str, family: str, release: int) -> None:
    more = "Copyright (C) 2026 Free Software Foundation, Inc." if family == "g++" else "Target: x86_64"
    path = executable(tmp_path / "c++", f"echo '{says}'", f"echo '{more}'")
    assert inspect_compiler(str(path)) == Compiler(str(path), family, release, says)


def test_a_compiler_that_does_not_run_is_taken_as_it_is(tmp_path: Path) -> None:
    found = inspect_compiler(str(executable(tmp_path / "c++", "exit 3")))
    assert (found.family, found.release) == ("", 0) and "does not run (" in found.version and "3" in found.version


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("#if __GNUC__ > 13\n#error\n#if (__clang_major__ >= 18) || (__clang_major__ < 3)\n", (13, 17)),
        ("#if (__GRCO_CLANG_COMPILER__ == 1) && ((__clang_major__ < 16) || (__clang_major__ > 20))\n", (None, 20)),
        ("#if __GNUC__ > 8\n", (8, None)),
        ("", (None, None)),
    ],
)
def test_the_bounds_for_compilers_are_those_of_nvcc_s_header(
    tmp_path: Path, text: str, bounds: tuple[int | None, int | None]
) -> None:
    home = cuda_home(tmp_path / "cuda")
    (home / "include" / "crt").mkdir()
    (home / "include" / "crt" / "host_config.h").write_text(text)
    found, _ = find_cuda_toolkit({"CUDA_HOME": str(home)})
    assert found and (found.newest_gcc, found.newest_clang) == bounds


def test_the_bounds_of_the_toolkit_that_is_here_are_those_that_nvidia_documents() -> None:
    found, problem = find_cuda_toolkit()
    documented = {"13.0": (15, 20), "12.8": (14, 19), "12.6": (13, 18), "12.4": (13, 17)}
    if found is None or found.version not in documented:
        pytest.skip(problem or f"no figures for CUDA {found and found.version}")
    assert (found.newest_gcc, found.newest_clang) == documented[found.version]


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ({}, "+torch2.14cu130"),
        ({"torch": Torch("2.13.0a0+git12", "13.2")}, "+torch2.13cu132"),
        ({"torch": Torch("2.12.1+cu126", "12.6"), "toolkit": CUDA_12_4}, "+torch2.12cu126"),
        (CPU_TORCH, "+torch2.13cpu"),
        (NO_TOOLKIT, "+torch2.14cpu"),
        ({"torch": Torch("2.13.0", hip="7.0")}, "+torch2.13cpu"),
        (NO_COMPILER, ""),
        ({"torch": None}, ""),
    ],
)
def test_a_wheel_is_called_by_what_its_extension_needs(
    tmp_path: Path, differences: dict[str, object], expected: str
) -> None:
    found = facts(**differences)
    assert local_version(make_plan(found), found, tmp_path) == expected
    (tmp_path / "PKG-INFO").touch()
    assert local_version(make_plan(found), found, tmp_path) == ""


def compiler_at(environ: dict[str, str]) -> str | None:
    found, _ = find_compiler(environ)
    return found.path if found else None


def test_cxx_decides_the_compiler_and_a_launcher_before_it_is_looked_through(tmp_path: Path) -> None:
    ours = executable(tmp_path / "our-cxx")
    assert compiler_at({"CXX": str(ours), "PATH": ""}) == str(ours)
    assert compiler_at({"CXX": f"ccache {ours} -m64", "PATH": ""}) == str(ours)


def test_a_cxx_that_is_not_there_is_not_replaced_by_another_compiler() -> None:
    path = os.environ["PATH"]
    assert find_compiler({"CXX": "no-such-c++", "PATH": path}) == (None, "CXX=no-such-c++ is not there")


def test_a_path_without_a_compiler_has_none(tmp_path: Path) -> None:
    assert find_compiler({"PATH": str(tmp_path)}) == (None, "there is no C++ compiler")


def test_the_facts_of_this_machine_agree_with_the_torch_that_runs() -> None:
    import torch

    found = gather_facts({**os.environ, "OVERFLOWSTAT_EXT": "cpu", "TORCH_CUDA_ARCH_LIST": "8.0"})
    assert found.torch == Torch(torch.__version__, torch.version.cuda, torch.version.hip)
    assert (found.wanted, found.arch_list, found.platform) == ("cpu", "8.0", sys.platform)


def test_torch_is_found_where_only_a_pth_file_leads_to_it(tmp_path: Path) -> None:
    """As in pip's build isolation: nothing of the environment is on sys.path, yet its folders are known."""
    elsewhere = tmp_path / "elsewhere" / "torch"
    elsewhere.mkdir(parents=True)
    (elsewhere / "__init__.py").write_text("raise AssertionError('torch was imported to find out its version')")
    (elsewhere / "version.py").write_text("__version__ = '2.99.0+cu131'\ncuda = '13.1'\nhip = None\n")
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "leads_to_torch.pth").write_text(f"{elsewhere.parent}\n")
    program = f"""
import importlib.util, sys
folder = {str(Path(str(building.__file__)).parent)!r}
spec = importlib.util.spec_from_file_location("by_path", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["by_path"] = importlib.util.module_from_spec(spec)
module = importlib.import_module("by_path.installed_torch")
module._package_folders = lambda: [{str(packages)!r}]
print(module.find_torch())
"""
    run = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "Torch(version='2.99.0+cu131', cuda='13.1', hip=None)", run.stderr

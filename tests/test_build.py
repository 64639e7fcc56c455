"""Real installations, in environments of their own: what was built, and what is said where less than all was.

An environment is a virtual one with links to the packages of the Python that runs the tests, so that torch costs
nothing. Each test asks `python -m overflowstat env` outside the source folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import commands
from fake_toolkit import cuda_home, executable

from overflowstat.building.plan import gather_facts, make_plan
from overflowstat.building.record import BUILD_RECORD, BuildRecord, python_tag

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = Path(sysconfig.get_paths()["purelib"])
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "overflowstat", "csrc")
BUILT_HERE = ("__pycache__", "*.so", BUILD_RECORD)
ARCHITECTURE = "9.0+PTX"  # one, to spare time: the installation that runs these tests has them all
PLANNED = make_plan(gather_facts({"PATH": os.environ["PATH"], "TORCH_CUDA_ARCH_LIST": ARCHITECTURE}))

needs_cuda_torch = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
PIP_INSTALL = "pip install --no-deps --no-build-isolation"
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Install:
    """A virtual environment, a copy of the sources, and an empty folder to be in."""

    venv: Path
    source: Path
    elsewhere: Path

    def run(self, *command: str, **environ: str | None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment; a variable that is None is removed."""
        return self._run([str(self.venv / "bin" / command[0]), *command[1:]], self.elsewhere, environ)

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a line of the documentation, in the source folder."""
        return self._run(["bash", "-c", command], self.source, {})

    def _run(
        self, command: list[str], folder: Path, environ: dict[str, str | None]
    ) -> subprocess.CompletedProcess[str]:
        named = {
            "PATH": f"{self.venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "MAX_JOBS": "2",
            "TORCH_CUDA_ARCH_LIST": ARCHITECTURE,
            **dict.fromkeys(("PYTHONPATH", "VIRTUAL_ENV", "OVERFLOWSTAT_EXT", "CUDA_HOME", "CUDA_PATH", "CXX")),
            **environ,
        }
        return subprocess.run(
            command,
            cwd=folder,
            env={name: value for name, value in {**os.environ, **named}.items() if value is not None},
            capture_output=True,
            text=True,
            check=False,
        )

    def pip(self, *arguments: str, **environ: str | None) -> subprocess.CompletedProcess[str]:
        return self.run("python", "-m", "pip", *arguments, **environ)

    def install(self, *arguments: str, **environ: str | None) -> None:
        done = self.pip("install", "--no-deps", *arguments, **environ)
        assert done.returncode == 0, done.stdout + done.stderr

    def env(self) -> dict[str, Any]:
        asked = self.run("python", "-m", "overflowstat", "env", "--json")
        assert asked.returncode == 0, asked.stderr
        told: dict[str, Any] = json.loads(asked.stdout)
        return told

    def import_it(self, **environ: str | None) -> subprocess.CompletedProcess[str]:
        """Import the package and use it on a tensor; prints its folder and the largest magnitude."""
        return self.run(
            "python",
            "-c",
            "import torch, overflowstat; print(overflowstat.__path__[0]);"
            "print(overflowstat.tensor_stats(torch.tensor([3.0, -4.0])).abs_max)",
            **environ,
        )


def make_environment(folder: Path, without: Callable[[str], bool]) -> Path:
    """A virtual environment with links to the packages of this Python, and to its ninja, without ours and those named.

    With another ninja than build isolation brings along, each would begin the other's build anew.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for package in PACKAGES.iterdir():
        ours = "overflowstat" in package.name or package.name.endswith((".pth", ".egg-link"))
        if not ours and not without(package.name):
            (site_packages / package.name).symlink_to(package)
    executable(folder / "bin" / "pip", 'exec "$(dirname "$0")/python" -m pip "$@"')
    (folder / "bin" / "ninja").symlink_to(Path(sysconfig.get_path("scripts")) / "ninja")
    return folder


def copy_sources(folder: Path) -> Path:
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(*BUILT_HERE))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    (folder / "README.md").touch()
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Install]:
    """One environment and one copy of the sources for all, so that each source file is compiled once."""
    folder = tmp_path_factory.mktemp("build")
    venv = make_environment(folder / "venv", without=lambda name: False)
    (folder / "elsewhere").mkdir()
    yield Install(venv, copy_sources(folder / "source"), folder / "elsewhere")
    shutil.rmtree(folder)


@pytest.fixture
def fresh(shared: Install) -> Iterator[Install]:
    """The shared environment with nothing of ours installed, and sources that nothing was built in."""
    yield shared
    shared.pip("uninstall", "-y", "overflowstat")
    for name in BUILT_HERE:
        for left in (shared.source / "overflowstat").glob(name):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    for left in [
        *shared.source.glob("*.egg-info"),
        *shared.source.glob("build/[bl]*"),
        *map(shared.source.joinpath, ("dist", "wheels")),
    ]:
        shutil.rmtree(left, ignore_errors=True)
    assert shared.run("python", "-c", "import overflowstat").returncode == 1


@pytest.fixture
def fake_cuda(tmp_path: Path) -> Callable[..., str]:
    return lambda **told: str(cuda_home(tmp_path / "cuda", **told))


def assert_built_as_planned(fresh: Install) -> None:
    told = fresh.env()
    assert told["extension"] == told["built"]["kind"] == PLANNED.kind
    assert told["built"]["torch"] == torch.__version__
    assert told["built"]["cuda"] == torch.version.cuda
    assert told["built"]["arch_list"] == list(PLANNED.architectures)
    assert told["reason"] == ("" if PLANNED.kind == "cuda" or torch.version.cuda is None else told["reason"])


def test_an_install_without_build_isolation_gives_all_that_this_machine_allows(fresh: Install) -> None:
    fresh.install("--no-build-isolation", str(fresh.source))
    assert_built_as_planned(fresh)
    used = fresh.import_it()
    assert used.stdout.splitlines() == [str(next(fresh.venv.glob("lib/*/site-packages")) / "overflowstat"), "4.0"]
    assert "NativeWarning" not in used.stderr or PLANNED.kind != "cuda"


def test_an_install_in_build_isolation_is_built_for_the_torch_that_will_run_it(fresh: Install, tmp_path: Path) -> None:
    reachable = fresh.pip("download", "--no-deps", "-q", "-d", str(tmp_path), "setuptools", "ninja")
    if reachable.returncode != 0:
        pytest.skip("no package index to isolate a build with")
    fresh.install(str(fresh.source))
    assert_built_as_planned(fresh)


def test_an_editable_install_has_its_extension_and_its_record_in_the_source_folder(fresh: Install) -> None:
    fresh.install("--no-build-isolation", "-e", str(fresh.source))
    assert_built_as_planned(fresh)
    assert fresh.import_it().stdout.splitlines() == [str(fresh.source / "overflowstat"), "4.0"]
    assert (fresh.source / "overflowstat" / BUILD_RECORD).is_file()


def test_a_wheel_holds_the_extension_and_its_record_and_installs(fresh: Install) -> None:
    kind = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" if PLANNED.kind != "none" else "lib"
    of_an_earlier_build = fresh.source / "build" / kind / "overflowstat" / "gone.py"
    of_an_earlier_build.parent.mkdir(parents=True)
    of_an_earlier_build.touch()
    done = fresh.run("python", "-m", "build", "--wheel", "--no-isolation", str(fresh.source))
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (fresh.source / "dist").glob("*.whl")
    gpu = f"cu{torch.version.cuda.replace('.', '')}" if PLANNED.kind == "cuda" and torch.version.cuda else "cpu"
    assert wheel.name.startswith(f"overflowstat-0.1.0+torch{'.'.join(torch.__version__.split('.')[:2])}{gpu}-cp")
    names = zipfile.ZipFile(wheel).namelist()
    assert f"overflowstat/{BUILD_RECORD}" in names
    assert "overflowstat/py.typed" in names and "overflowstat/gone.py" not in names
    assert {f"overflowstat/plotting/page.{kind}" for kind in ("css", "html", "js")} <= set(names)
    assert sum(name.startswith("overflowstat/_C.") and name.endswith(".so") for name in names) == 1
    assert not [name for name in names if name.startswith(("csrc", "tests"))]
    fresh.install(str(wheel))
    assert_built_as_planned(fresh)


GUIDE = "docs/building.md"
INSTALLING = [line for line in commands(GUIDE) if "pip install" in line and "wheels/" not in line]


@pytest.mark.parametrize("command", INSTALLING)
def test_a_command_of_the_guide_installs_what_it_says(fresh: Install, command: str) -> None:
    # Isolation has a test of its own, and needs an index.
    done = fresh.shell(command.replace("--no-build-isolation ", "").replace("pip install", PIP_INSTALL))
    if "=cuda" in command and PLANNED.kind != "cuda":
        assert done.returncode == 1 and "overflowstat: OVERFLOWSTAT_EXT=cuda is not possible: " in done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    told = fresh.env()
    assert told["extension"] == PLANNED.kind
    listed = re.match('TORCH_CUDA_ARCH_LIST="(.*?)"', command)
    wanted = listed[1].split(";") if listed and PLANNED.kind == "cuda" else list(PLANNED.architectures)
    assert told["built"]["arch_list"] == wanted
    assert fresh.import_it().stdout.splitlines()[0].startswith(str(fresh.source if "-e ." in command else fresh.venv))


def test_the_guide_s_wheel_is_built_carried_and_refuses_another_torch(fresh: Install, tmp_path: Path) -> None:
    build, install = (line for line in commands(GUIDE) if "wheels" in line)
    done = fresh.shell(build)
    if PLANNED.kind != "cuda":
        assert done.returncode == 1 and "OVERFLOWSTAT_EXT=cuda is not possible: " in done.stderr
        done = fresh.shell(build.replace("OVERFLOWSTAT_EXT=cuda", "OVERFLOWSTAT_EXT=cpu"))
    assert done.returncode == 0, done.stdout + done.stderr
    done = fresh.shell(install)
    assert done.returncode == 0, done.stdout + done.stderr
    told = fresh.env()
    (wheel,) = (fresh.source / "wheels").glob("*.whl")
    assert told["overflowstat"] == wheel.name.split("-")[1]
    assert told["extension"] == told["built"]["kind"] == PLANNED.kind
    if PLANNED.kind == "cuda":
        assert told["built"]["arch_list"] == ["8.0", "9.0"]

    other = another_torch(tmp_path / "other", "2.99.0")
    used = fresh.import_it(PYTHONPATH=str(other))
    assert used.stdout.splitlines()[1] == "4.0", used.stderr
    sentence = f"its extension was built for torch {torch.__version__}, and this is torch 2.99.0; python -m pip install"
    assert used.stderr.count("NativeWarning") == 1 and sentence in used.stderr
    asked = fresh.run("python", "-m", "overflowstat", "env", "--json", PYTHONPATH=str(other))
    assert json.loads(asked.stdout)["extension"] == "none" and sentence in json.loads(asked.stdout)["reason"]


def another_torch(folder: Path, version: str) -> Path:
    """A folder with the torch that is here, which says that it is another."""
    (folder / "torch").mkdir(parents=True)
    for part in Path(torch.__file__).parent.iterdir():
        if part.name not in ("version.py", "__pycache__"):
            (folder / "torch" / part.name).symlink_to(part)
    text = (Path(torch.__file__).parent / "version.py").read_text()
    (folder / "torch" / "version.py").write_text(f"{text}\n__version__ = {version!r}\n")
    return folder


def test_the_guide_s_other_commands_run(fresh: Install) -> None:
    fresh.install("--no-build-isolation", str(fresh.source), OVERFLOWSTAT_EXT="none")
    others = [line for line in commands(GUIDE) if line not in INSTALLING and "wheels" not in line]
    assert len(others) + len(INSTALLING) + 2 == len(commands(GUIDE)) and set(others) == {
        "python -m overflowstat env",
        "python -m overflowstat env --json > environment.json",
    }
    for command in others:
        done = fresh.shell(f"cd {fresh.elsewhere}; {command}")
        assert done.returncode == 0, done.stderr
    assert json.loads((fresh.elsewhere / "environment.json").read_text())["built"]["kind"] == "none"


def test_a_source_archive_holds_what_a_build_needs(fresh: Install) -> None:
    done = fresh.run("python", "-m", "build", "--sdist", "--no-isolation", str(fresh.source), OVERFLOWSTAT_EXT="none")
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = (fresh.source / "dist").glob("*.tar.gz")
    assert archive.name == "overflowstat-0.1.0.tar.gz"
    with tarfile.open(archive) as held:
        names = {name.partition("/")[2] for name in held.getnames()}
    needed = {path.relative_to(fresh.source).as_posix() for path in (fresh.source / "csrc").rglob("*.*")}
    assert len(needed) > 5
    needed |= {f"overflowstat/plotting/page.{kind}" for kind in ("css", "html", "js")}
    needed |= {"setup.py", "pyproject.toml", "LICENSE", "overflowstat/building/plan.py", "overflowstat/py.typed"}
    assert needed <= names
    fresh.install("--no-build-isolation", str(archive), OVERFLOWSTAT_EXT="none")
    assert fresh.env()["built"]["kind"] == "none"


@pytest.mark.parametrize("how", [(), ("-e",)], ids=["plain", "editable"])
def test_without_a_compiler_the_package_works_on_plain_torch_and_says_why(fresh: Install, how: tuple[str, ...]) -> None:
    fresh.install("--no-build-isolation", *how, str(fresh.source), PATH=str(fresh.venv / "bin"))
    told = fresh.env()
    assert told["extension"] == told["built"]["kind"] == "none"
    assert "there is no C++ compiler; install g++ or set CXX, then python -m pip install" in told["reason"]
    used = fresh.import_it()
    assert used.stdout.splitlines()[1] == "4.0"
    assert used.stderr.count("NativeWarning") == 1
    assert any(f"a build would give {PLANNED.kind} now" in problem["what"] for problem in told["problems"])


def test_an_editable_install_without_an_extension_does_not_use_one_left_by_an_earlier(fresh: Install) -> None:
    left = fresh.source / "overflowstat" / f"_C.{python_tag()}.so"
    left.write_bytes(b"not an extension")
    fresh.install("--no-build-isolation", "-e", str(fresh.source), OVERFLOWSTAT_EXT="none")
    told = fresh.env()
    assert told["extension"] == "none"
    assert "it was built with OVERFLOWSTAT_EXT=none" in told["reason"]


def test_the_source_folder_before_an_installed_package_is_told_apart(fresh: Install) -> None:
    fresh.install("--no-build-isolation", str(fresh.source), OVERFLOWSTAT_EXT="none")
    told = fresh.run("python", "-m", "overflowstat", "env", PYTHONPATH=str(fresh.source)).stdout
    assert f"this is the source folder {fresh.source}, which hides the package installed in {fresh.venv}" in told


@pytest.mark.parametrize("wanted", ["cuda", "cpu"])
def test_a_wanted_extension_that_cannot_be_built_stops_the_install_with_the_reason(fresh: Install, wanted: str) -> None:
    done = fresh.pip(
        "install",
        "--no-deps",
        "--no-build-isolation",
        str(fresh.source),
        PATH=str(fresh.venv / "bin"),
        OVERFLOWSTAT_EXT=wanted,
    )
    assert done.returncode == 1
    assert f"overflowstat: OVERFLOWSTAT_EXT={wanted} is not possible: there is no C++ compiler" in done.stderr


def test_a_value_that_overflowstat_ext_does_not_have_stops_the_install(fresh: Install) -> None:
    done = fresh.pip("install", "--no-build-isolation", str(fresh.source), OVERFLOWSTAT_EXT="gpu")
    assert done.returncode == 1
    assert "overflowstat: OVERFLOWSTAT_EXT=gpu is none of auto, cuda, cpu, none" in done.stderr


@needs_cuda_torch
def test_a_toolkit_of_another_major_version_gives_the_cpu_extension_and_says_both_versions(
    fresh: Install, fake_cuda: Callable[..., str]
) -> None:
    home = fake_cuda(version="11.8")
    fresh.install("--no-build-isolation", str(fresh.source), CUDA_HOME=home)
    told = fresh.env()
    assert told["extension"] == told["built"]["kind"] == "cpu"
    assert f"the CUDA toolkit in {home} is 11.8 and torch's CUDA is {torch.version.cuda}" in told["reason"]
    used = fresh.import_it()
    assert used.stdout.splitlines()[1] == "4.0"
    assert used.stderr.count("NativeWarning") == 1


@needs_cuda_torch
def test_cuda_torch_without_a_toolkit_gives_the_cpu_extension_and_says_so(fresh: Install, tmp_path: Path) -> None:
    fresh.install("--no-build-isolation", str(fresh.source), CUDA_HOME=str(tmp_path))
    told = fresh.env()
    assert told["extension"] == "cpu"
    assert f"CUDA_HOME={tmp_path} has no include/cuda_runtime_api.h; install the CUDA toolkit" in told["reason"]


@needs_cuda_torch
def test_an_architecture_that_nvcc_dropped_stops_the_install_before_anything_is_compiled(
    fresh: Install, fake_cuda: Callable[..., str]
) -> None:
    home = fake_cuda(version=str(torch.version.cuda))
    done = fresh.pip(
        "install", "--no-build-isolation", str(fresh.source), CUDA_HOME=home, TORCH_CUDA_ARCH_LIST="7.0;8.0"
    )
    assert done.returncode == 1
    supported = f"nvcc {torch.version.cuda} in {home} compiles for 8.0, 9.0, 10.0"
    assert f"7.0 has been dropped by this nvcc; {supported}" in done.stderr
    assert "ninja" not in done.stderr


def test_without_torch_the_install_works_and_says_what_is_missing(tmp_path: Path) -> None:
    venv = make_environment(tmp_path / "venv", without=lambda name: name.startswith(("torch", "functorch")))
    (tmp_path / "elsewhere").mkdir()
    bare = Install(venv, copy_sources(tmp_path / "source"), tmp_path / "elsewhere")
    bare.install("--no-build-isolation", str(bare.source))
    record = BuildRecord.load(next(venv.glob("lib/*/site-packages")) / "overflowstat")
    assert record is not None
    assert (record.kind, record.reason) == ("none", "torch was not installed when it was built")
    missing = "overflowstat needs torch 2.11 or newer, and there is none here: install it, then python -m pip install"
    said = bare.run("python", "-c", "import overflowstat; overflowstat.Monitor")
    assert said.returncode == 1 and said.stderr.count(f"NativeWarning: {missing}") == 1
    assert said.stderr.strip().splitlines()[-1].startswith(f"ImportError: {missing}")
    told = bare.run("python", "-m", "overflowstat", "env")
    assert told.returncode == 0 and f"\nproblem       {missing.partition(':')[0]}" in told.stdout
    shutil.rmtree(tmp_path)

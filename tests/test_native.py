"""What is said, and done, where the extension does not fit the torch that runs."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from overflowstat import native
from overflowstat.building.record import BUILD_RECORD, BuildRecord, python_tag
from overflowstat.native import NativeWarning, what_is_lacking

CUDA_BUILD = BuildRecord(
    kind="cuda",
    reason="",
    remedy="",
    torch="2.14.1+cu130",
    cuda="13.0",
    toolkit="13.0",
    arch_list=("8.0",),
    python=python_tag(),
)
CPU_BUILD = dataclasses.replace(
    CUDA_BUILD, kind="cpu", reason="no CUDA toolkit was found", remedy="set CUDA_HOME", toolkit=None, arch_list=()
)
NO_BUILD = dataclasses.replace(
    CPU_BUILD, kind="none", reason="there is no C++ compiler", remedy="install g++", torch=None, cuda=None
)


@pytest.mark.parametrize(
    ("record", "torch_version", "torch_gpu"),
    [
        (CUDA_BUILD, "2.14.1+cu130", "13.0"),
        (CUDA_BUILD, "2.14.0+cu132", "13.2"),
        (dataclasses.replace(CPU_BUILD, torch="2.13.0+cpu", cuda=None), "2.13.1+cpu", None),
        (CPU_BUILD, "2.14.1+cpu", None),
    ],
)
def test_nothing_is_lacking_where_the_build_fits(
    record: BuildRecord, torch_version: str, torch_gpu: str | None
) -> None:
    assert what_is_lacking(record, torch_version, torch_gpu) is None


@pytest.mark.parametrize(
    ("record", "torch_version", "torch_gpu", "what"),
    [
        (None, "2.14.1", "13.0", "its extension was never built here"),
        (NO_BUILD, "2.14.1", "13.0", "there is no C++ compiler"),
        (CUDA_BUILD, "2.13.0+cu130", "13.0", "built for torch 2.14.1+cu130, and this is torch 2.13.0+cu130"),
        (CUDA_BUILD, "3.14.1", "13.0", "built for torch 2.14.1+cu130, and this is torch 3.14.1"),
        (CPU_BUILD, "2.15.0", None, "built for torch 2.14.1+cu130, and this is torch 2.15.0"),
        (CUDA_BUILD, "2.14.1+cpu", None, "for CUDA 13.0, and torch 2.14.1[+]cpu is built without CUDA"),
        (CUDA_BUILD, "2.14.1+cu128", "12.8", "for CUDA 13.0, and torch 2.14.1[+]cu128 is built for CUDA 12.8"),
        (dataclasses.replace(CUDA_BUILD, python="cpython-39-x"), "2.14.1", "13.0", "built for cpython-39-x, and this"),
    ],
)
def test_an_extension_that_does_not_fit_is_not_used_and_both_sides_are_named(
    record: BuildRecord | None, torch_version: str, torch_gpu: str | None, what: str
) -> None:
    lack = what_is_lacking(record, torch_version, torch_gpu)
    assert lack is not None
    assert what.replace("[+]", "+") in lack.what
    assert not lack.usable


def test_an_extension_without_cuda_under_a_torch_with_cuda_is_used_and_the_loss_is_told() -> None:
    lack = what_is_lacking(CPU_BUILD, "2.14.1+cu130", "13.0")
    assert lack == native.Lack("no CUDA toolkit was found", "set CUDA_HOME", usable=True)


@pytest.fixture
def fresh() -> Iterator[None]:
    """The extension looked for anew, before and after the test."""
    native._status_and_warning.cache_clear()
    yield
    native._status_and_warning.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_a_lack_is_told_once_in_one_sentence_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BuildRecord, "load", staticmethod(lambda folder: NO_BUILD))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert native.load() is None
        assert native.load() is None
        assert native.reason()
    assert [warning.category for warning in told] == [NativeWarning]
    assert str(told[0].message) == f"overflowstat {native.reason()}"
    assert native.reason().startswith("runs without its C++ extension")
    assert "there is no C++ compiler; install g++, then python -m pip install" in native.reason()
    assert "\n" not in native.reason()


@pytest.mark.usefixtures("fresh")
def test_nothing_is_told_where_nothing_is_lacking() -> None:
    record = BuildRecord.load(native.PACKAGE)
    assert record is not None
    if record.kind == "cpu" and torch.version.cuda:
        pytest.skip(f"CUDA is lacking here: {record.reason}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", NativeWarning)
        module = native.load()
    assert module is not None, native.reason()
    assert native.reason() == ""


@pytest.mark.usefixtures("fresh")
def test_an_extension_that_does_not_import_is_told_with_the_loader_s_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    record = dataclasses.replace(CPU_BUILD, torch=torch.__version__, reason="", remedy="")
    monkeypatch.setattr(BuildRecord, "load", staticmethod(lambda folder: record))

    def fail(name: str) -> None:
        raise ImportError("libc10_cuda.so: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.warns(NativeWarning, match="does not import .libc10_cuda.so: cannot open shared object file"):
        assert native.load() is None


def test_the_extension_runs_on_the_threads_that_torch_has() -> None:
    """A second OpenMP runtime would bring a second pool, and twice as many threads as cores."""
    program = """
import os
import torch
from overflowstat import native

def here():
    mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
    return sorted(path for path in mapped if "omp" in os.path.basename(path)), len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
tensor = torch.ones(2**22)
tensor.sum()
before = here()
native.load().record([tensor]).rows()
assert here() == before, (before, here())
assert torch.get_num_threads() == 3
print(len(before[0]))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout == "1\n", run.stderr


class InstalledAt:
    """As much of a distribution's metadata as is asked for."""

    def __init__(self, folder: Path, direct_url: str | None = None) -> None:
        self._folder = folder
        self._direct_url = direct_url

    def locate_file(self, name: str) -> Path:
        return self._folder / name

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._direct_url


def test_a_source_folder_that_hides_an_installed_package_is_named_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "overflowstat").mkdir()
    (tmp_path / "overflowstat" / "__init__.py").touch()
    monkeypatch.setattr(native, "_distributions", lambda: [InstalledAt(native.PACKAGE.parent), InstalledAt(tmp_path)])
    said = native._sentence(native.Lack("its extension was never built here"))
    assert f"source folder {native.PACKAGE.parent}, which hides the package installed in {tmp_path};" in said


@pytest.mark.parametrize(
    ("direct_url", "target"),
    [
        ('{"dir_info": {}, "url": "file:///home/me/a%20folder"}', "/home/me/'a folder'"),
        ('{"archive_info": {}, "url": "file:///wheels/overflowstat-0.1.0.whl"}', "--no-cache-dir overflowstat"),
        (None, "--no-cache-dir overflowstat"),
    ],
)
def test_the_command_installs_from_where_the_package_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_url: str | None, target: str
) -> None:
    monkeypatch.setattr(native, "PACKAGE", tmp_path / "overflowstat")
    monkeypatch.setattr(native, "_distributions", lambda: [InstalledAt(tmp_path, direct_url)])
    assert native.mend_command() == f"python -m pip install --force-reinstall --no-deps {target}"


def test_the_command_installs_a_source_folder_with_e(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "setup.py").touch()
    monkeypatch.setattr(native, "PACKAGE", tmp_path / "overflowstat")
    assert native.mend_command() == f"python -m pip install --force-reinstall --no-deps -e {tmp_path}"


def in_a_copy(folder: Path, program: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program that imports the package from a copy in this folder."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_the_package_with_a_build_for_another_torch_warns_once_and_never_imports_the_extension(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "overflowstat"
    shutil.copytree(native.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    record = BuildRecord.load(copy)
    assert record is not None, native.reason()
    dataclasses.replace(record, kind="cpu", torch="2.0.1").save(copy)
    run = in_a_copy(tmp_path, "import sys, overflowstat; print('overflowstat._C' in sys.modules)")
    assert run.stdout == "False\n", run.stderr
    assert run.stderr.count("NativeWarning") == 1
    assert f"built for torch 2.0.1, and this is torch {torch.__version__}; python -m pip install" in run.stderr


def test_importing_a_package_that_was_never_built_warns_once_and_works_on_plain_torch(tmp_path: Path) -> None:
    copy = tmp_path / "overflowstat"
    shutil.copytree(native.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so", BUILD_RECORD))
    run = in_a_copy(
        tmp_path, "import torch, overflowstat; print(overflowstat.tensor_stats(torch.tensor([3.0, -4.0])).abs_max)"
    )
    assert run.stdout == "4.0\n", run.stderr
    assert run.stderr.count("NativeWarning") == 1
    assert "never built here; python -m pip install" in run.stderr


@pytest.mark.parametrize(
    ("version", "said"), [(None, "and there is none here"), ("2.10.1", "and this is 2.10.1: install a newer one")]
)
def test_without_a_torch_it_can_use_the_package_warns_and_what_is_taken_from_it_fails_in_the_same_sentence(
    tmp_path: Path, version: str | None, said: str
) -> None:
    shutil.copytree(native.PACKAGE, tmp_path / "overflowstat", ignore=shutil.ignore_patterns("__pycache__"))
    if version is not None:
        (tmp_path / "torch.py").write_text(f"__version__ = {version!r}")
    hide_torch = "import sys; sys.modules['torch'] = None; " if version is None else ""
    run = in_a_copy(tmp_path, hide_torch + "from overflowstat import Monitor")
    assert run.returncode == 1
    sentence = f"overflowstat needs torch 2.11 or newer, {said}"
    assert run.stderr.count(f"NativeWarning: {sentence}") == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {sentence}") and "python -m pip install" in last

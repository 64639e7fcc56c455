"""Builds overflowstat._C as far as this machine allows; overflowstat/building/ decides how far, and why."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
VERSION = "0.1.0"


def load(name: str) -> ModuleType:
    """A file of the package's folder `building`, which cannot be imported by name before the package is installed."""
    alias = "overflowstat_building"
    if alias not in sys.modules:
        folder = ROOT / "overflowstat" / "building"
        spec = importlib.util.spec_from_file_location(
            alias, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules[alias] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{alias}.{name}")


record = load("record")
facts = load("plan").gather_facts()
try:
    plan = load("plan").make_plan(facts)
except load("errors").BuildError as error:
    sys.exit(f"overflowstat: {error}")


class WriteBuildRecord(Command):
    """Leaves what was built beside the package: in the wheel, or in the source folder for an editable install.

    A build step of its own, after the compilers, so that one place serves every kind of build, and none that failed.
    """

    description = "write what was built, and why not more"
    user_options: list[tuple[str, str | None, str]] = []
    editable_mode = False  # set by setuptools

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def _folder(self) -> Path:
        return (ROOT if self.editable_mode else Path(str(self.build_lib))) / "overflowstat"

    def run(self) -> None:
        self._folder().mkdir(parents=True, exist_ok=True)
        record.make_record(plan, facts).save(self._folder())

    def get_source_files(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return [str(self._folder() / record.BUILD_RECORD)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands = [*build.sub_commands, ("write_build_record", None)]

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)  # or a wheel has modules that are gone since the last build
        super().run()


class SourceArchive(sdist):
    """Of the version alone: it is built for nothing yet."""

    def finalize_options(self) -> None:
        self.distribution.metadata.version = VERSION
        super().finalize_options()


commands: dict[str, type[Command]] = {"build": Build, "sdist": SourceArchive, "write_build_record": WriteBuildRecord}
extensions: list[Extension] = []


def csrc(*suffixes: str) -> list[str]:
    """The files of these kinds; what is in csrc/cuda only where it is wanted."""
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in suffixes]
    return [path.as_posix() for path in paths if plan.kind == "cuda" or path.parts[1] != "cuda"]


if plan.kind != "none":
    # torch compiles with CXX but links with what Python was built by: one compiler for both.
    os.environ.setdefault("CXX", facts.compiler.path)
    if plan.kind == "cuda":
        os.environ["CUDA_HOME"] = facts.toolkit.home  # read when torch.utils.cpp_extension is imported
    from torch.utils import cpp_extension

    native = Extension(
        "overflowstat._C",
        csrc(".cpp", ".cu"),
        depends=csrc(".h", ".cuh"),
        language="c++",
        include_dirs=[str(ROOT / "csrc"), *cpp_extension.include_paths()],
        library_dirs=cpp_extension.library_paths(),
        libraries=["c10", "torch_cpu", "torch_python"],
        extra_compile_args={
            # at::parallel_for is inline and runs serially where OpenMP is off. It is on for the compiler alone: without
            # libgomp on the link line its calls go to the copy that torch bundles, so that there is one pool of threads
            # and not two.
            "cxx": ["-O3", "-fvisibility=hidden", "-ffp-contract=off", "-fopenmp"],
        },
        extra_link_args=["-s"],
    )
    if plan.kind == "cuda":
        native.define_macros.append(("OVERFLOWSTAT_WITH_CUDA", "1"))
        if facts.toolkit.include != "/usr/include":
            native.include_dirs.append(facts.toolkit.include)
        native.library_dirs.append(facts.toolkit.library)
        # The static runtime is the one that this nvcc writes calls for, whatever minor version torch brings along.
        native.libraries += ["c10_cuda", "cudart_static", "rt", "dl", "pthread"]
        native.extra_link_args.append("-Wl,--exclude-libs,ALL")
        native.extra_compile_args["nvcc"] = [
            "-O3",
            "-fmad=false",
            "--threads=0",
            f"-ccbin={facts.compiler.path}",
            "-Xcompiler=-fvisibility=hidden",
            *load("architectures").nvcc_architecture_flags(plan.architectures),
        ]
    extensions.append(native)

    class BuildNative(cpp_extension.BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            # Kept for the next build also where setuptools would take a new folder every time (editable installs).
            flavour = f"{record.python_tag()}-torch-{facts.torch.version}-{plan.kind}"
            self.build_temp = str(ROOT / "build" / f"temp-{flavour}")

        def run(self) -> None:
            try:
                super().run()
            except Exception as error:
                less = "OVERFLOWSTAT_EXT=cpu builds without CUDA, " if plan.kind == "cuda" else ""
                raise RuntimeError(
                    f"overflowstat: the {plan.kind} extension did not compile with {facts.compiler.path} "
                    f"against torch {facts.torch.version}, see above; {less}OVERFLOWSTAT_EXT=none builds without any"
                ) from error

    commands["build_ext"] = BuildNative

print(f"overflowstat: extension {plan.kind}" + (f" ({plan.reason})" if plan.reason else ""), file=sys.stderr)
version = VERSION + load("local_version").local_version(plan, facts, ROOT)
setup(version=version, ext_modules=extensions, cmdclass=commands)

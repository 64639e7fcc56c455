"""How tests run scripts, with and without `overflowstat run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Ended", "Server", "python", "write"]

HERE = Path(__file__).parent
ENVIRONMENT = {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", "OVERFLOWSTAT_OPTIONS": ""}


@dataclass(frozen=True)
class Ended:
    """A process has."""

    status: int
    """Negative where a signal ended it."""
    output: str
    errors: str
    told: list[str] = field(init=False)
    """What overflowstat wrote to stderr."""
    others: str = field(init=False)
    """What else is there."""

    def __post_init__(self) -> None:
        lines = self.errors.splitlines(keepends=True)
        object.__setattr__(self, "told", [line.rstrip("\n") for line in lines if line.startswith("overflowstat: ")])
        object.__setattr__(self, "others", "".join(line for line in lines if not line.startswith("overflowstat: ")))


class Server:
    """Runs `overflowstat run` many times for the price of one import of torch; see run_server.py."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "run_server.py")],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, folder: Path, *arguments: str, environment: Mapping[str, str] = {}, stdin: Path | str = os.devnull
    ) -> Ended:
        output, errors = self._folder / "output", self._folder / "errors"
        wanted = {
            "arguments": arguments,
            "folder": str(folder),
            "environment": dict(environment),
            "input": str(stdin),
            "output": str(output),
            "errors": str(errors),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return Ended(status, output.read_text(), errors.read_text())

    def close(self) -> None:
        self._process.communicate(timeout=60)


def python(
    folder: Path,
    *arguments: str,
    environment: Mapping[str, str] = {},
    stdin: Path | str = os.devnull,
    timeout: int = 120,
) -> Ended:
    """Of a process that begins from nothing."""
    with open(stdin) as file:
        ended = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, **environment},
            stdin=file,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path

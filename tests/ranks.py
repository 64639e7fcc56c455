"""Scenarios in several processes of a group, for the price of one import of torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from running import ENVIRONMENT, HERE

__all__ = ["GLOO_ENDS", "LONG", "RankServer", "free_port"]

LONG = 60.0  # seconds, after which a rank hangs

# Last in a script. Gloo's thread still holds the work of the last backward, and with that, from torch 2.14 on, a Python
# object. A process that ends before it has let go of that aborts ("terminate called without an active exception").
GLOO_ENDS = "\nimport time\ntime.sleep(1)\n"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


class RankServer:
    """See rank_server.py."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = 0
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "rank_server.py")],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        scenario: Callable[..., Any],
        *arguments: Any,
        size: int = 2,
        missing: int = 0,
        seconds: float = LONG,
        group: bool = True,
        environment: Mapping[str, str] = {},
    ) -> list[Any]:
        """What a function of rank_scenarios.py gives on each rank.

        The last `missing` ones are meant to end otherwise, and give None.
        """
        folder = self.start(
            scenario, *arguments, size=size, missing=missing, seconds=seconds, group=group, environment=environment
        )
        return self.results(folder, size, missing)

    def start(self, scenario: Callable[..., Any], *arguments: Any, **how: Any) -> Path:
        """Without waiting for the end."""
        folder = self.next_folder
        folder.mkdir(exist_ok=True)
        self._runs += 1
        place = {"module": scenario.__module__, "scenario": scenario.__name__}
        wanted = {**place, "arguments": arguments, "folder": str(folder), **how}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        return folder

    @property
    def next_folder(self) -> Path:
        """Of the run that comes."""
        return self._folder / str(self._runs)

    def results(self, folder: Path, size: int, missing: int) -> list[Any]:
        assert self._process.stdout is not None
        statuses = json.loads(self._process.stdout.readline())
        for rank in range(size - missing):
            assert statuses[rank] == 0, (statuses, (folder / f"{rank}.errors").read_text())
        paths = [folder / f"{rank}.json" for rank in range(size)]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]

    def output(self, run: int = -1) -> str:
        """What all ranks of a run have printed."""
        return (self._folder / str(self._runs - 1 if run < 0 else run) / "output").read_text()

    def close(self) -> None:
        self._process.communicate(timeout=60)

"""What the benchmarks share: interleaved timing, medians with their spread, and a word on the machine."""

import datetime
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overflowstat import environment, native

__all__ = ["Timing", "interleaved", "machine"]


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender over all rounds."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratio(self, base: "Timing") -> "Ratio":
        """Medians over each other; the spread is that of the quotients round by round."""
        rounds = sorted(mine / its for mine, its in zip(self.seconds, base.seconds, strict=True))
        low, *_, high = statistics.quantiles(rounds, n=10) if len(rounds) > 1 else rounds * 2
        return Ratio(self.median / base.median, low, high)


@dataclass(frozen=True)
class Ratio:
    median: float
    p10: float
    p90: float

    def __str__(self) -> str:
        return f"{self.median:6.2f} ({self.p10:.2f}-{self.p90:.2f})"


def interleaved(contenders: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, Timing]:
    """Time all once a round, so that a slow spell of a shared machine hits them all. The first round is not kept."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            _finish(device)
            start = time.perf_counter()
            run()
            _finish(device)
            if number > 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing(values) for name, values in seconds.items()}


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def machine(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    extension = native.load()
    return {
        "date": datetime.date.today().isoformat(),
        "overflowstat": environment.version(),
        "commit": _commit(),
        "extension": None if extension is None else "cuda" if extension.has_cuda else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
    }


def _commit() -> str | None:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return found.stdout.strip() or None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in _lines(info) if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []

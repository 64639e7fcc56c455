"""What the benchmarks share: interleaved timing, medians with their spread, and a word on the machine."""

import datetime
import math
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overflowstat import environment, native

__all__ = ["Ratio", "Timing", "finish", "interleaved", "machine", "on_device"]

# How long a device is kept busy while the host queues launches behind it: some 5 ms at 1 to 2 GHz, enough for the
# slowest of them to be queued before the first begins.
HEAD_START_CYCLES = 10_000_000

FEWEST_ROUNDS = 5
RARE = 4


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender, by the number of the round."""

    rounds: dict[int, float]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds.values())

    def ratio(self, base: "Timing") -> "Ratio":
        """Of the quotients round by round, so that a slow spell that lasts longer than a round leaves no trace."""
        quotients = [seconds / base.rounds[number] for number, seconds in self.rounds.items()]
        low, *_, high = (
            statistics.quantiles(quotients, n=10, method="inclusive") if len(quotients) > 1 else quotients * 2
        )
        return Ratio(statistics.median(quotients), low, high)


@dataclass(frozen=True)
class Ratio:
    median: float
    p10: float
    p90: float

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.p10)}-{_short(self.p90)})"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str,
    *,
    prepare: Callable[[str], object] = lambda name: None,
    budget: float = math.inf,
    rare: Collection[str] = (),
) -> dict[str, Timing]:
    """Time all once a round, so that a slow spell of a shared machine hits them all. The first round is not kept.

    What is timed is a call by the host's clock, with the device idle before it and waited for after it. The order is
    another one in each round, since what ran just before (its memory, its heat) is felt.

    Args:
        contenders: by name.
        rounds: at most.
        device: "cpu" or "cuda".
        prepare: called with the name before each of them, and not timed.
        budget: in seconds. No round begins after it, once there are FEWEST_ROUNDS.
        rare: names of slow ones, that need no fine figure: timed in every fourth round only.
    """
    timings: dict[str, Timing] = {name: Timing({}) for name in contenders}
    shuffled = random.Random(0)
    end = time.perf_counter() + budget
    for number in range(rounds + 1):
        if number > FEWEST_ROUNDS and time.perf_counter() > end:
            break
        names = [name for name in contenders if name not in rare or number % RARE == 0 or number == 1]
        shuffled.shuffle(names)
        for name in names:
            prepare(name)
            finish(device)
            start = time.perf_counter()
            contenders[name]()
            finish(device)
            if number > 0:
                timings[name].rounds[number] = time.perf_counter() - start
    return timings


def on_device(contenders: dict[str, Callable[[], object]], rounds: int, launches: int) -> dict[str, Timing]:
    """What each of a row of launches takes by the CUDA device's own clock, the host's share left out.

    They must not wait for the device. Queued while it is busy with something else, they run back to back. Interleaved
    as above; the first round is not kept.
    """
    timings: dict[str, Timing] = {name: Timing({}) for name in contenders}
    for number in range(rounds + 1):
        for name, launch in contenders.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
            begin.record()
            results = [launch() for _ in range(launches)]
            end.record()
            torch.cuda.synchronize()
            if number > 0:
                timings[name].rounds[number] = begin.elapsed_time(end) / 1000 / launches
            del results  # not before: giving memory back is not what is timed
    return timings


def finish(device: str) -> None:
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
        "cuda": torch.version.cuda if device == "cuda" else None,
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "threads_bound": os.environ.get("OMP_PROC_BIND"),
        "threads_wait": os.environ.get("OMP_WAIT_POLICY"),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
    }


def _commit() -> str | None:
    """With "-dirty" where anything but results, which one run writes after another, differs from it."""
    commit = _git("describe", "--always")
    changed = _git("diff", "--name-only", "HEAD", "--", ":(top)", ":(top,exclude)benchmarks/results")
    return f"{commit}-dirty" if commit and changed else commit


def _git(*arguments: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
    except OSError:  # no git
        return None
    return found.stdout.strip() or None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in _lines(info) if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []

"""How contenders that read the same bytes compare, and whether one gets as much from the memory as it should."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from measure import Ratio, Timing

__all__ = ["BASE", "Comparison", "verdict"]

BASE = "sum"


@dataclass(frozen=True)
class Comparison:
    """Timings of contenders that each read `size` bytes; the fastest of `single_reads` stands for the machine's limit.

    Raises ValueError where none of `single_reads` was timed.
    """

    timings: dict[str, Timing]
    size: int
    single_reads: Collection[str]

    @property
    def best(self) -> str:
        return min(self.timings.keys() & self.single_reads, key=lambda name: self.timings[name].median)

    def gigabytes_per_second(self, name: str) -> float:
        """By the median of its times; 1e9 bytes."""
        return self.size / 1e9 / self.timings[name].median

    def ratio(self, name: str, base: str) -> Ratio:
        """Its time over that of `base`: 2 is twice as slow."""
        return self.timings[name].ratio(self.timings[base])

    def fraction_of_best(self, name: str) -> Ratio:
        """Its bandwidth over that of the best: 0.5 is twice as slow."""
        return self.ratio(self.best, name)

    def as_json(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "gigabytes_per_second": {name: self.gigabytes_per_second(name) for name in self.timings},
            "ratio_to_best": {name: asdict(self.ratio(name, self.best)) for name in self.timings},
            f"ratio_to_{BASE}": {name: asdict(self.ratio(name, BASE)) for name in self.timings},
        }


def verdict(comparison: Comparison, name: str, target: float) -> dict[str, Any]:
    """Whether the bandwidth of that contender is `target` of the best's; one that could not run has reached nothing."""
    reached = comparison.fraction_of_best(name) if name in comparison.timings else None
    return {
        "fraction_of_best": target,
        "reached": None if reached is None else asdict(reached),
        "met": reached is not None and reached.median >= target,
    }

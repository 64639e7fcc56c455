"""Two batches of module calls side by side: where they part first, and where they differ most."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .errors import TraceError
from .frames import Frame
from .stats import TensorStats
from .trace import CallKind, Trace, call_kind
from .wording import short_name

__all__ = ["By", "Comparison", "Difference", "Missing", "Place", "compare"]

By = Literal["max", "min", "both"]


class Place(NamedTuple):
    """The same line in two traces."""

    module: str
    kind: CallKind
    call: int
    """How many calls of the module, of this kind, the batch had before."""
    label: str


@dataclass(frozen=True, slots=True)
class Difference:
    """What one line holds in a and in b."""

    place: Place
    class_name: str
    """Of the module, in a."""
    batches: tuple[int, int]
    a: TensorStats
    b: TensorStats
    ratio_max: float
    """The larger of the two largest finite magnitudes over the smaller one, 1 or more."""
    ratio_min: float
    """Of the two smallest magnitudes, likewise."""

    @property
    def is_of_state(self) -> bool:
        """Whether one holds NaN, +inf or -inf and the other does not."""
        if self.a.first_bad is None and self.b.first_bad is None:  # nearly always; flags are slow
            return False
        return self.a.non_finite != self.b.non_finite

    def ratio(self, by: By) -> float:
        """What is held against the tolerance: infinite where one is zero, or where the states differ."""
        if self.is_of_state:
            return math.inf
        return {"max": self.ratio_max, "min": self.ratio_min, "both": max(self.ratio_max, self.ratio_min)}[by]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.place._asdict(),
            "class": self.class_name,
            "batches": list(self.batches),
            "a": _stats_to_json(self.a),
            "b": _stats_to_json(self.b),
            "ratio_max": _plain(self.ratio_max),
            "ratio_min": _plain(self.ratio_min),
            "different_state": self.is_of_state,
        }


@dataclass(slots=True)
class Missing:
    """What only one of the two has, or has numbers of."""

    calls: Counter[str] = field(default_factory=Counter)
    """By module."""
    lines: Counter[str] = field(default_factory=Counter)
    """By module, of calls that both have."""


@dataclass(slots=True)
class Comparison:
    tolerance: float
    by: By
    batches: list[tuple[int, int]]
    """Of a and of b, that were compared."""
    calls: int = 0
    """Module calls that both have."""
    root_calls: int = 0
    """Of these, those of the model itself."""
    lines: int = 0
    """Of these, lines with numbers in both."""
    parted: int = 0
    """Of these, those beyond the tolerance."""
    first: Difference | None = None
    """The one of `parted` that ran first in a; None if there is none."""
    before_first: Difference | None = None
    """The largest difference of all that ran before that."""
    worst: dict[Place, Difference] = field(default_factory=dict)
    """Of each place, the batch in which the two differ most."""
    only_in_a: Missing = field(default_factory=Missing)
    only_in_b: Missing = field(default_factory=Missing)

    def largest(self, count: int) -> list[Difference]:
        """Those of `worst` that differ most; those that do not differ at all are left out."""
        found = [difference for difference in self.worst.values() if difference.ratio(self.by) > 1]
        return sorted(found, key=lambda difference: -difference.ratio(self.by))[:count]

    def to_json(self, count: int) -> dict[str, Any]:
        """For `json.dumps`; numbers that are not finite are texts."""
        missing = {"only_in_a": self.only_in_a, "only_in_b": self.only_in_b}
        return {
            "tolerance": self.tolerance,
            "by": self.by,
            "batches": [list(pair) for pair in self.batches],
            "calls": self.calls,
            "lines": self.lines,
            "parted": self.parted,
            "first": None if self.first is None else self.first.to_json(),
            "largest": [difference.to_json() for difference in self.largest(count)],
            **{name: {"calls": dict(each.calls), "lines": dict(each.lines)} for name, each in missing.items()},
        }


def compare(
    a: Trace,
    b: Trace,
    *,
    batches: Sequence[tuple[int, int]] | None = None,
    tolerance: float = 2.0,
    by: By = "max",
) -> Comparison:
    """Compare the module calls of two traces, which may be the same one.

    A call is found in the other trace by its module, by whether it is a forward, a recompute or gradients, and by how
    many such calls the batch had before it; a line of it by its label. What only one of them has is counted.

    Args:
        a, b: the traces.
        batches: (number in a, number in b) of each pair to compare; None for all numbers that both have.
        tolerance: lines part where their ratio is larger than this, or where one is NaN, +inf or -inf in part and the
            other is not. Dtypes may differ.
        by: which ratio: of the largest finite magnitudes, of the smallest ones, or the larger of both. The smallest of
            many numbers is mostly chance, and differs tenfold between two batches of the same distribution in one of
            six cases; so it is for what should be the same number by number.

    Raises:
        TraceError: they have no batch in common, or one that is named is not there, or nothing in the batches but
            the models themselves, as where these are different ones; or no line with numbers.
    """
    of_a, of_b = _by_batch(a), _by_batch(b)
    if batches is None:
        batches = [(number, number) for number in of_a if number in of_b]
        if not batches:
            raise TraceError(
                f"{a.path!r} and {b.path!r} have no batch in common ({_ranges(of_a)} and {_ranges(of_b)}): choose one "
                "of each with --batches A,B"
            )
    for trace, found, numbers in ((a, of_a, {pair[0] for pair in batches}), (b, of_b, {pair[1] for pair in batches})):
        if absent := sorted(numbers - found.keys()):
            raise TraceError(f"{trace.path!r} has no batch {absent[0]}: it has {_ranges(trace.batches)}")
    result = Comparison(tolerance, by, list(batches))
    for pair in batches:
        for difference in _differences(of_a[pair[0]], of_b[pair[1]], pair, result):
            _take(result, difference)
    if not _is_of_one_model(result):
        roots = f"{a.header.root_class} and {b.header.root_class}"
        raise TraceError(f"{a.path!r} and {b.path!r} have no module call in common: they are of {roots}")
    if result.lines == 0:
        raise TraceError(f"{a.path!r} and {b.path!r} have no tensor with numbers in common: nothing was compared")
    return result


def _is_of_one_model(result: Comparison) -> bool:
    """Every model has a root, so that one does not count where both have modules, and none of the same name."""
    if result.calls > result.root_calls:
        return True
    return result.calls > 0 and not (result.only_in_a.calls and result.only_in_b.calls)


def _take(result: Comparison, difference: Difference) -> None:
    result.lines += 1
    ratio = difference.ratio(result.by)
    if ratio > result.tolerance:
        result.parted += 1
        result.first = result.first or difference
    elif result.first is None and (result.before_first is None or ratio > result.before_first.ratio(result.by)):
        result.before_first = difference
    known = result.worst.get(difference.place)
    if known is None or ratio > known.ratio(result.by):
        result.worst[difference.place] = difference


_Key = tuple[str, CallKind, int]


def _by_batch(trace: Trace) -> dict[int, dict[_Key, Frame]]:
    found: dict[int, dict[_Key, Frame]] = {}
    for frame, call in zip(trace.frames, trace.calls, strict=True):
        found.setdefault(frame.batch_number, {})[frame.module, call_kind(frame), call] = frame
    return found


def _differences(
    of_a: Mapping[_Key, Frame], of_b: Mapping[_Key, Frame], batches: tuple[int, int], result: Comparison
) -> Iterator[Difference]:
    """Of each line that has numbers in both; what has not is counted in the result."""
    for key, frame in of_a.items():
        other = of_b.get(key)
        if other is None:
            result.only_in_a.calls[frame.module] += 1
            continue
        result.calls += 1
        result.root_calls += not frame.module
        lines_a, lines_b = _numbers(frame), _numbers(other)
        for label, found in lines_a.items():
            if label in lines_b:
                yield _difference(Place(*key, label), frame.class_name, batches, found, lines_b[label])
            else:
                result.only_in_a.lines[frame.module] += 1
        if more := lines_b.keys() - lines_a.keys():
            result.only_in_b.lines[frame.module] += len(more)
    for key, frame in of_b.items():
        if key not in of_a:
            result.only_in_b.calls[frame.module] += 1


def _numbers(frame: Frame) -> dict[str, TensorStats]:
    lines = ((line.label, line.content) for line in frame.lines)
    return {label: content for label, content in lines if isinstance(content, TensorStats) and content.numel}


def _difference(place: Place, class_name: str, batches: tuple[int, int], a: TensorStats, b: TensorStats) -> Difference:
    ratio_max = _ratio(a.finite_abs_max, b.finite_abs_max)
    return Difference(place, class_name, batches, a, b, ratio_max, _ratio(a.abs_min, b.abs_min))


def _ratio(x: float, y: float) -> float:
    """Of the larger to the smaller. Two NaNs are the same, and one is as far from a number as can be."""
    if x == y or (x != x and y != y):
        return 1.0
    low, high = min(x, y), max(x, y)
    return high / low if low > 0 else math.inf


def _ranges(numbers: Iterable[int]) -> str:
    """As "batches 0 to 3 and 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    texts = [" to ".join(map(str, run)) for run in runs[:5]] + ["more"] * (len(runs) > 5)
    return "no batch" if not texts else f"batch{'es' * (len(texts) > 1 or 'to' in texts[0])} {' and '.join(texts)}"


def _stats_to_json(stats: TensorStats) -> dict[str, Any]:
    names = ("abs_min", "abs_max", "finite_abs_max", "nan_count", "posinf_count", "neginf_count", "numel")
    return {
        "dtype": short_name(stats.dtype),
        "shape": list(stats.shape),
        **{name: _plain(getattr(stats, name)) for name in names},
        "is_counted": stats.is_counted,
    }


def _plain(value: float | int) -> float | int | str:
    return value if math.isfinite(value) else str(value)

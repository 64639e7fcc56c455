"""A comparison for people."""

from __future__ import annotations

import math
from collections import Counter

from .compare import Comparison, Difference, Missing
from .stats import TensorStats
from .terminal import on_one_line
from .trace import Trace
from .wording import module_text, short_name

__all__ = ["comparison_text"]

FEW = 5


def comparison_text(result: Comparison, a: Trace, b: Trace, count: int) -> str:
    """Where they part, the `count` largest ratios as a table, and what is missing. Names cannot obey to a terminal."""
    parts = [_about("a", a), _about("b", b) if b is not a else "b: the same", "", *_first(result)]
    if largest := result.largest(count):
        of_batch = "; of each line in the batch where it is largest" * (len(result.batches) > 1)
        parts += ["", f"Largest ratios, {_by(result)}{of_batch}:"]
        parts += [HEADING, *(_table_line(result, difference) for difference in largest)]
    missing = [*_missing("a", result.only_in_a), *_missing("b", result.only_in_b)]
    return "\n".join([*parts, *([""] if missing else []), *missing])


def _about(name: str, trace: Trace) -> str:
    header = trace.header
    rank = f", rank {header.rank} of {header.world_size}" if header.world_size > 1 else ""
    root = header.root_class or "a model"
    return f"{name}: {on_one_line(trace.path)}, {on_one_line(root)}{rank}, of {on_one_line(header.started)}"


def _by(result: Comparison) -> str:
    return {"max": "of abs max", "min": "of abs min", "both": "of abs max or abs min"}[result.by]


def _first(result: Comparison) -> list[str]:
    batches = f"{len(result.batches)} batch{'es' * (len(result.batches) > 1)}"
    compared = f"{result.lines} lines of {result.calls} module calls in {batches}"
    within = f"a ratio of {result.tolerance:g}, {_by(result)}"
    if result.first is None:
        return [f"They do not part: {compared} are within {within}."]
    first, before = result.first, result.before_first
    lines = [
        f"They part first in {_where(first)}: {_what(first)}",
        f"  a  {_numbers(first.a)}",
        f"  b  {_numbers(first.b)}",
        f"{result.parted} of {compared} are beyond {within}, or not finite in one only.",
    ]
    if before is None:
        lines.append("Nothing that is compared ran before it.")
    elif (ratio := before.ratio(result.by)) > 1:
        lines.append(f"Before it the largest ratio is {_ratio(ratio)}, in {_where(before)}.")
    else:
        lines.append("All before it is the same.")
    return lines


def _where(difference: Difference, names_batch: bool = True) -> str:
    a, b = difference.batches
    place = difference.place
    batch = (f"batch {a}, " if a == b else f"batches {a} and {b}, ") if names_batch else ""
    kind = "" if place.kind == "forward" else f", {place.kind}"
    call = f", call {place.call}" if place.call else ""
    return on_one_line(f"{batch}{module_text(place.module, difference.class_name)}{kind}{call}, {place.label}")


def _what(difference: Difference) -> str:
    if difference.is_of_state:
        return f"{_state(difference.a)} in a, {_state(difference.b)} in b"
    ratios = {"abs max": difference.ratio_max, "abs min": difference.ratio_min}
    return ", ".join(
        f"{name} is zero in one only" if math.isinf(ratio) else f"a ratio of {_ratio(ratio)} in {name}"
        for name, ratio in ratios.items()
        if ratio > 1
    )


def _ratio(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.3g}"


def _state(stats: TensorStats) -> str:
    return " and ".join(f"{count} {kind}" for count, kind in stats.bad_counts) or "all finite"


def _numbers(stats: TensorStats) -> str:
    shape = list(stats.shape)
    return f"{stats.abs_min:8.2e} to {stats.abs_max:8.2e}  {short_name(stats.dtype)}, shape {shape}, {_state(stats)}"


HEADING = f"{'ratio':>8} {'abs max a':>9} {'abs max b':>9} {'abs min a':>9} {'abs min b':>9}  where"


def _table_line(result: Comparison, difference: Difference) -> str:
    a, b = difference.a, difference.b
    where = _where(difference, names_batch=len(result.batches) > 1)
    numbers = " ".join(f"{number:9.2e}" for number in (a.abs_max, b.abs_max, a.abs_min, b.abs_min))
    dtypes = "" if a.dtype == b.dtype else f", {short_name(a.dtype)} and {short_name(b.dtype)}"
    return f"{_ratio(difference.ratio(result.by)):>8} {numbers}  {where}{dtypes}"


def _missing(name: str, missing: Missing) -> list[str]:
    found = []
    for what, more, counts in (("module call", "", missing.calls), ("line", " of calls that both have", missing.lines)):
        if total := sum(counts.values()):
            found.append(f"Only in {name}: {total} {what}{'s' * (total > 1)}{more}, of {_few(counts)}")
    return found


def _few(modules: Counter[str]) -> str:
    names = [on_one_line(module_text(name)) for name, count in modules.items() if count]
    more = f" and {len(names) - FEW} more modules" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + more

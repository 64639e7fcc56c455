"""What a picture of a trace shows, prepared for all ways to draw it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..errors import TraceError
from ..frames import Frame, Line
from ..headroom import headroom
from ..stats import TensorStats
from ..terminal import on_one_line, printable
from ..trace import CallKind, Trace, call_kind
from ..wording import limit_of, module_text, short_name
from .parts import PARTS, Part, part_of

__all__ = ["Chart", "Limit", "Panel", "Place", "Scale", "Span", "Verdict", "View", "group_starts", "make_chart"]

FEW_PANELS = 6
MOST_VERDICTS = 20
REACH = 6
"""A dtype's limit so many decades from the numbers is still drawn; one that is further away would make them a line."""


class Place(NamedTuple):
    """A column of the picture: the same call in all batches."""

    module: str
    """Qualified name; "" for the root."""
    class_name: str
    kind: CallKind
    call: int
    """How many calls of the module, of this kind, the batch had before."""

    @property
    def name(self) -> str:
        """To be shown."""
        return on_one_line(self.module) or "(root)"

    @property
    def full_name(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name

    @property
    def shown_class(self) -> str:
        return on_one_line(self.class_name)

    @property
    def note(self) -> str:
        """What sets this call apart from the module's others."""
        kind = {"forward": "", "recompute": "recomputed", "backward": "backward"}[self.kind]
        return ", ".join(filter(None, [kind, f"call {self.call}" if self.call else ""]))


class Span(NamedTuple):
    """What one call shows of a part: all its floating-point lines together, or the integers where there are no others.

    Magnitudes are decades: 3 for 1000, -inf for zero.
    """

    place: int
    low: float | None
    """Of the smallest magnitude; None if no element is finite."""
    high: float | None
    """Of the largest finite one; None likewise."""
    powers_left: float | None
    """The fewest powers of two to the limit of a line's dtype, see `headroom`."""
    has_nan: bool
    has_inf: bool
    is_bad: bool
    """Whether a line of this part holds what it may not."""


class Limit(NamedTuple):
    decade: float
    text: str
    """As "float16 max 65504"."""


class Scale(NamedTuple):
    """From decade to decade."""

    bottom: int
    top: int


@dataclass(frozen=True, slots=True)
class View:
    """One part in all panels, which have the same scale."""

    part: Part
    spans: tuple[tuple[Span, ...], ...]
    """By panel."""
    limits: tuple[Limit, ...]
    """Largest number, smallest normal and smallest subnormal one of all dtypes in it, ascending."""
    scale: Scale
    """With the limits that are near."""
    whole_scale: Scale
    """With all of them."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One batch."""

    number: int
    frames: dict[int, Frame]
    """By place."""
    bad: tuple[int, ...]
    """Places of bad frames, ascending."""


@dataclass(frozen=True, slots=True)
class Verdict:
    text: str
    """In a few lines."""
    panel: int | None
    """In which it is seen; None if its batch is not shown."""
    place: int | None


@dataclass(frozen=True, slots=True)
class Chart:
    """Texts to be shown have escapes for what is not printable. They are no markup."""

    title: str
    about: str
    """The model, and the run that was traced, in a line."""
    notes: tuple[str, ...]
    """What is not shown, and why."""
    verdicts: tuple[Verdict, ...]
    """Empty where nothing is bad."""
    places: tuple[Place, ...]
    """In execution order."""
    panels: tuple[Panel, ...]
    views: tuple[View, ...]
    """Those that have numbers; one at least."""
    shown: Part
    """The one that the first verdict is of, or else the first."""

    @property
    def all_is_well(self) -> str:
        """What is said where there is no verdict."""
        batches = f"the {len(self.panels)} batches" if len(self.panels) > 1 else f"batch {self.panels[0].number}"
        spans = (span for view in self.views for of_panel in view.spans for span in of_panel)
        allowed = ", but those that are allowed" if any(span.has_nan or span.has_inf for span in spans) else ""
        return f"No NaN or infinity in {batches} shown here{allowed}"

    def view(self, part: Part) -> View:
        """Raises TraceError if it has no numbers."""
        for view in self.views:
            if view.part == part:
                return view
        there = " and ".join(view.part for view in self.views)
        raise TraceError(f"there are no numbers of any {part} in the batches that are to be shown: there are {there}")


def make_chart(
    trace: Trace, batches: Collection[int] | None = None, progress: Callable[[float], object] = lambda share: None
) -> Chart:
    """Prepare a picture.

    Args:
        trace: what to show.
        batches: which. By default six at most: the first bad one and the one before it, the first, the
            last, and then others.
        progress: called now and then with how much is done, from 0 to 1.

    Raises:
        TraceError: there is nothing to show, or a batch that is asked for is not there.

    Cost: a Python object for each call and part.
    """
    calls = {id(frame): call for frame, call in zip(trace.frames, trace.calls, strict=True)}
    by_batch: dict[int, list[Frame]] = {}
    for frame in trace.frames:
        by_batch.setdefault(frame.batch_number, []).append(frame)
    chosen = _chosen(trace, by_batch, batches)
    keys = [[_place(frame, calls[id(frame)]) for frame in by_batch[number]] for number in chosen]
    places = _merged(keys)
    index = {place: i for i, place in enumerate(places)}
    panels = []
    for number, of_batch in zip(chosen, keys, strict=True):
        frames = {index[place]: frame for place, frame in zip(of_batch, by_batch[number], strict=True)}
        panels.append(Panel(number, frames, tuple(sorted(place for place, frame in frames.items() if frame.bad_lines))))
    views = []
    for i, part in enumerate(PARTS):
        view = _view(part, panels, lambda share, i=i: progress((i + share) / len(PARTS)))  # type: ignore[misc]
        if view is not None:
            views.append(view)
    if not views:
        raise TraceError(f"{trace.path!r} has {len(trace.frames)} frames without a number: there is nothing to draw")
    verdicts = _verdicts(trace, panels, places)
    labels = [report.label for report in trace.reports[:1]] or [
        line.label for panel in panels for place in panel.bad[:1] for line in panel.frames[place].bad_lines
    ]
    wanted = part_of(labels[0]) if labels else "output"
    shown = wanted if any(view.part == wanted for view in views) else views[0].part
    notes = tuple(_notes(trace, len(by_batch), len(chosen)))
    title = on_one_line(os.path.basename(trace.path))  # a page that is passed on is not to tell of folders
    return Chart(title, _about(trace), notes, verdicts, places, tuple(panels), tuple(views), shown)


def _chosen(trace: Trace, by_batch: dict[int, list[Frame]], wanted: Collection[int] | None) -> list[int]:
    if not by_batch and (wanted is None or not trace.batches):
        raise TraceError(
            f"{trace.path!r} has no frames: the run ended before its first module call, or has not come to it"
        )
    numbers = sorted(by_batch)
    if wanted is not None:
        for number in sorted(wanted):
            if number not in by_batch:
                first, last, count = trace.batches[0], trace.batches[-1], len(trace.batches)
                there = f"{count} batches, from {first} to {last}" if count > 1 else f"batch {first}"
                raise TraceError(f"{trace.path!r} has no frames of batch {number}: it has {there}")
        return sorted(wanted)
    bad = [number for number in numbers if any(frame.bad_lines for frame in by_batch[number])]
    if not bad:
        bad = sorted({report.batch_number for report in trace.reports} & by_batch.keys())
    by_use = [*bad[:1]]
    if bad and (before := numbers.index(bad[0])):
        by_use.append(numbers[before - 1])
    by_use += [numbers[0], numbers[-1], *bad]
    by_use += [numbers[i * (len(numbers) - 1) // (FEW_PANELS - 1)] for i in range(FEW_PANELS)]
    return sorted([*dict.fromkeys(by_use)][:FEW_PANELS]) if len(numbers) > FEW_PANELS else numbers


def _place(frame: Frame, call: int) -> Place:
    return Place(frame.module, frame.class_name, call_kind(frame), call)


def _merged(batches: Iterable[Sequence[Place]]) -> tuple[Place, ...]:
    """All places, each behind the one that it follows in the first batch that has it."""
    following: dict[Place | None, Place | None] = {None: None}
    for places in batches:
        before: Place | None = None
        for place in places:
            if place not in following:
                following[place] = following[before]
                following[before] = place
            before = place
    order = []
    place_or_end = following[None]
    while place_or_end is not None:
        order.append(place_or_end)
        place_or_end = following[place_or_end]
    return tuple(order)


def _shown_lines(frame: Frame, part: Part) -> list[tuple[Line, TensorStats]]:
    """Those with numbers: floating-point ones, or if there are none integers."""
    lines = [
        (line, line.content)
        for line in frame.lines
        if isinstance(line.content, TensorStats) and line.content.numel and part_of(line.label) == part
    ]
    return [found for found in lines if _is_floating(found[1])] or lines


def _is_floating(stats: TensorStats) -> bool:
    return stats.dtype.is_floating_point or stats.dtype.is_complex


@dataclass(slots=True)
class _Extent:
    """Of a view: what its scale has to hold."""

    low: float = math.inf
    high: float = -math.inf
    dtypes: set[torch.dtype] = field(default_factory=set)

    def take(self, span: Span) -> None:
        for decade in (span.low, span.high):
            if decade is not None and decade > -math.inf:
                self.low, self.high = min(self.low, decade), max(self.high, decade)

    def scale(self, limits: Iterable[Limit], reach: float) -> Scale:
        low, high = (self.low, self.high) if self.low <= self.high else (0.0, 0.0)
        near = [limit.decade for limit in limits if low - reach <= limit.decade <= high + reach]
        bottom, top = math.floor(min([low, *near])), math.ceil(max([high, *near]))
        if top - bottom < 2:
            bottom, top = bottom - (top - bottom < 1), top + 1
        return Scale(bottom, top)


def _view(part: Part, panels: Sequence[Panel], progress: Callable[[float], object]) -> View | None:
    extent = _Extent()
    spans = []
    for i, panel in enumerate(panels, 1):
        of_panel = []
        for place, frame in sorted(panel.frames.items()):
            if lines := _shown_lines(frame, part):
                of_panel.append(_span(place, frame, lines))
                extent.take(of_panel[-1])
                extent.dtypes.update(stats.dtype for _, stats in lines if _is_floating(stats))
        spans.append(tuple(of_panel))
        progress(i / len(panels))
    if not any(spans):
        return None
    limits = _limits(extent.dtypes)
    return View(part, tuple(spans), limits, extent.scale(limits, REACH), extent.scale(limits, math.inf))


def _span(place: int, frame: Frame, lines: Sequence[tuple[Line, TensorStats]]) -> Span:
    for line, stats in lines:
        has_finite = stats.finite_abs_max == stats.finite_abs_max
        if has_finite and not 0 <= stats.abs_min <= stats.finite_abs_max <= sys.float_info.max:
            where = f"{module_text(frame.module)}, {line.label}, in batch {frame.batch_number}"
            raise TraceError(f"{where}: magnitudes from {stats.abs_min} to {stats.finite_abs_max} make no sense")
    all_stats = [stats for _, stats in lines]
    finite = [stats for stats in all_stats if not math.isnan(stats.finite_abs_max)]
    left = [powers for stats in all_stats if (powers := headroom(stats)) is not None]
    return Span(
        place,
        min((_decade(stats.abs_min) for stats in finite), default=None),
        max((_decade(stats.finite_abs_max) for stats in finite), default=None),
        min(left, default=None),
        any(stats.has_nan for stats in all_stats),
        any(stats.has_inf for stats in all_stats),
        bool(frame.bad_lines) and any(line.is_bad for line, _ in lines),
    )


def _decade(magnitude: float | int) -> float:
    return math.log10(magnitude) if magnitude else -math.inf


def _limits(dtypes: Iterable[torch.dtype]) -> tuple[Limit, ...]:
    """Those of several dtypes that are as good as one are one."""
    found: dict[tuple[str, float], tuple[float, list[str]]] = {}
    for dtype in sorted(dtypes, key=str):
        about = torch.finfo(dtype)
        smallest = about.smallest_normal * about.eps
        values = {"max": limit_of(dtype), "smallest normal": about.smallest_normal, "smallest": smallest}
        for what, value in values.items():
            if value > 0 and not (what == "smallest" and smallest == about.smallest_normal):
                key = what, round(math.log10(value), 1)
                found.setdefault(key, (value, []))[1].append(short_name(dtype))
    limits = [
        Limit(_decade(value), f"{', '.join(names)} {what} {value:.5g}") for (what, _), (value, names) in found.items()
    ]
    return tuple(sorted(limits))


def _verdicts(trace: Trace, panels: Sequence[Panel], places: Sequence[Place]) -> tuple[Verdict, ...]:
    numbers = [panel.number for panel in panels]
    found = []
    for report in trace.reports[:MOST_VERDICTS]:
        panel = numbers.index(report.batch_number) if report.batch_number in numbers else None
        place = None
        if panel is not None:
            bad_places = panels[panel].bad
            place = next((place for place in bad_places if places[place].module == report.module), None)
        found.append(Verdict(printable(report.text), panel, place))
    if found:
        return tuple(found)
    for i, panel_of_bad in enumerate(panels):
        for place in panel_of_bad.bad[:1]:
            bad = panel_of_bad.frames[place]
            line = bad.bad_lines[0]
            where = on_one_line(f"{module_text(bad.module, bad.class_name)}, {line.label}")
            more = sum(len(panel.bad) for panel in panels) - 1
            others = f"; {more} more module calls are bad" if more else ""
            return (Verdict(f"{_kinds(line)} in batch {bad.batch_number}, first in {where}{others}", i, place),)
    return ()


def _kinds(line: Line) -> str:
    content = line.content
    assert isinstance(content, TensorStats)
    return " and ".join(name for name, there in (("nan", content.has_nan), ("inf", content.has_inf)) if there)


def _about(trace: Trace) -> str:
    header = trace.header
    rank = f"rank {header.rank} of {header.world_size}" if header.world_size > 1 else ""
    started = f"begun {header.started[:19].replace('T', ' ')} UTC"
    return on_one_line(", ".join(filter(None, [header.root_class, rank, started, f"torch {header.torch}"])))


def _notes(trace: Trace, there: int, shown: int) -> Iterable[str]:
    if shown < there:
        yield f"{shown} of {there} batches are shown; --batches chooses others"
    if len(trace.reports) > MOST_VERDICTS:
        yield f"{MOST_VERDICTS} of {len(trace.reports)} detections are shown"
    if trace.recovered:
        yield "the trace is cut in its last line: what was before that is shown"
    elif not trace.is_complete:
        yield "the trace is not ended: its process was killed, or still runs"


def group_starts(modules: Sequence[str], most: int) -> list[tuple[int, str]]:
    """(index, name) of where another part of the model begins, for `most` labels at most.

    The parts are those of as many components of the names as fit. Where that leaves few labels, as of hundreds of
    layers under one name, every so many of the next ones.
    """
    fitting: list[tuple[int, str]] = []
    deepest = max((name.count(".") + 1 for name in modules), default=1)
    for depth in range(1, deepest + 1):
        starts: list[tuple[int, str]] = []
        for i, name in enumerate(modules):
            prefix = ".".join(name.split(".")[:depth])
            # A parent ends after its children, and belongs to the last of them.
            if not starts or not f"{starts[-1][1]}.".startswith(f"{prefix}."):
                starts.append((i, prefix))
        if len(starts) > most:
            return starts[:: math.ceil(len(starts) / most)] if 3 * len(fitting) <= most else fitting
        fitting = starts
    return fitting

"""A chart as a picture, drawn by matplotlib."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..errors import TraceError
from .chart import Chart, Panel, Scale, Span, View, group_starts
from .parts import Part

__all__ = ["check_matplotlib", "png"]

WIDTH, DOTS = 12.0, 120
"""In inches, and per inch."""
LANE = 0.17
"""The height of one for what is not on the scale, in inches."""
MOST_NAMES, MOST_GROUPS, LETTERS = 80, 14, 34
MOST_TEXT = 14
MUTED, GRID, SPAN, PEAK, LIMIT, CALL, BAD = "#57606a", "#e7eaee", "#a9cdea", "#0b5fa5", "#5b4a1e", "#fbe0d0", "#b0400a"


def check_matplotlib() -> None:
    """Raise TraceError if it is not there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise TraceError(
            "--png needs matplotlib: pip install matplotlib, or overflowstat[plot]; without --png a page is written, "
            "which needs nothing"
        ) from error


def png(chart: Chart, shown: Part | None = None, progress: Callable[[float], object] = lambda share: None) -> bytes:
    """The file's content. Figures that the process draws otherwise, and their settings, are left alone. `progress` is
    told how much is done, from 0 to 1.

    Raises:
        TraceError: matplotlib is not there, or the part has no numbers.
    """
    check_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    view = chart.view(shown or chart.shown)
    columns = sorted({span.place for spans in view.spans for span in spans})
    texts = [*_texts(chart), (f"{view.part}, abs min to abs max, of each module call", {"color": MUTED})]
    count = len(chart.panels)
    names = min(max(len(chart.places[place].full_name) for place in columns), LETTERS)
    above, below = 0.35 + 0.19 * len(texts), (0.2 + 0.066 * names if len(columns) <= MOST_NAMES else 0.5)
    each = 4.2 if count == 1 else 2.6 if count < 4 else 1.9
    height = above + each * count + below
    # Not what a user's own settings say, which may bring in TeX; nor what fonts lack, as letters of other scripts.
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(WIDTH, height), dpi=DOTS, facecolor="white")
        _write_texts(figure, texts, height)
        axes = figure.subplots(count, 1, squeeze=False)[:, 0]
        figure.subplots_adjust(
            left=0.075, right=0.985, top=1 - (above + 0.1) / height, bottom=below / height, hspace=0.3 / each * 1.4
        )
        for i, (axis, panel, spans) in enumerate(zip(axes, chart.panels, view.spans, strict=True), 1):
            _draw(axis, panel, spans, view, columns, each)
            _tell_when_drawn(axis, partial(progress, i / count))
        _write_names(axes[-1], chart, columns)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": "overflowstat"})
    return file.getvalue()


def _tell_when_drawn(axis: Any, told: Callable[[], object]) -> None:
    """By an artist that draws nothing, after all others of its chart."""
    from matplotlib.artist import Artist

    last: Any = Artist()
    last.draw = lambda renderer: told()
    last.set_zorder(100)
    axis.add_artist(last)


def _texts(chart: Chart) -> list[tuple[str, dict[str, Any]]]:
    """Lines above the charts."""
    texts: list[tuple[str, dict[str, Any]]] = [(f"{chart.title}   {chart.about}", {"color": MUTED})]
    if chart.verdicts:
        lines = [part for line in chart.verdicts[0].text.split("\n") for part in _wrapped(line)]
        texts += [(line, {"family": "monospace"}) for line in lines[:MOST_TEXT]]
        texts[1][1].update(color=BAD, weight="bold")
        if len(lines) > MOST_TEXT:
            texts.append((f"... and {len(lines) - MOST_TEXT} more lines", {"color": MUTED}))
    else:
        texts.append((chart.all_is_well, {"weight": "bold"}))
    texts += [(note, {"color": MUTED}) for note in chart.notes]
    return [(part, style) for text, style in texts for part in _wrapped(text)]


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 154, subsequent_indent="    ", drop_whitespace=False, replace_whitespace=False) or [""]


def _write_texts(figure: Any, texts: Sequence[tuple[str, dict[str, Any]]], height: float) -> None:
    for i, (text, style) in enumerate(texts):
        # A name may hold dollars, which are no mathematics.
        figure.text(0.012, 1 - (0.12 + 0.19 * i) / height, text, fontsize=9, va="top", parse_math=False, **style)


def _draw(axis: Any, panel: Panel, spans: Sequence[Span], view: View, columns: Sequence[int], each: float) -> None:
    from matplotlib.collections import PolyCollection

    scale = view.scale
    lane = LANE * (scale.top - scale.bottom) / (each - 4 * LANE)
    column = {place: k for k, place in enumerate(columns)}
    gap = 0.12 if len(columns) <= 200 else 0.0
    floor = scale.bottom - lane / 2

    def y(decade: float) -> float:
        return floor if decade == -math.inf else decade

    bottom, top = scale.bottom - lane, scale.top + 2 * lane
    axis.set(xlim=(0, len(columns)), ylim=(bottom, top))
    bad = [column[place] for place in panel.bad if place in column]
    stripes = [[(k, bottom), (k, top), (k + 1, top), (k + 1, bottom)] for k in bad]
    axis.add_collection(PolyCollection(stripes, facecolor=CALL, linewidth=0.5, edgecolor=CALL, zorder=0))
    axis.axhspan(bottom, scale.bottom, color="#eef1f4", zorder=0.5)
    axis.axhline(scale.top, color=GRID, linewidth=1, zorder=0.5)
    drawn = [(column[span.place], span) for span in spans]
    bars, peaks = [], []
    for k, span in drawn:
        if span.low is not None and span.high is not None:
            left, right = k + gap, k + 1 - gap
            bars.append([(left, y(span.low)), (left, y(span.high)), (right, y(span.high)), (right, y(span.low))])
            peaks.append([(left, y(span.high)), (right, y(span.high))])
    axis.add_collection(PolyCollection(bars, facecolor=SPAN, edgecolor=SPAN, linewidth=0.3, zorder=2))
    axis.add_collection(_lines(peaks))
    for limit in view.limits:
        if scale.bottom <= limit.decade <= scale.top:
            axis.axhline(limit.decade, color=LIMIT, linewidth=1, linestyle=(0, (5, 4)), zorder=4)
            _write(axis, limit.decade, limit.text)
    _write(
        axis, scale.top - lane, "   ".join(f"\u2191 {limit.text}" for limit in view.limits if limit.decade > scale.top)
    )
    beneath = [f"\u2193 {limit.text}" for limit in view.limits if limit.decade < scale.bottom]
    _write(axis, scale.bottom, "   ".join(beneath))
    marks = {"x": ("has_nan", scale.top + 1.5 * lane), "^": ("has_inf", scale.top + 0.5 * lane)}
    for marker, (kind, height) in marks.items():
        for is_bad, colour in ((False, MUTED), (True, BAD)):
            found = [k + 0.5 for k, span in drawn if getattr(span, kind) and span.is_bad == is_bad]
            style = {"c": colour} if marker == "x" else {"c": colour if is_bad else "none", "edgecolors": colour}
            axis.scatter(found, [height] * len(found), s=22, marker=marker, zorder=6, **style)
    if bad:
        axis.axvline(bad[0], color=BAD, linewidth=1.5, zorder=3)
    _mark_scale(axis, scale, lane)
    about = f", {len(panel.bad)} of {len(panel.frames)} calls bad" if panel.bad else ""
    axis.set_title(f"Batch {panel.number}{about}", fontsize=9, loc="left", color=BAD if panel.bad else "black", pad=3)


def _write(axis: Any, decade: float, text: str) -> None:
    """Above a line, at its left end, since the right one is where a run goes bad."""
    box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5}
    if text:
        axis.annotate(
            text,
            (0.004, decade),
            (0, 1.5),
            xycoords=axis.get_yaxis_transform(),
            textcoords="offset points",
            color=LIMIT,
            fontsize=7,
            ha="left",
            va="bottom",
            zorder=5,
            parse_math=False,
            bbox=box,
        )


def _lines(peaks: Any) -> Any:
    from matplotlib.collections import LineCollection

    return LineCollection(peaks, colors=PEAK, linewidths=1.6, capstyle="butt", zorder=3)


def _mark_scale(axis: Any, scale: Scale, lane: float) -> None:
    every = max(1, math.ceil((scale.top - scale.bottom) / 8))
    decades = [decade for decade in range(scale.bottom, scale.top + 1) if decade % every == 0]
    ticks = {scale.bottom - lane / 2: "0", scale.top + lane / 2: "inf", scale.top + 1.5 * lane: "NaN"}
    ticks |= {
        decade: f"{10.0**decade:g}" if abs(decade) < 4 else f"1e{decade}"
        for decade in decades
        if scale.bottom < decade < scale.top
    }
    axis.set_yticks(list(ticks), list(ticks.values()), fontsize=7, color=MUTED)
    for decade in decades:
        axis.axhline(decade, color=GRID, linewidth=0.8, zorder=1)
    axis.tick_params(length=0)
    axis.set_xticks([])
    for spine in axis.spines.values():
        spine.set_color("#d0d7de")


def _write_names(axis: Any, chart: Chart, columns: Sequence[int]) -> None:
    bad = {place for panel in chart.panels for place in panel.bad}
    if len(columns) <= MOST_NAMES:
        texts = [_shortened(chart.places[place].full_name) for place in columns]
        axis.set_xticks([k + 0.5 for k in range(len(columns))], texts, rotation=90, fontsize=7)
        for label, place in zip(axis.get_xticklabels(), columns, strict=True):
            label.set_parse_math(False)
            label.set_color(BAD if place in bad else MUTED)
        return
    starts = group_starts([chart.places[place].name for place in columns], MOST_GROUPS)
    axis.set_xticks(
        [k for k, _ in starts], [_shortened(name) for _, name in starts], rotation=20, fontsize=7, ha="right"
    )
    axis.tick_params(axis="x", length=4, color=MUTED)
    for label in axis.get_xticklabels():
        label.set_parse_math(False)
        label.set_color(MUTED)


def _shortened(name: str) -> str:
    """Its end, from a dot on if there is one."""
    if len(name) <= LETTERS:
        return name
    end = name[1 - LETTERS :]
    return "\u2026" + (end.partition(".")[2] or end)

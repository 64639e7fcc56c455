"""A chart as one HTML page, which needs nothing else: no network, no library."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from ..frames import Frame, Line
from ..report import bad_numbers
from ..stats import TensorStats
from ..terminal import on_one_line
from ..trace_format import DETAILS
from ..wording import short_name
from .chart import Chart, Span, View
from .parts import Part, part_of

__all__ = ["page"]


def page(chart: Chart, shown: Part | None = None, progress: Callable[[float], object] = lambda share: None) -> str:
    """The text of the page, to be written as UTF-8. `progress` is told how much is done, from 0 to 1.

    What comes from the trace is text in it, and never markup or code: escaped where it is in the page itself, and else
    in a block of JSON without `<`, which the script only ever makes text of. A policy in the page forbids every other
    script and style, and every connection.
    """
    style, script = (_resource(name) for name in ("page.css", "page.js"))
    return _filled(
        _resource("page.html"),
        {
            "policy": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
            "form-action 'none'",
            "title": html.escape(chart.title),
            "about": html.escape(chart.about),
            "verdict": _verdict(chart),
            "notes": "".join(f"<li>{html.escape(note)}</li>" for note in chart.notes),
            "style": style,
            "script": script,
            "data": _json(_data(chart, shown or chart.shown, progress)),
        },
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _filled(template: str, values: Mapping[str, str]) -> str:
    """In one pass, so that no value is looked at for places of others."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(value: object) -> str:
    """Of ASCII alone, and without what could end the element it is in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _verdict(chart: Chart) -> str:
    if not chart.verdicts:
        return f'<section class="verdict good"><h2>{html.escape(chart.all_is_well)}</h2></section>'
    first, *others = chart.verdicts
    headline, _, rest = first.text.partition("\n")
    more = "".join(f"<pre>{html.escape(verdict.text)}</pre>" for verdict in others)
    return (
        f'<section class="verdict bad"><h2>{html.escape(headline.removeprefix("overflowstat: "))}</h2>'
        + (f"<pre>{html.escape(rest)}</pre>" if rest else "")
        + (f"<details><summary>Detections after it: {len(others)}</summary>{more}</details>" if more else "")
        + "</section>"
    )


# What page.js reads.


def _data(chart: Chart, shown: Part, progress: Callable[[float], object]) -> dict[str, Any]:
    texts = _Texts()
    panels = []
    for i, panel in enumerate(chart.panels, 1):
        calls = [[place, _lines(frame, texts)] for place, frame in panel.frames.items()]
        panels.append({"number": panel.number, "bad": panel.bad, "calls": calls})
        progress(i / len(chart.panels))
    return {
        "places": [[place.name, place.shown_class, place.note] for place in chart.places],
        "panels": panels,
        "views": [_view(view) for view in chart.views],
        "shown": shown,
        "first": next(([v.panel, v.place] for v in chart.verdicts if v.place is not None), None),
        "texts": list(texts),
    }


class _Texts(dict[str, int]):
    """Each text once, by its number."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def _view(view: View) -> dict[str, Any]:
    return {
        "part": view.part,
        "scale": view.scale,
        "whole": view.whole_scale,
        "limits": [[round(limit.decade, 4), limit.text] for limit in view.limits],
        "spans": [[_span(span) for span in spans] for spans in view.spans],
    }


def _span(span: Span) -> list[Any]:
    marks = 1 * span.has_nan + 2 * span.has_inf + 4 * span.is_bad
    return [span.place, _number(span.low), _number(span.high), _number(span.powers_left), marks]


def _number(value: float | None) -> float | str | None:
    """JSON has no infinities."""
    if value is None or math.isfinite(value):
        return None if value is None else round(value, 4)
    return str(value)


def _lines(frame: Frame, texts: _Texts) -> list[list[Any]]:
    """(label, part, what it is, abs min, abs max, what else is to be said, whether it is bad) of each."""
    return [_line(line, texts) for line in frame.lines]


def _line(line: Line, texts: _Texts) -> list[Any]:
    stats = line.content
    label, part = texts[on_one_line(line.label)], texts[part_of(line.label)]
    if isinstance(stats, str):
        return [label, part, texts[on_one_line(stats)], texts[""], texts[""], texts[""], 0]
    about = f"{short_name(stats.dtype)} {list(stats.shape)}"
    if not stats.numel:
        return [label, part, texts[about], texts[""], texts[""], texts["empty"], 0]
    numbers = (texts[f"{number:.5g}"] for number in (stats.abs_min, stats.abs_max))
    return [label, part, texts[about], *numbers, texts[_remark(line, stats)], int(line.is_bad)]


def _remark(line: Line, stats: TensorStats) -> str:
    remarks = []
    if stats.is_bad:
        remarks.append(bad_numbers(stats).rpartition(";")[0])
        if not line.is_bad:
            remarks.append("as the policy allows")
        if stats.finite_abs_max == stats.finite_abs_max:
            remarks.append(f"largest finite {stats.finite_abs_max:.5g}")
    names = {"zero_count": "zero", "subnormal_count": "subnormal", "abs_min_nonzero": "smallest above zero"}
    for name in DETAILS:
        if (value := getattr(stats, name)) is not None:
            remarks.append(f"{names[name]} {value:.5g}")
    return "; ".join(remarks)

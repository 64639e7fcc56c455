"""What a picture of a trace shows, before it is drawn. All values are worked by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from written_traces import frame, layers, numbers, report, write_trace

from overflowstat import TraceError, load_trace
from overflowstat.plotting.chart import Chart, Scale, Span, group_starts, make_chart

NAN: dict[str, Any] = {"nan_count": 2, "finite_abs_max": 3.0, "first_bad": [0, 1]}
INF: dict[str, Any] = {"posinf_count": 1, "finite_abs_max": 1000.0, "first_bad": [0, 0]}


def chart_of(tmp_path: Path, *lines: dict[str, Any], batches: list[int] | None = None, **options: Any) -> Chart:
    return make_chart(load_trace(write_trace(tmp_path / "run.jsonl", *lines, **options)), batches)


def only_span(chart: Chart, part: Any = "output") -> Span:
    ((span,),) = chart.view(part).spans
    return span


def test_magnitudes_are_decades(tmp_path: Path) -> None:
    span = only_span(chart_of(tmp_path, frame(0, "a", numbers("output", 0.001, 1000.0))))
    assert (span.low, span.high) == pytest.approx((-3.0, 3.0))
    assert not (span.has_nan or span.has_inf or span.is_bad)
    assert span.powers_left == pytest.approx(math.log2(65504 / 1000))


def test_zero_is_below_all_decades(tmp_path: Path) -> None:
    span = only_span(chart_of(tmp_path, frame(0, "a", numbers("output", 0.0, 10.0))))
    assert (span.low, span.high) == (-math.inf, 1.0)
    span = only_span(chart_of(tmp_path, frame(0, "a", numbers("output", 0.0, 0.0))))
    assert (span.low, span.high) == (-math.inf, -math.inf)


def test_an_infinity_is_marked_and_the_largest_finite_number_drawn(tmp_path: Path) -> None:
    span = only_span(chart_of(tmp_path, frame(0, "a", numbers("output", 1.0, "inf", **INF))))
    assert (span.low, span.high, span.has_nan, span.has_inf, span.is_bad) == (0.0, 3.0, False, True, True)


def test_nothing_but_nan_has_no_extent(tmp_path: Path) -> None:
    bad: dict[str, Any] = {"nan_count": 8, "finite_abs_max": "nan", "first_bad": [0, 0]}
    span = only_span(chart_of(tmp_path, frame(0, "a", numbers("output", "nan", "nan", **bad))))
    assert (span.low, span.high, span.powers_left, span.has_nan, span.is_bad) == (None, None, None, True, True)


def test_nothing_but_infinities_has_no_extent(tmp_path: Path) -> None:
    bad: dict[str, Any] = {"neginf_count": 8, "finite_abs_max": "nan", "first_bad": [0, 0]}
    span = only_span(chart_of(tmp_path, frame(0, "a", numbers("output", "inf", "inf", **bad))))
    assert (span.low, span.high, span.has_inf) == (None, None, True)


def test_what_a_policy_allows_is_marked_and_not_bad(tmp_path: Path) -> None:
    mask = numbers("input[0]", 1.0, "inf", "float32", **INF | {"neginf_count": 1, "posinf_count": 0}, allowed=["-inf"])
    chart = chart_of(tmp_path, frame(0, "a", mask))
    span = only_span(chart, "input")
    assert (span.has_inf, span.is_bad, chart.panels[0].bad, chart.verdicts) == (True, False, (), ())
    assert "allowed" in chart.all_is_well


def test_lines_of_a_part_are_taken_together_without_integers(tmp_path: Path) -> None:
    ids = numbers("input[0]", 2, 30521, "int64")
    x, y = numbers("input[1]", 0.01, 1.0), numbers("input[2]", 0.1, 100.0, "float32")
    chart = chart_of(tmp_path, frame(0, "a", ids, x, y), frame(0, "b", ids))
    (mixed, integers) = chart.view("input").spans[0]
    assert (mixed.low, mixed.high) == pytest.approx((-2.0, 2.0))
    # Of float16's 65504 over 1, which is nearer than float32's over 100.
    assert mixed.powers_left == pytest.approx(math.log2(65504))
    assert integers.high == pytest.approx(math.log10(30521))
    assert integers.powers_left is None


def test_what_has_no_number_is_no_column_of_a_view(tmp_path: Path) -> None:
    empty = {"label": "output", "dtype": "float16", "shape": [0], "abs_min": "nan", "abs_max": "nan"}
    chart = chart_of(
        tmp_path,
        frame(0, "a", {"label": "output", "content": "meta"}),
        frame(0, "b", empty | {"finite_abs_max": "nan"}),
        frame(0, "c", numbers("output", 1.0, 1.0)),
    )
    assert [place.module for place in chart.places] == ["a", "b", "c"]
    assert [span.place for span in chart.view("output").spans[0]] == [2]


def test_weights_inputs_outputs_and_gradients_are_views(tmp_path: Path) -> None:
    lines = [numbers(label, 1.0, 1.0) for label in ("weight", "input[0][1]", "output[logits]")]
    chart = chart_of(tmp_path, frame(0, "a", *lines), frame(0, "a", numbers("grad input[0]", 1.0, 1.0)))
    assert [view.part for view in chart.views] == ["output", "input", "weight", "gradient"]
    assert [(place.module, place.kind) for place in chart.places] == [("a", "forward"), ("a", "backward")]
    with pytest.raises(TraceError, match="no numbers of any weight"):
        chart_of(tmp_path, frame(0, "a", lines[1])).view("weight")


def test_limits_of_float16(tmp_path: Path) -> None:
    view = chart_of(tmp_path, frame(0, "a", numbers("output", 0.5, 20.0))).view("output")
    assert {text: decade for decade, text in view.limits} == pytest.approx(
        {
            "float16 smallest 5.9605e-08": -24 * math.log10(2),
            "float16 smallest normal 6.1035e-05": -14 * math.log10(2),
            "float16 max 65504": math.log10(65504),
        }
    )
    assert list(view.limits) == sorted(view.limits)
    # The smallest of all is 6.9 decades below 0.5, and 6 are near.
    assert view.scale == Scale(-5, 5)
    assert view.whole_scale == Scale(-8, 5)


def test_limits_that_are_far_do_not_stretch_the_scale(tmp_path: Path) -> None:
    view = chart_of(tmp_path, frame(0, "a", numbers("output", 0.5, 20.0, "float32"))).view("output")
    assert view.scale == Scale(-1, 2)
    assert view.whole_scale == Scale(-45, 39)


def test_dtypes_with_the_same_limit_share_a_line(tmp_path: Path) -> None:
    lines = [numbers(f"output[{i}]", 1.0, 1.0, dtype) for i, dtype in enumerate(["float32", "bfloat16", "int8"])]
    texts = [limit.text for limit in chart_of(tmp_path, frame(0, "a", *lines)).view("output").limits]
    assert [text.rpartition(" ")[0] for text in texts] == [
        "float32 smallest",
        "bfloat16 smallest",
        "bfloat16, float32 smallest normal",
        "bfloat16, float32 max",
    ]


@pytest.mark.parametrize(
    ("low", "high", "scale"), [(0.0, 0.0, (-1, 1)), (1.0, 1.0, (-1, 1)), (5.0, 7.0, (0, 2)), (3.0, 200.0, (0, 3))]
)
def test_a_scale_has_two_decades_at_least(tmp_path: Path, low: float, high: float, scale: tuple[int, int]) -> None:
    assert chart_of(tmp_path, frame(0, "a", numbers("output", low, high, "float64"))).view("output").scale == scale


def test_panels_share_places_and_scale(tmp_path: Path) -> None:
    def call(batch: int, name: str, high: float = 1.0) -> dict[str, Any]:
        return frame(batch, name, numbers("output", 1.0, high, "float64"))

    chart = chart_of(
        tmp_path,
        *[call(0, name) for name in ("a", "c", "a", "d")],
        *[call(1, name, 1e5) for name in ("a", "b", "c", "e", "d")],
    )
    assert [(place.module, place.call) for place in chart.places] == [
        ("a", 0),
        ("b", 0),
        ("c", 0),
        ("e", 0),
        ("a", 1),
        ("d", 0),
    ]
    view = chart.view("output")
    assert [[span.place for span in spans] for spans in view.spans] == [[0, 2, 4, 5], [0, 1, 2, 3, 5]]
    assert view.scale == Scale(0, 5)


def test_a_recomputed_call_is_a_place_of_its_own(tmp_path: Path) -> None:
    line = numbers("output", 1.0, 1.0)
    chart = chart_of(tmp_path, frame(0, "a", line), frame(0, "a", line, recompute=True))
    assert [place.note for place in chart.places] == ["", "recomputed"]


def batches_of(tmp_path: Path, count: int, bad: set[int]) -> list[int]:
    lines = [
        frame(i, "a", numbers("output", 1.0, "inf", **INF) if i in bad else numbers("output", 1.0, 1.0))
        for i in range(count)
    ]
    return [panel.number for panel in chart_of(tmp_path, *lines).panels]


def test_six_batches_are_chosen_with_the_first_bad_one_and_the_one_before(tmp_path: Path) -> None:
    assert batches_of(tmp_path, 6, set()) == [0, 1, 2, 3, 4, 5]
    assert batches_of(tmp_path, 101, set()) == [0, 20, 40, 60, 80, 100]
    assert batches_of(tmp_path, 101, {70, 71, 90, 99}) == [0, 69, 70, 71, 90, 100]
    assert batches_of(tmp_path, 101, {0}) == [0, 20, 40, 60, 80, 100]


def test_a_note_tells_which_are_not_shown(tmp_path: Path) -> None:
    lines = [frame(i, "a", numbers("output", 1.0, 1.0)) for i in range(9)]
    assert chart_of(tmp_path, *lines).notes == ("6 of 9 batches are shown; --batches chooses others",)
    assert chart_of(tmp_path, *lines[:6], ends=False).notes == (
        "the trace is not ended: its process was killed, or still runs",
    )


def test_batches_that_are_asked_for(tmp_path: Path) -> None:
    lines = [frame(i, "a", numbers("output", 1.0, 1.0)) for i in (0, 3, 7)]
    assert [panel.number for panel in chart_of(tmp_path, *lines, batches=[7, 0]).panels] == [0, 7]
    with pytest.raises(TraceError, match=r"no frames of batch 2: it has 3 batches, from 0 to 7"):
        chart_of(tmp_path, *lines, batches=[0, 2])


def test_the_verdict_is_that_of_the_report(tmp_path: Path) -> None:
    lines = [
        frame(0, "a", numbers("weight", 1.0, "inf", **INF), numbers("output", 1.0, 1.0)),
        frame(0, "b", numbers("output", 1.0, "inf", **INF)),
        report(0, "b", "output", "overflowstat: inf in batch 0, first in b\n  kind  cast-overflow"),
        report(8, "a", "weight", "another"),
    ]
    chart = chart_of(tmp_path, *lines)
    first, second = chart.verdicts
    assert first.text.endswith("cast-overflow")
    assert (first.panel, first.place) == (0, 1)
    assert (second.panel, second.place) == (None, None)
    assert chart.shown == "output"


def test_bad_frames_without_a_report_are_told(tmp_path: Path) -> None:
    bad = frame(4, "b", numbers("weight", 1.0, "nan", **NAN), numbers("output", 1.0, 1.0))
    chart = chart_of(tmp_path, frame(4, "a", numbers("output", 1.0, 1.0)), bad, bad | {"module": "c"})
    (verdict,) = chart.verdicts
    assert verdict.text == "nan in batch 4, first in b (Linear), weight; 1 more module calls are bad"
    assert (verdict.panel, verdict.place) == (0, 1)
    assert chart.shown == "weight"  # since that is what is bad
    assert chart.panels[0].bad == (1, 2)


def test_a_line_that_is_not_judged_makes_no_call_bad(tmp_path: Path) -> None:
    chart = chart_of(tmp_path, frame(0, "a", numbers("weight", 1.0, "inf", **INF, judged=False)))
    assert chart.panels[0].bad == ()
    assert not only_span(chart, "weight").is_bad


def test_names_are_shown_with_escapes_for_what_a_terminal_obeys(tmp_path: Path) -> None:
    name = "a\x1b[31m\n\u202eb\u2028"
    chart = chart_of(tmp_path, frame(0, name, numbers("output", 1.0, "inf", **INF), cls="C\x07"))
    (place,) = chart.places
    assert place.module == name
    assert (place.name, place.shown_class) == (r"a\x1b[31m\n\u202eb\u2028", r"C\x07")
    assert chart.verdicts[0].text == rf"inf in batch 0, first in {place.name} (C\x07), output"


def test_modules_whose_escaped_names_are_the_same_are_two(tmp_path: Path) -> None:
    line = numbers("output", 1.0, 1.0)
    assert len(chart_of(tmp_path, frame(0, "a\n", line), frame(0, r"a\n", line)).places) == 2


def test_folders_are_not_told(tmp_path: Path) -> None:
    chart = chart_of(tmp_path, frame(0, "a", numbers("output", 1.0, 1.0)), world_size=4, rank=2)
    assert chart.title == "run.jsonl"
    assert chart.about == "Net, rank 2 of 4, begun 2026-11-30 10:00:00 UTC, torch 2.13.0"


def test_no_frames_and_no_numbers(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"run\.jsonl' has no frames"):
        chart_of(tmp_path)
    with pytest.raises(TraceError, match="1 frames without a number"):
        chart_of(tmp_path, frame(0, "a", {"label": "output", "content": "meta"}))


@pytest.mark.parametrize(
    ("low", "high"),
    [(-1.0, 1.0), (2.0, 1.0), (1.0, 1e999), ("inf", 1.0), ("nan", 1.0), (1, 10**400)],
    ids=["negative", "reversed", "inf", "from inf", "from nan", "huge"],
)
def test_magnitudes_that_make_no_sense(tmp_path: Path, low: Any, high: Any) -> None:
    path = write_trace(tmp_path / "run.jsonl", frame(3, "a", numbers("output", low, high, "float64")))
    path.write_text(path.read_text().replace("Infinity", "1e999"))
    with pytest.raises(TraceError, match=r"^a, output, in batch 3: magnitudes from .* make no sense"):
        make_chart(load_trace(path))


def test_integers_beyond_a_double(tmp_path: Path) -> None:
    span = only_span(chart_of(tmp_path, frame(0, "a", numbers("output", 0, 2**63, "int64"))))
    assert span.high == pytest.approx(63 * math.log10(2))


def test_group_starts_go_as_deep_as_fits() -> None:
    names = ["embed", "layer.0.a", "layer.0.b", "layer.0", "layer.1.a", "layer.1", "head"]
    assert group_starts(names, 3) == [(0, "embed"), (1, "layer"), (6, "head")]
    assert group_starts(names, 4) == [(0, "embed"), (1, "layer.0"), (4, "layer.1"), (6, "head")]
    deepest = [(0, "embed"), (1, "layer.0.a"), (2, "layer.0.b"), (4, "layer.1.a"), (6, "head")]
    assert group_starts(names, 5) == group_starts(names, 99) == deepest


def test_group_starts_of_many_layers_are_some_of_them() -> None:
    names = [f"model.layers.{i}.{part}" for i in range(30) for part in ("a", "b")]
    assert group_starts(names, 10) == [(i * 2, f"model.layers.{i}") for i in range(0, 30, 3)]


@pytest.mark.parametrize("most", [1, 2, 7, 100])
def test_group_starts_are_never_more_than_asked_for(tmp_path: Path, most: int) -> None:
    names = [place.name for place in make_chart(load_trace(layers(tmp_path / "run.jsonl", 300))).places]
    assert 1 <= len(group_starts(names, most)) <= most

"""The page of a trace in a real browser, which has to be on PATH: drawn, searched, sorted, and used from the keyboard.

Colours and heights are those that the style sheet and the layout give, worked by hand.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import NAMES, Browser, Page, find_browser
from test_plot_page import HOSTILE, hostile_trace
from written_traces import frame, layers, numbers, report, write_trace

from overflowstat import load_trace
from overflowstat.plotting.chart import make_chart
from overflowstat.plotting.page import page

pytestmark = pytest.mark.skipif(find_browser() is None, reason=f"no browser on PATH: none of {', '.join(NAMES)}")

LEFT, RIGHT, TOP, LANE, BODY = 58, 10, 4, 16, 380  # of page.js, with one panel
LIGHT = {"ground": (255, 255, 255), "span": (169, 205, 234), "peak": (11, 95, 165), "floor": (238, 241, 244)}
LIGHT |= {"call": (251, 224, 208), "bad": (176, 64, 10), "muted": (87, 96, 106)}
DARK = {"ground": (20, 24, 29), "span": (43, 85, 120), "bad": (255, 159, 97)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    assert program is not None
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def view(browser: Browser, tmp_path: Path) -> Iterator[Any]:
    """Opens the page of a trace; fails if it complains of anything or asks for anything but itself."""
    opened: list[tuple[Page, Path]] = []

    def open_page(trace: Path, **options: Any) -> Page:
        path = tmp_path / f"{len(opened)}.html"
        path.write_text(page(make_chart(load_trace(trace))), "utf-8")
        opened.append((browser.open(path, **options), path))
        return opened[-1][0]

    yield open_page
    for shown, path in opened:
        # The browser has advice on how often these tests read pixels.
        assert [message for message in shown.messages if "willReadFrequently" not in message] == []
        assert shown.requests == [path.as_uri()]
        shown.close()


def pixel(shown: Page, x: float, y: float, panel: int = 0) -> tuple[int, ...]:
    shown.wait_for(f"document.querySelectorAll('canvas')[{panel}].style.height !== ''")
    shown.settle()
    found = shown.evaluate(
        f"[...document.querySelectorAll('canvas')[{panel}].getContext('2d').getImageData({x}, {y}, 1, 1).data]"
    )
    return tuple(found[:3])


def column(shown: Page, k: int, count: int) -> float:
    """The middle of the k-th of so many columns."""
    inner: float = shown.evaluate("document.querySelector('canvas').clientWidth") - LEFT - RIGHT
    return LEFT + (k + 0.5) * inner / count


def shown_names(shown: Page) -> list[str]:
    """In the order of the columns, by the table below the charts."""
    shown.evaluate("document.getElementById('table').open = true")
    shown.wait_for("document.querySelector('#table caption') !== null")
    names: list[str] = shown.evaluate("[...document.querySelectorAll('#table tbody button')].map(b => b.textContent)")
    return names


def choose(shown: Page, name: str, value: str) -> None:
    shown.evaluate(
        f"(element => {{ element.value = {value!r}; element.dispatchEvent(new Event('input'));"
        f" element.dispatchEvent(new Event('change')); }})(document.getElementById({name!r}))"
    )
    shown.settle()


def focus(shown: Page, panel: int = 0) -> None:
    shown.evaluate(f"document.querySelectorAll('figure')[{panel}].focus()")


def reading(shown: Page) -> str:
    """What is told of a call, or nothing."""
    text: str = shown.evaluate(
        "document.getElementById('reading').hidden ? '' : document.getElementById('reading').innerText"
    )
    return text


def count_text(shown: Page) -> str:
    text: str = shown.evaluate("document.getElementById('count').textContent")
    return text


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A layer, a ReLU with zeros, and one that is NaN and inf: decades -8 to 5, since float16's limits are near."""
    bad: dict[str, Any] = {"nan_count": 1, "posinf_count": 1, "finite_abs_max": 100.0, "first_bad": [0, 0]}
    return write_trace(
        tmp_path / "three.jsonl",
        frame(0, "0", numbers("weight", 0.1, 0.5), numbers("output", 0.01, 10.0)),
        frame(0, "1", numbers("output", 0.0, 10.0), cls="ReLU"),
        frame(0, "2", numbers("output", 1.0, "inf", **bad)),
        report(0, "2", "output", "overflowstat: nan and inf in batch 0, first in 2 (Linear), output\n  kind unknown"),
    )


def height(decade: float) -> int:
    first, last = TOP + 2 * LANE, TOP + BODY - LANE
    return round(last - (decade + 8) / 13 * (last - first))


def test_magnitudes_are_where_the_scale_has_them(view: Any, three: Path) -> None:
    shown = view(three)
    x = column(shown, 0, 3)
    assert pixel(shown, x, height(1)) == LIGHT["peak"]
    assert pixel(shown, x, height(1) - 4) == LIGHT["ground"]
    assert pixel(shown, x, height(1) + 4) == LIGHT["span"]
    assert pixel(shown, x, height(-2) - 3) == LIGHT["span"]
    assert pixel(shown, x, height(-2) + 4) == LIGHT["ground"]


def test_zero_reaches_into_the_floor(view: Any, three: Path) -> None:
    shown = view(three)
    floor = TOP + BODY - LANE + 4
    assert pixel(shown, column(shown, 0, 3), floor) == LIGHT["floor"]
    assert pixel(shown, column(shown, 1, 3), floor) == LIGHT["span"]


def test_nan_and_inf_have_marks_of_their_own_and_a_bad_call_a_ground(view: Any, three: Path) -> None:
    shown = view(three)
    x = column(shown, 2, 3)
    assert pixel(shown, x, TOP + LANE // 2) == LIGHT["bad"]  # the middle of a cross
    assert pixel(shown, x, TOP + LANE + LANE // 2) == LIGHT["bad"]  # of a triangle
    assert pixel(shown, x, height(3)) == LIGHT["call"]
    assert pixel(shown, x, height(2)) == LIGHT["peak"]
    assert pixel(shown, column(shown, 0, 3), TOP + LANE // 2) == LIGHT["ground"]


def test_limits_are_dashed_lines(view: Any, three: Path) -> None:
    shown = view(three)
    row = [pixel(shown, LEFT + 20 + i, height(4.8163)) for i in range(20)]
    assert len(set(row)) > 1
    assert LIGHT["ground"] in row


def test_in_the_dark(view: Any, three: Path) -> None:
    shown = view(three, scheme="dark")
    x = column(shown, 0, 3)
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    assert pixel(shown, x, height(0)) == DARK["span"]
    assert pixel(shown, x, height(3)) == DARK["ground"]
    assert pixel(shown, column(shown, 2, 3), TOP + LANE // 2) == DARK["bad"]
    shown.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    shown.settle()
    assert pixel(shown, x, height(0)) == LIGHT["span"]


def test_allowed_marks_are_not_those_of_bad_ones(view: Any, tmp_path: Path) -> None:
    mask = numbers("output", 1.0, "inf", neginf_count=1, finite_abs_max=2.0, first_bad=[0, 0], allowed=["-inf"])
    shown = view(write_trace(tmp_path / "run.jsonl", frame(0, "mask", mask)))
    x, y = column(shown, 0, 1), TOP + LANE + LANE // 2
    assert pixel(shown, x, y) == LIGHT["ground"]  # a triangle that is not filled
    assert pixel(shown, x, y + 4)[0] < 200
    assert shown.evaluate("document.querySelector('.verdict').className") == "verdict good"


def test_the_verdict_is_on_top(view: Any, three: Path) -> None:
    shown = view(three)
    text = shown.evaluate("document.querySelector('.verdict').innerText")
    assert text.split("\n")[0] == "nan and inf in batch 0, first in 2 (Linear), output"
    assert "kind unknown" in text
    below = "getBoundingClientRect().bottom <= document.querySelector('figure').getBoundingClientRect().top"
    assert shown.evaluate(f"document.querySelector('.verdict').{below}")


def test_what_is_pointed_at_is_told(view: Any, three: Path) -> None:
    shown = view(three)
    box = shown.evaluate("document.querySelector('canvas').getBoundingClientRect().toJSON()")
    shown.move(box["x"] + column(shown, 0, 3), box["y"] + 100)
    told = reading(shown)
    assert told.startswith("0\n")
    assert "Linear, batch 0" in told
    assert "output\t0.01\t10\tfloat16 [2, 4]" in told
    assert "weight\t0.1\t0.5" in told
    shown.move(box["x"] + column(shown, 2, 3), box["y"] + 100)
    assert "inf\tfloat16 [2, 4]; 1 of 8 is nan, 1 of 8 is +inf" in reading(shown)
    shown.move(5, 5)
    assert reading(shown) == ""


def test_the_keyboard_goes_from_call_to_call(view: Any, three: Path) -> None:
    shown = view(three)
    focus(shown)
    for key, name in [("Home", "0"), ("ArrowRight", "1"), ("End", "2"), ("ArrowRight", "2"), ("ArrowLeft", "1")]:
        shown.press(key)
        assert reading(shown).split("\n")[0] == name
        assert shown.evaluate("document.activeElement.getAttribute('aria-valuetext')").startswith(f"{name}, ")
    shown.press("Escape")
    assert reading(shown) == ""
    shown.press("/")
    assert shown.evaluate("document.activeElement.id") == "search"


def test_every_control_can_be_reached_by_tab(view: Any, three: Path) -> None:
    shown = view(three)
    met = []
    for _ in range(30):
        shown.press("Tab")
        met.append(shown.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"search", "part", "order", "whole", "bad", "FIGURE", "SUMMARY"} <= set(met)


def test_search_leaves_the_columns_that_have_all_words(view: Any, tmp_path: Path) -> None:
    shown = view(layers(tmp_path / "run.jsonl", 300))
    assert count_text(shown) == "300 calls"
    choose(shown, "search", "LAYERS.2 part7")
    names = ["model.layers.2.part7", *(f"model.layers.2{i}.part7" for i in range(10))]
    assert count_text(shown) == "11 of 300 calls"
    assert shown_names(shown) == names
    choose(shown, "search", "nowhere")
    assert count_text(shown) == "0 of 300 calls"
    assert shown_names(shown) == []
    focus(shown)
    for key in ("+", "-", "PageDown", "ArrowRight", "End", "n", "0"):
        shown.press(key)
    assert reading(shown) == ""
    choose(shown, "search", "")
    assert count_text(shown) == "300 calls"
    focus(shown)
    shown.press("Home")
    assert reading(shown).startswith("model.layers.0.part0\n")


def test_orders(view: Any, tmp_path: Path) -> None:
    nan: dict[str, Any] = {"nan_count": 8, "finite_abs_max": "nan", "first_bad": [0, 0]}
    shown = view(
        write_trace(
            tmp_path / "run.jsonl",
            frame(0, "b", numbers("output", 0.1, 50.0)),
            frame(0, "a", numbers("output", 0.0, 1000.0, "float32")),
            frame(0, "d", numbers("output", "nan", "nan", **nan)),
            frame(0, "c", numbers("output", 1.0, 40.0)),
        )
    )
    assert shown_names(shown) == ["b", "a", "d", "c"]
    for order, names in {
        "by name": "abcd",
        "largest abs max first": "dabc",
        "smallest abs min first": "abcd",
        "nearest to their limit first": "bcad",
        "as they ran": "badc",
    }.items():
        choose(shown, "order", order)
        assert "".join(shown_names(shown)) == names, order


def test_the_largest_change_between_batches(view: Any, tmp_path: Path) -> None:
    highs = {"a": (1.0, 2.0), "b": (5.0, 5.0), "c": (8.0, 1.0), "d": (0.0, 1.0)}
    lines = [
        frame(batch, name, numbers("output", 0.0, high[batch])) for batch in (0, 1) for name, high in highs.items()
    ]
    shown = view(write_trace(tmp_path / "run.jsonl", *lines))
    choose(shown, "order", "largest change first")
    assert shown_names(shown)[::2] == ["d", "c", "a", "b"]


def test_other_tensors_can_be_drawn(view: Any, three: Path) -> None:
    shown = view(three)
    assert shown.evaluate("[...document.getElementById('part').options].map(o => o.textContent)") == [
        "outputs",
        "weights",
    ]
    choose(shown, "part", "1")
    assert shown_names(shown) == ["0"]


def test_to_all_limits(view: Any, tmp_path: Path) -> None:
    shown = view(write_trace(tmp_path / "run.jsonl", frame(0, "a", numbers("output", 1.0, 100.0, "float32"))))
    x = column(shown, 0, 1)
    middle = TOP + 2 * LANE + (BODY - 3 * LANE) // 2
    assert pixel(shown, x, middle + 8) == LIGHT["span"]
    shown.evaluate("document.getElementById('whole').click()")
    shown.settle()
    assert pixel(shown, x, middle + 8) == LIGHT["ground"]


def test_dragging_zooms_in_and_zero_shows_all(view: Any, tmp_path: Path) -> None:
    shown = view(layers(tmp_path / "run.jsonl", 300))
    box = shown.evaluate("document.querySelector('canvas').getBoundingClientRect().toJSON()")
    start, end = (box["x"] + column(shown, k, 300) for k in (100, 119))
    shown.drag(start, box["y"] + 150, end)
    shown.move(box["x"] + column(shown, 0, 20), box["y"] + 100)
    assert reading(shown).startswith("model.layers.10.part0\n")
    shown.move(box["x"] + column(shown, 19, 20), box["y"] + 100)
    assert reading(shown).startswith("model.layers.11.part9\n")
    focus(shown)
    shown.press("0")
    shown.move(box["x"] + column(shown, 0, 300), box["y"] + 100)
    assert reading(shown).startswith("model.layers.0.part0\n")


def test_zoom_and_pan_by_keys(view: Any, tmp_path: Path) -> None:
    shown = view(layers(tmp_path / "run.jsonl", 300))
    box = shown.evaluate("document.querySelector('canvas').getBoundingClientRect().toJSON()")

    def first() -> str:
        shown.move(box["x"] + LEFT + 1, box["y"] + 100)
        return reading(shown).split("\n")[0]

    focus(shown)
    shown.press("+")  # 75 to 225
    assert first() == "model.layers.7.part5"
    shown.press("PageDown")  # by 120, up to the end
    assert first() == "model.layers.15.part0"
    shown.press("PageUp")
    assert first() == "model.layers.3.part0"
    shown.press("-")
    assert first() == "model.layers.0.part0"


def test_next_bad_call(view: Any, tmp_path: Path) -> None:
    good = numbers("output", 1.0, 2.0)
    bad = numbers("output", 1.0, "inf", posinf_count=1, finite_abs_max=1.0, first_bad=[0, 0])
    lines = [
        frame(batch, f"m{i}", bad if (batch, i) in {(1, 3), (2, 1)} else good) for batch in (0, 1, 2) for i in range(5)
    ]
    shown = view(write_trace(tmp_path / "run.jsonl", *lines))
    focus(shown)
    told = []
    for _ in range(3):
        shown.press("n")
        told.append(reading(shown).split("\n")[:2])
    assert told == [["m3", "Linear, batch 1"], ["m1", "Linear, batch 2"], ["m3", "Linear, batch 1"]]


def test_several_batches_are_drawn_one_below_the_other(view: Any, tmp_path: Path) -> None:
    shown = view(layers(tmp_path / "run.jsonl", 40, batches=3, bad_from=35), height=1400)
    texts = shown.evaluate("[...document.querySelectorAll('figcaption')].map(c => c.textContent)")
    assert texts == ["Batch 0", "Batch 1", "Batch 2, 5 of 40 calls bad"]
    x = column(shown, 37, 40)
    assert pixel(shown, x, 120, panel=0) != LIGHT["call"]
    assert pixel(shown, x, 120, panel=2) == LIGHT["call"]
    focus(shown, 1)
    shown.press("Home")
    assert "batch 1" in reading(shown)
    assert not shown.evaluate("[...document.querySelectorAll('.cursor')].some(c => c.hidden)")  # in all of them


def test_a_place_that_a_batch_has_not(view: Any, tmp_path: Path) -> None:
    line = numbers("output", 1.0, 2.0)
    shown = view(write_trace(tmp_path / "run.jsonl", frame(0, "a", line), frame(0, "b", line), frame(1, "a", line)))
    focus(shown, 1)
    shown.press("End")
    assert "not called in this batch" in reading(shown)


def test_hostile_names_are_text(view: Any, tmp_path: Path) -> None:
    shown = view(hostile_trace(tmp_path / "run.jsonl"))
    assert shown.evaluate("document.querySelectorAll('script').length") == 2
    assert shown.evaluate("document.images.length") == 0
    assert shown_names(shown)[0] == HOSTILE[0]
    assert HOSTILE[0] in shown.evaluate("document.querySelector('.verdict h2').textContent")
    focus(shown)
    for i in range(len(HOSTILE)):
        shown.press("Home" if i == 0 else "ArrowRight")
        assert reading(shown).split("\n")[0].startswith(HOSTILE[i][:4] if HOSTILE[i][:4].isprintable() else "\\")
    choose(shown, "search", "</script>")
    assert count_text(shown) == f"2 of {len(HOSTILE) + 1} calls"


def test_its_policy_is_kept_by_the_browser(browser: Browser, three: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    text = page(make_chart(load_trace(three)))
    path.write_text(text.replace("<header>", "<header><script>window.ran = 1</script><img src='data:,x'>"), "utf-8")
    shown = browser.open(path)
    assert shown.evaluate("window.ran === undefined")
    assert sum("Content Security Policy" in message for message in shown.messages) == 2
    shown.close()


@pytest.mark.parametrize("batches", [1, 3])
def test_three_thousand_calls_stay_fluent(view: Any, tmp_path: Path, batches: int) -> None:
    shown = view(layers(tmp_path / "run.jsonl", 3000, batches, bad_from=2500), height=1400)
    x = column(shown, 2700, 3000)
    assert pixel(shown, x, 120, panel=batches - 1) == LIGHT["call"]
    # In which all that is to be seen is drawn, in milliseconds; other processes may run at the same time.
    times = shown.evaluate(
        """new Promise(async (done) => {
          const ask = window.requestAnimationFrame, times = [];
          window.requestAnimationFrame = (act) => ask((at) => {
            const start = performance.now();
            act(at);
            times.push(performance.now() - start);
          });
          for (let i = 0; i < 9; i++) {
            window.dispatchEvent(new Event("resize"));
            await new Promise((go) => ask(() => ask(go)));
          }
          done(times.sort((a, b) => a - b));
        })"""
    )
    assert len(times) == 9
    assert times[0] < 100
    focus(shown, batches - 1)
    shown.press("n")
    assert reading(shown).startswith("model.layers.250.part1\n")
    choose(shown, "order", "nearest to their limit first")
    assert len(shown_names(shown)) == 500
    assert f"the first 500 of {3000 * batches} rows" in shown.evaluate("document.querySelector('caption').textContent")


@pytest.mark.parametrize("width", [320, 390, 1200, 2500])
def test_no_width_makes_the_page_scroll_sideways(view: Any, tmp_path: Path, width: int) -> None:
    name = ".".join(["a_module_with_a_long_name"] * 12)
    bad = numbers("output", 1.0, "inf", posinf_count=1, finite_abs_max=1.0, first_bad=[0, 0])
    trace = write_trace(
        tmp_path / "run.jsonl", frame(0, name, bad, cls="Class" * 40), frame(0, "b", bad), root="R" * 300
    )
    shown = view(trace, width=width)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    focus(shown)
    shown.press("Home")
    box = shown.evaluate("document.getElementById('reading').getBoundingClientRect().toJSON()")
    assert box["left"] >= 0
    assert box["right"] <= width


def test_it_prints(view: Any, three: Path) -> None:
    shown = view(three)
    pdf = base64.b64decode(shown.call("Page.printToPDF")["data"])
    assert pdf.startswith(b"%PDF")

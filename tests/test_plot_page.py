"""The page of a trace as a text: what is markup in it, and what is not."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from written_traces import frame, layers, numbers, report, write_trace

from overflowstat import Monitor, load_trace
from overflowstat.plotting.chart import make_chart
from overflowstat.plotting.page import page
from overflowstat.recorder import RecorderName

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "<img src=x onerror=alert(1)>",
    "&lt;b&gt; \"quoted\" 'single'",
    "line\u2028separator\u2029",
    "{{data}} {{script}} \\g<0> \\1",
    "\ud800 half",
    "\x1b]0;title\x07\n\x00",
    "\u202etxet",
    "日本語 🦜",
]


class Read(HTMLParser):
    """The elements of a page with their attributes, and the text in each kind of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    @property
    def data(self) -> Any:
        (text,) = (text for text in self.texts["script"] if text.startswith('{"places"'))
        return json.loads(text)


def page_of(path: Path) -> str:
    return page(make_chart(load_trace(path)))


def hostile_trace(path: Path) -> Path:
    bad: dict[str, Any] = {"nan_count": 1, "finite_abs_max": 1.0, "first_bad": [0, 0]}
    lines = [frame(0, name, numbers(name, 0.5, 1.0), numbers("output", 0.5, 1.0), cls=name) for name in HOSTILE]
    told = [report(0, HOSTILE[0], "output", f"overflowstat: nan in {name}\n  by {name}") for name in HOSTILE]
    return write_trace(path, *lines, frame(0, HOSTILE[0], numbers("output", 0.5, "nan", **bad)), *told, root=HOSTILE[0])


def test_a_page_of_hostile_names_has_the_elements_of_one_of_plain_names(tmp_path: Path) -> None:
    plain = ["a" * (i + 1) for i in range(len(HOSTILE))]
    text = hostile_trace(tmp_path / "hostile.jsonl").read_text()
    for name, other in zip(HOSTILE, plain, strict=True):
        text = text.replace(json.dumps(name)[1:-1], other)
    (tmp_path / "plain.jsonl").write_text(text)
    hostile, tame = (page_of(tmp_path / f"{name}.jsonl") for name in ("hostile", "plain"))
    assert Read(hostile).elements == Read(tame).elements


def test_hostile_names_are_what_the_script_is_given(tmp_path: Path) -> None:
    read = Read(page_of(hostile_trace(tmp_path / "run.jsonl")))
    given = [name for name, _, _ in read.data["places"]]
    assert given[:3] == HOSTILE[:3]
    assert given[4] == r"line\u2028separator\u2029"
    assert given[5] == HOSTILE[5]
    assert given[6:9] == [r"\ud800 half", r"\x1b]0;title\x07\n\x00", r"\u202etxet"]
    assert given[9] == HOSTILE[9]
    assert any(HOSTILE[0] in text for text in read.texts["h2"])


def test_a_page_is_utf_8_whatever_is_in_it(tmp_path: Path) -> None:
    text = page_of(hostile_trace(tmp_path / "run.jsonl"))
    assert text.encode().decode() == text
    assert text.index('<meta charset="utf-8">') < 1024
    assert not any(ord(c) < 32 and c != "\n" for c in text)


def test_the_block_of_data_cannot_end_early(tmp_path: Path) -> None:
    text = page_of(hostile_trace(tmp_path / "run.jsonl"))
    block = text.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    assert json.loads(block)["places"]
    assert not set("<>&\u2028\u2029") & set(block)


def test_its_policy_allows_its_own_script_and_style_and_nothing_else(tmp_path: Path) -> None:
    text = page_of(layers(tmp_path / "run.jsonl", 3))
    read = Read(text)
    (policy,) = (a["content"] for tag, a in read.elements if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy).split(";"))
    style = text.partition("<style>")[2].partition("</style>")[0]
    script = text.rpartition("<script>")[2].partition("</script>")[0]

    def digest(source: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"

    assert rules == {
        "default-src": "'none'",
        "script-src": digest(script),
        "style-src": digest(style),
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_nothing_in_it_is_fetched(tmp_path: Path) -> None:
    text = page_of(layers(tmp_path / "run.jsonl", 3))
    read = Read(text)
    assert not [a for _, a in read.elements if {"src", "href", "srcset", "data", "action"} & a.keys()]
    assert not re.search(
        r"https?:|//\w|@import|url\(|\beval\b|\bFunction\(|innerHTML|insertAdjacent|document\.write", text
    )


def test_no_path_and_no_environment_is_in_it(tmp_path: Path) -> None:
    assert str(tmp_path) not in page_of(layers(tmp_path / "run.jsonl", 3))


def test_numbers_of_a_call(tmp_path: Path) -> None:
    bad: dict[str, Any] = {"nan_count": 2, "posinf_count": 1, "finite_abs_max": 65504.0, "first_bad": [1, 3]}
    trace = write_trace(
        tmp_path / "run.jsonl",
        frame(
            0,
            "a",
            numbers("weight", 0.0, 3.4028234663852886e38, "float32"),
            numbers("output", 0.000123456, "inf", **bad),
            {"label": "output[1]", "content": "offloaded"},
        ),
    )
    data = Read(page_of(trace)).data
    ((place, lines),) = data["panels"][0]["calls"]
    told = [[data["texts"][item] for item in line[:6]] + line[6:] for line in lines]
    assert place == 0
    assert told == [
        ["weight", "weight", "float32 [2, 4]", "0", "3.4028e+38", "", 0],
        [
            "output",
            "output",
            "float16 [2, 4]",
            "0.00012346",
            "inf",
            "2 of 8 are nan, 1 of 8 is +inf, first at [1, 3]; largest finite 65504",
            1,
        ],
        ["output[1]", "output", "offloaded", "", "", "", 0],
    ]
    (view,) = (view for view in data["views"] if view["part"] == "weight")
    assert view["spans"] == [[[0, "-inf", 38.5318, 0.0, 0]]]


def test_later_detections_are_folded(tmp_path: Path) -> None:
    bad = frame(0, "a", numbers("output", 1.0, "inf", posinf_count=1, finite_abs_max=1.0, first_bad=[0, 0]))
    told = [report(0, "a", "output", f"overflowstat: number {i}") for i in range(25)]
    read = Read(page_of(write_trace(tmp_path / "run.jsonl", bad, *told)))
    assert read.texts["h2"] == ["number 0"]
    assert "Detections after it: 19" in read.texts["summary"]
    assert "20 of 25 detections are shown" in read.texts["li"]


def test_a_real_run(tmp_path: Path, recorder_name: RecorderName) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with Monitor(model, trace_file=tmp_path / "run.jsonl", sinks=[], recorder=recorder_name) as monitor:
        model(torch.randn(3, 4))
        with torch.no_grad():
            model.get_parameter("2.bias")[0] = torch.inf
        with pytest.raises(ValueError, match="inf in batch 1"):
            model(torch.randn(3, 4))
        monitor.remove()
    data = Read(page_of(tmp_path / "run.jsonl")).data
    assert [[place[:2] for place in data["places"]]] == [
        [["0", "Linear"], ["1", "ReLU"], ["2", "Linear"], ["(root)", "Sequential"]]
    ]
    assert [(panel["number"], panel["bad"]) for panel in data["panels"]] == [(0, []), (1, [2])]
    assert data["first"] == [1, 2]
    assert data["shown"] == "weight"
    outputs = next(view for view in data["views"] if view["part"] == "output")
    relu = outputs["spans"][0][1]
    assert relu[1] == "-inf"  # a ReLU gives zeros

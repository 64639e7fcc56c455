"""Names of modules come from users: none of them may obey to a terminal, wherever a monitor shows it."""

from __future__ import annotations

import logging
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from overflowstat import LoggingSink, Monitor, NonFiniteError, Printer, check_gradients, check_weights, load_trace
from overflowstat.errors import MonitorWarning
from overflowstat.recorder import RecorderName

# Colours and a cleared screen, a title, a bell, C1 controls, a line that seems to be another, letters right to left.
NAMES = ["a\x1b[31m\x1b[2Jb", "a\x1b]0;title\x07b", "a\x9b31mb", "a\nb\rc", "a\u202eb\u2066c", "a\ud800b", "a\x00b"]


def escaped(name: str) -> str:
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape", "surrogatepass").decode() for c in name)


def may_be_shown(text: str) -> bool:
    return text.replace("\n", "").isprintable()


class Holds(nn.Module):
    """A child of that name, which gives NaN, under a keyword of the same."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return next(self.children())(x) / 0.0 * 0.0  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_printed_and_raised_has_escapes(
    name: str, recorder_name: RecorderName, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    model = Holds(name)
    with Monitor(model, recorder=recorder_name, trace_batch_nums=[0], trace_file=path):
        model(torch.ones(2, 4))
        with pytest.raises(NonFiniteError) as raised:
            model(torch.full((2, 4), math.nan))
    out = capsys.readouterr().out
    assert may_be_shown(out) and may_be_shown(str(raised.value))
    shown = f"{escaped(name)} Identity"
    assert out.count(f" {shown}\n") == 2 and f"first in {escaped(name)} (Identity), input[0]" in str(raised.value)
    found = load_trace(path)
    assert {frame.module for frame in found.frames} == {name, ""}  # data are as they are
    assert may_be_shown(found.reports[0].text)


def test_what_is_logged_and_warned_of_has_escapes(
    recorder_name: RecorderName, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = Holds(NAMES[0])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with Monitor(model, recorder=recorder_name, sinks=[LoggingSink(), Printer()], on_detect="warn"):
            model(torch.full((2, 4), math.nan))
            model(torch.full((2, 4), math.nan))
    texts = [*(str(each.message) for each in told if each.category is MonitorWarning), *caplog.messages]
    assert len(texts) >= 3  # a detection, that it came again, and the report that was logged
    assert all(may_be_shown(text) for text in texts)
    assert all(escaped(NAMES[0]) in text for text in texts)


def test_a_key_of_what_a_module_gives_has_escapes(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    class Gives(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {NAMES[0]: x / 0.0}

    model = Gives()
    with pytest.raises(NonFiniteError) as raised, Monitor(model, recorder=recorder_name):
        model(torch.ones(2, 4))
    out = capsys.readouterr().out
    assert may_be_shown(out) and may_be_shown(str(raised.value))
    assert f"inf output[{escaped(NAMES[0])}]\n" in out


def test_tables_have_escapes(recorder_name: RecorderName) -> None:
    linear, model = nn.Linear(4, 4), nn.Sequential()
    model.add_module(NAMES[0], linear)
    with torch.no_grad():
        linear.bias[0] = math.inf
    checked = str(check_weights(model, recorder=recorder_name))
    assert may_be_shown(checked) and f"\n  {escaped(NAMES[0])}.bias: 1 of 4 is +inf" in checked
    unread = str(check_gradients(model, recorder=recorder_name))
    assert may_be_shown(unread) and f"no gradient: {escaped(NAMES[0])}.weight" in unread
    nn.init.ones_(linear.bias)
    with Monitor(model, recorder=recorder_name) as monitor:
        model(torch.ones(2, 4))
        table = str(monitor.headroom())
    assert may_be_shown(table) and f" {escaped(NAMES[0])} input[0]" in table

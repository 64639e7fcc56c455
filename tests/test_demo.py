"""The demo overflows where it says, and the README shows what it prints."""

import re
from pathlib import Path

import pytest

from overflowstat import demo

README = Path(__file__).parent.parent / "README.md"


def without_digits(text: str) -> str:
    """Dropout masks, and with them the numbers, differ between kinds of CPU."""
    return re.sub(r"\d", "#", text)


def test_the_demo_overflows_in_the_last_dropout(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run() == 0
    printed = capsys.readouterr().out
    assert "overflowstat: inf in batch 0, first in block.2.dropout (Dropout), output: " in printed
    assert printed.count(" 6.29e+04 ") >= 3  # 96 % of 65504, as the demo is made


def test_the_readme_shows_the_demos_report(capsys: pytest.CaptureFixture[str]) -> None:
    demo.run()
    report = capsys.readouterr().out
    shown = re.search(r"```\n(Detected.*?)```", README.read_text(), re.DOTALL)
    assert shown is not None
    block, counted, verdict = (without_digits(part) for part in re.split(r"output: |shape .*\n", shown[1]))
    assert block in without_digits(report) and "are +inf, first at [" in counted
    assert verdict in without_digits(report)

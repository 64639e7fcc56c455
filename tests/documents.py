"""What the documentation shows, as it stands there, for tests that run it."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["ROOT", "code", "commands", "section", "without_digits"]

ROOT = Path(__file__).resolve().parents[1]


def section(file: str, heading: str) -> str:
    """The text below a heading of the second level."""
    text = (ROOT / file).read_text()
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    return found[1]


def code(file: str, language: str, heading: str | None = None) -> list[str]:
    """The blocks of a language ("" for none) in a section, or in all of the file."""
    text = (ROOT / file).read_text() if heading is None else section(file, heading)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for tag, block in blocks if tag == language]


def commands(file: str, heading: str | None = None) -> list[str]:
    """The lines of its blocks of bash, without the comments behind them."""
    text = "".join(code(file, "bash", heading)).replace("\\\n", "")
    return [found for line in text.splitlines() if (found := re.sub(r"\s+#.*", "", f" {line}").strip())]


def without_digits(text: str) -> str:
    """Numbers differ between kinds of CPU."""
    return re.sub(r"[\d.+-]+", "#", text)

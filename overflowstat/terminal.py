"""Manners of what is shown on a terminal. Needs no torch."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

__all__ = ["Progress", "on_one_line", "printable"]


def printable(text: str) -> str:
    """With escapes in place of what a terminal would obey, or could not show: control characters but the newline,
    changes of the direction of writing, halves of surrogate pairs.
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def on_one_line(text: str) -> str:
    """The same, of what is to stay in its line, as a name is."""
    return printable(text).replace("\n", "\\n")


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


class Progress:
    """Tells on stderr how far something is, if that is a terminal and it takes more than two seconds.

    >>> with Progress("reading run.jsonl", size) as progress:
    ...     progress.at(position)
    """

    DELAY, INTERVAL = 2.0, 0.2

    def __init__(self, what: str, total: int, stream: TextIO | None = None) -> None:
        self._what = on_one_line(what)
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._next = time.monotonic() + self.DELAY if self._stream.isatty() else float("inf")
        self._shown = 0

    def at(self, done: int) -> None:
        """So much of the total."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.INTERVAL
        share = min(1.0, done / self._total) if self._total else 1.0
        text = f"{self._what} [{'#' * int(share * 20):20}] {share:4.0%}"
        self._stream.write(f"\r{text:{self._shown}}")
        self._stream.flush()
        self._shown = len(text)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the line empty."""
        if self._shown:
            self._stream.write(f"\r{'':{self._shown}}\r")
            self._stream.flush()

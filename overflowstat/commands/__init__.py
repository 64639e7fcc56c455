"""One file for each command of `python -m overflowstat`. They import what they need when they run, not before."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from ..terminal import on_one_line

__all__ = ["Command", "Parser", "number", "whole_number"]


class Parser(argparse.ArgumentParser):
    """Shows texts as they are written, and tells of what is wrong in one line.

    Args:
        see: what shows the help, if that is another program.
    """

    def __init__(self, *, see: str | None = None, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self._see = see or self.prog

    def error(self, message: str) -> NoReturn:
        print(on_one_line(f"{self.prog}: {message}; see {self._see} --help"), file=sys.stderr)
        sys.exit(2)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """That of a command tells itself what it does not know, and does not leave it to the list of all commands."""
        found, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


@dataclass(frozen=True)
class Command:
    name: str
    summary: str
    """Half a line, for the list of all."""
    description: str
    """What it does, above its arguments in its help."""
    examples: str
    """Below them, with what its exit status means."""
    add_arguments: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace], int]
    """Gives the exit status."""
    needs_torch: bool = True
    runs_a_program: bool = False
    """Of somebody else, whose streams these are then."""


def whole_number(text: str) -> int:
    """The type of an argument."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def number(what: str, is_right: Callable[[float], bool]) -> Callable[[str], float]:
    """The type of an argument; `what` it is to be."""

    def parsed(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not is_right(found):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return found

    return parsed

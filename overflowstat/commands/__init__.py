"""One file for each command of `python -m overflowstat`. They import what they need when they run, not before."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from ..terminal import on_one_line

__all__ = ["Command", "Parser"]


class Parser(argparse.ArgumentParser):
    """Shows texts as they are written, and tells of what is wrong in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        print(on_one_line(f"{self.prog}: {message}; see {self.prog} --help"), file=sys.stderr)
        sys.exit(2)


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

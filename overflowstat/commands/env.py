"""python -m overflowstat env"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from . import Command

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same facts, for programs")


def run(chosen: argparse.Namespace) -> int:
    from .. import environment

    found = environment.describe()
    print(json.dumps(asdict(found), indent=2) if chosen.json else environment.render(found))
    return 0


COMMAND = Command(
    name="env",
    summary="what is built, for what, and what would be needed for more",
    description="Show what of overflowstat is built, for which torch and GPUs, and what would be needed for more.\n"
    "Works without torch, too.",
    examples="example:\n  overflowstat env --json > environment.json\n\nexit status: 0",
    add_arguments=add_arguments,
    run=run,
    needs_torch=False,
)

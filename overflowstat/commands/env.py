"""python -m overflowstat env"""

from __future__ import annotations

import argparse
import json
import os
import socket
from dataclasses import asdict

from . import Command

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same facts, for programs")


def run(chosen: argparse.Namespace) -> int:
    from .. import environment
    from ..environment.privacy import shortened

    found = environment.describe()
    home, host = os.path.expanduser("~"), socket.gethostname()
    if chosen.json:
        print(json.dumps(shortened(asdict(found), home, host), indent=2))
    else:
        print(shortened(environment.render(found), home, host))
    return 0


COMMAND = Command(
    name="env",
    summary="what is here and built, what is wrong with it, and the command that mends it",
    description="Show what is here (Python, torch, driver, GPUs, CUDA toolkits, compilers), what of overflowstat is\n"
    "built and for what, and each problem with the command that mends it. To be pasted in a report of a bug:\n"
    "the home folder is shown as ~, and the host without its domain. Works without torch, too.",
    examples="example:\n  overflowstat env --json > environment.json\n\nexit status: 0",
    add_arguments=add_arguments,
    run=run,
    needs_torch=False,
)

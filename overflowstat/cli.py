"""python -m overflowstat: the commands and their arguments; what they do is elsewhere."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. argparse leaves with 2 where the arguments make no sense."""
    parser = argparse.ArgumentParser(prog="overflowstat", description="Find where a model's numbers first go bad.")
    commands = parser.add_subparsers(dest="command", required=True)
    env = commands.add_parser("env", help="what is built, for what, and what would be needed for more")
    env.add_argument("--json", action="store_true", help="the same facts, for programs")
    commands.add_parser("demo", help="run a small float16 model into overflow and show the report")
    chosen = parser.parse_args(arguments)
    return _show_environment(chosen.json) if chosen.command == "env" else _run_demo()


def _show_environment(as_json: bool) -> int:
    from overflowstat import environment

    found = environment.describe()
    print(json.dumps(asdict(found), indent=2) if as_json else environment.render(found))
    return 0


def _run_demo() -> int:
    from overflowstat import demo

    return demo.run()

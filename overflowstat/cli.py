"""python -m overflowstat: the list of its commands, and the manners that all of them have."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from . import native
from .commands import Command, Parser, check_distributed, compare, demo, env, plot, run, scan
from .errors import CheckpointError, TraceError
from .terminal import on_one_line

__all__ = ["COMMANDS", "main"]

COMMANDS: tuple[Command, ...] = (
    env.COMMAND,
    demo.COMMAND,
    run.COMMAND,
    compare.COMMAND,
    plot.COMMAND,
    scan.COMMAND,
    check_distributed.COMMAND,
)

WRONG, INTERRUPTED, NOBODY_READS = 2, 128 + 2, 128 + 13
EXIT_STATUS = """\
exit status:
  0    all is well
  1    what a command looks for is not well; its help says what that is
  2    the arguments make no sense, or a file is not what it should be: one line on stderr says so
  130  Ctrl-C
  141  whoever read the output has gone, as `head` does"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Leaves by SystemExit(2) where the arguments make no sense."""
    chosen = _parser().parse_args(arguments)
    command = next(command for command in COMMANDS if command.name == chosen.command)
    for stream in () if command.runs_a_program else (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for names that the terminal has no letters for
    try:
        if command.needs_torch and (problem := native.torch_problem()):
            return _complain(f"overflowstat {problem}")
        status = command.run(chosen)
        sys.stdout.flush()
        return status
    except (CheckpointError, TraceError) as error:
        return _complain(f"overflowstat {chosen.command}: {error}")
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or else Python complains when it ends
        return NOBODY_READS


def _parser() -> Parser:
    parser = Parser(
        prog="overflowstat",
        description="Find where a model's numbers first go bad.",
        epilog=f"`overflowstat COMMAND --help` has arguments and examples.\n\n{EXIT_STATUS}",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        added = commands.add_parser(
            command.name, help=command.summary, description=command.description, epilog=command.examples
        )
        command.add_arguments(added)
    return parser


def _complain(message: str) -> int:
    print(on_one_line(message), file=sys.stderr)
    return WRONG

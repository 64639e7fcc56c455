"""Runs `overflowstat run` for tests: each time in a process of its own, forked from one that has imported torch.

Reads one JSON object a line: {"arguments", "folder", "environment", "input", "output", "errors"}, and writes the exit
status, as subprocess has it.
"""

import gc
import json
import os
import sys

from overflowstat import cli
from overflowstat.running import watch  # noqa: F401, which takes a while


def be(wanted: dict[str, object]) -> list[str]:
    """Become the process that is wanted."""
    os.chdir(str(wanted["folder"]))
    os.environ.update(wanted["environment"])  # type: ignore[call-overload]
    for stream, number in (("output", 1), ("errors", 2)):
        os.dup2(os.open(str(wanted[stream]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(str(wanted["input"]), os.O_RDONLY), 0)
    return wanted["arguments"]  # type: ignore[return-value]


gc.freeze()  # or else each process ends by a second's walk through all that torch has
for line in sys.stdin:
    wanted = json.loads(line)
    child = os.fork()
    if child == 0:
        sys.exit(cli.main(["run", *be(wanted)]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

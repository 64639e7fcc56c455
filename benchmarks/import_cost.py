"""What importing this package takes beyond the import of torch, which it needs anyway.

    python benchmarks/import_cost.py --json benchmarks/results/import-cpu.json

A process for each, in turn, which imports torch first; what counts is its CPU time before and after, which other work
on the machine changes least.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from measure import Timing, machine

STATEMENTS = ("import overflowstat", "import overflowstat.cli", "from overflowstat import Monitor")


def cpu_seconds(statement: str) -> tuple[float, float]:
    """Of a new process: up to the end of the import of torch, and up to the end of the statement after it."""
    lines = ["import time, torch", "before = time.process_time()", statement, "print(before, time.process_time())"]
    script = "\n".join(lines)
    # Byte code is kept, as an installation has it, by the first round.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="the first one is not kept")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    before = {statement: Timing({}) for statement in STATEMENTS}
    after = {statement: Timing({}) for statement in STATEMENTS}
    for number in range(options.rounds + 1):
        for statement in STATEMENTS:
            torch_alone, both = cpu_seconds(statement)
            if number > 0:
                before[statement].rounds[number], after[statement].rounds[number] = torch_alone, both
    figures = {}
    for statement in STATEMENTS:
        ratio = after[statement].ratio(before[statement])
        beyond = Timing({n: both - before[statement].rounds[n] for n, both in after[statement].rounds.items()}).median
        figures[statement] = {"ratio": [ratio.median, ratio.p10, ratio.p90], "milliseconds_beyond": 1000 * beyond}
        print(f"{statement}: {ratio} of import torch, {1000 * beyond:.0f} ms of CPU beyond it")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine("cpu"), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What writing a trace costs, over the same monitor without one: forwards of models of benchmarks/cases.py.

    python benchmarks/trace_cost.py
    python benchmarks/trace_cost.py --models "Llama 8" --rounds 31

*all frames* is a sink that is given every frame and does nothing: what comes on top of it is the writing alone. All are
timed in turn, in one process and on one model, whose hooks are exchanged in between.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from cases import CASES, Case
from measure import Ratio, interleaved
from overhead import Hooks, exchange_hooks, forward

from overflowstat import CallableSink, Monitor, TraceFile, load_trace
from overflowstat.sinks import Sink

WITHOUT = "without"


def sinks(folder: Path) -> Mapping[str, Callable[[], Sequence[Sink]]]:
    return {
        WITHOUT: list,
        "all frames": lambda: [CallableSink(lambda frame: None, every_frame=True)],
        "plain": lambda: [TraceFile(folder / "trace.jsonl")],
        "gz": lambda: [TraceFile(folder / "trace.jsonl.gz")],
    }


def measure(case: Case, rounds: int, budget: float, folder: Path) -> tuple[dict[str, Ratio], dict[str, float], int]:
    """Ratios to no trace; kilobytes of a batch; lines of a batch."""
    torch.manual_seed(0)
    model = case.make().train(False)
    run = forward(model, case.inputs())
    hooks_of: dict[str, Hooks] = {}
    monitors: list[Monitor] = []
    for name, make in sinks(folder).items():
        monitors.append(Monitor(model, recorder="native", sinks=make()))
        run()
        hooks_of[name] = exchange_hooks(model)
    timings = interleaved(
        dict.fromkeys(hooks_of, run),
        rounds,
        "cpu",
        prepare=lambda name: exchange_hooks(model, hooks_of[name]),
        budget=budget,
    )
    for monitor in monitors:
        monitor.remove()
    size = {path.suffix: path.stat().st_size for path in folder.iterdir()}
    trace = load_trace(folder / "trace.jsonl")
    batches = len(trace.batches)
    base = timings.pop(WITHOUT)
    return (
        {name: timing.ratio(base) for name, timing in timings.items()},
        {suffix: each / 1000 / batches for suffix, each in size.items()},
        len(trace.rows) // batches,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=101, help="of each model, at most")
    parser.add_argument("--seconds", type=float, default=60, help="for the rounds of each model")
    parser.add_argument("--models", nargs="+", default=["Llama"], help="only those whose name has one of these in it")
    options = parser.parse_args()
    for case in CASES:
        if any(part in case.name for part in options.models):
            with tempfile.TemporaryDirectory() as folder:
                ratios, size, lines = measure(case, options.rounds, options.seconds, Path(folder))
            print(case.name, f"{lines} lines a batch", *(f"{name} {ratio}" for name, ratio in ratios.items()), sep=", ")
            print("  kilobytes a batch:", ", ".join(f"{suffix} {each:.1f}" for suffix, each in sorted(size.items())))


if __name__ == "__main__":
    main()

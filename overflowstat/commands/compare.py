"""python -m overflowstat compare"""

from __future__ import annotations

import argparse
import json

from . import Command, number, whole_number

__all__ = ["COMMAND"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a trace, as Monitor(model, trace_file=...) writes it")
    parser.add_argument("b", metavar="B", nargs="?", help="another one; without it A is compared with itself")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--batch", type=whole_number, metavar="N", help="only this batch; default: all that both have")
    chosen.add_argument("--batches", type=_batches, metavar="N,M", help="batch N of A, and M of B (or of A without B)")
    parser.add_argument(
        "--tolerance",
        type=number("a ratio, 1 or more", lambda ratio: ratio >= 1),
        default=2.0,
        metavar="R",
        help="they part where a magnitude is larger than R times the other (default: 2; 1 for the same number)",
    )
    parser.add_argument(
        "--by",
        choices=["max", "min", "both"],
        default="max",
        help="which magnitude: abs max (default); abs min, which is mostly chance where the data differ; or both",
    )
    parser.add_argument("--top", type=whole_number, default=10, metavar="N", help="rows of the table (default: 10)")
    parser.add_argument("--json", action="store_true", help="the same, for programs")


def run(chosen: argparse.Namespace) -> int:
    from ..compare import compare
    from ..comparison_text import comparison_text
    from ..errors import TraceError
    from .traces import read_trace

    if chosen.b is None and chosen.batches is None:
        raise TraceError("one trace is not enough: give another one, or two of its batches as --batches 149,150")
    pair = chosen.batches or (None if chosen.batch is None else (chosen.batch, chosen.batch))
    if chosen.b is None:
        a = b = read_trace(chosen.a, pair)
    else:
        a = read_trace(chosen.a, pair and pair[:1])
        b = read_trace(chosen.b, pair and pair[1:])
    result = compare(a, b, batches=pair and [pair], tolerance=chosen.tolerance, by=chosen.by)
    if chosen.json:
        print(json.dumps({"a": a.path, "b": b.path, **result.to_json(chosen.top)}, indent=2, allow_nan=False))
    else:
        print(comparison_text(result, a, b, chosen.top))
    return int(result.first is not None)


def _batches(text: str) -> tuple[int, int]:
    first, comma, second = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"{text!r} is not two batches, as 149,150")
    return whole_number(first), whole_number(second)


COMMAND = Command(
    name="compare",
    summary="where two runs, or two batches of one, part",
    description="""\
Find the module call in which two traces part first: one holds NaN or inf and the other does not, or its largest
magnitude is more than --tolerance times the other's. Then show the largest ratios. Calls are matched by module and by
their order in the batch, lines by their label; what only one trace has is counted. Dtypes may differ, and one model may
be in a wrapper that the other is not in (DistributedDataParallel, torch.compile).""",
    examples="""\
examples:
  overflowstat compare run.jsonl --batches 149,150           the last good batch against the first bad one
  overflowstat compare fp16.jsonl fp32.jsonl --batch 0       two precisions
  overflowstat compare run.rank0.jsonl run.rank1.jsonl       two ranks
  overflowstat compare old.jsonl new.jsonl --tolerance 1 --by both     the same numbers?

exit status: 0 they do not part, 1 they do, 2 arguments or a file are not as they should be, or of different models""",
    add_arguments=add_arguments,
    run=run,
)

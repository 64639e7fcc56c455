"""python -m overflowstat plot"""

from __future__ import annotations

import argparse
import os

from ..plotting.parts import PARTS
from . import Command

__all__ = ["COMMAND"]

MOST = 64
"""Batches. More charts than that nobody looks at."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="as Monitor(model, trace_file=...) writes it")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: beside the trace, with .html or .png")
    parser.add_argument("--png", action="store_true", help="a picture instead of a page; needs matplotlib")
    parser.add_argument(
        "--batches",
        type=_batches,
        metavar="N,M-K",
        help=f"which, {MOST} at most; default: all up to six, or else the first bad one, the one before it, the first, "
        "the last and some others",
    )
    parser.add_argument(
        "--of",
        choices=PARTS,
        help="which tensors are drawn (in a page: at first); default: those that the first detection is of, or outputs",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE if it exists")


def run(chosen: argparse.Namespace) -> int:
    from ..plotting.chart import make_chart
    from ..plotting.page import page
    from ..plotting.png import check_matplotlib, png
    from ..terminal import Progress, on_one_line
    from ..whole_file import check_free, write_whole
    from .traces import read_trace

    suffix = ".png" if chosen.png else ".html"
    path = chosen.output or _beside(chosen.trace, suffix)
    _check_name(path, chosen)
    check_free(path, chosen.force)
    if chosen.png:
        check_matplotlib()
    trace = read_trace(chosen.trace, chosen.batches)
    with Progress(f"drawing {path}", 100) as bar:
        chart = make_chart(trace, chosen.batches, lambda share: bar.at(round(50 * share)))
        if chosen.of:
            chart.view(chosen.of)
        draw = png if chosen.png else page
        content = draw(chart, chosen.of, lambda share: bar.at(round(50 + 50 * share)))
    write_whole(path, content.encode() if isinstance(content, str) else content, overwrites=chosen.force)
    batches = f"{len(chart.panels)} batch{'es' * (len(chart.panels) > 1)}"
    print(
        on_one_line(f"{path}: {batches} of {len(chart.places)} module calls" + "".join(f"; {n}" for n in chart.notes))
    )
    return 0


def _beside(trace: str, suffix: str) -> str:
    stem, gz = os.path.splitext(trace)
    if gz.lower() == ".gz":
        stem = os.path.splitext(stem)[0]
    return stem + suffix


def _check_name(path: str, chosen: argparse.Namespace) -> None:
    from ..errors import TraceError

    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".png" and not chosen.png:
        raise TraceError(f"{path!r} is to be a picture: give --png, too")
    if suffix in (".html", ".htm") and chosen.png:
        raise TraceError(f"{path!r} is the name of a page, and --png makes a picture")
    if os.path.exists(path) and os.path.exists(chosen.trace) and os.path.samefile(path, chosen.trace):
        raise TraceError(f"{path!r} is the trace itself: -o names another file")


def _batches(text: str) -> list[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of batches, as 0,149-150")
        numbers = range(int(first), int(last if dash else first) + 1)
        if len(found) + len(numbers) > MOST:
            raise argparse.ArgumentTypeError(f"{text!r} is more than {MOST} batches")
        if not numbers:
            raise argparse.ArgumentTypeError(f"{part!r} ends before it begins")
        found.update(numbers)
    return sorted(found)


COMMAND = Command(
    name="plot",
    summary="a trace as a page for the browser, or as a picture",
    description="""\
Draw a trace: the calls of all modules in execution order, each from its smallest to its largest magnitude on a
logarithmic scale, a chart for each batch, with the limits of the dtypes, NaN and infinities, and the verdict on top.
The page is one file that needs no network: it searches, sorts, zooms and tells the numbers of what is pointed at.""",
    examples="""\
examples:
  overflowstat plot run.jsonl                            writes run.html
  overflowstat plot run.jsonl --batches 149,150          the last good batch and the first bad one
  overflowstat plot run.jsonl --png -o overflow.png      for a report or a pull request

exit status: 0 it is written, 2 arguments or a file are not as they should be; then nothing is written""",
    add_arguments=add_arguments,
    run=run,
)

"""python -m overflowstat scan"""

from __future__ import annotations

import argparse
import json

from . import Command, whole_number

__all__ = ["COMMAND"]

# As overflowstat.narrowing.FORMATS, which takes torch to import; a test compares them.
FORMATS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
SLUGS = ("nan", "inf", *(f"{name}-{what}" for name in FORMATS for what in ("overflow", "flush")))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a safetensors or torch file, an index of shards, or a folder with a checkpoint in it",
    )
    parser.add_argument(
        "--fail-on",
        type=_slugs,
        default=("nan", "inf"),
        metavar="WHAT,...",
        help="exit with 1 if there is any of these (default: nan,inf): nan, inf; fp16-overflow, fp16-flush, and so on "
        "for each format; fp8-overflow and fp8-flush stand for both formats of 8 bits; none for nothing",
    )
    parser.add_argument(
        "--formats",
        type=_formats,
        default=FORMATS,
        metavar="F,...",
        help=f"what a plain cast to these would lose (default: {','.join(FORMATS)}); none for nothing",
    )
    listed = parser.add_mutually_exclusive_group()
    listed.add_argument(
        "--top", type=whole_number, default=20, metavar="N", help="list so many tensors at most (default: 20)"
    )
    listed.add_argument("--all", action="store_true", help="list all tensors, also those that are well")
    parser.add_argument("--json", action="store_true", help="all tensors, for programs")


def run(chosen: argparse.Namespace) -> int:
    from ..scan import scan
    from ..scan_text import scan_json, scan_text
    from ..terminal import Progress

    formats = [*chosen.formats, *_named(chosen.fail_on, chosen.formats)]
    with Progress("scanning", 100) as progress:
        result = scan(chosen.paths, formats, lambda done, size: progress.at(round(100 * done / max(size, 1))))
    found = [slug for slug in chosen.fail_on if result.total(slug)[0]]
    if chosen.json:
        print(json.dumps(scan_json(result, formats, found), indent=2, allow_nan=False))
    else:
        print(scan_text(result, formats, chosen.fail_on, None if chosen.all else chosen.top))
    return int(bool(found))


def _named(fail_on: tuple[str, ...], formats: tuple[str, ...]) -> list[str]:
    """Formats that are not judged otherwise."""
    return [name for name in FORMATS if name not in formats and any(slug.startswith(f"{name}-") for slug in fail_on)]


def _slugs(text: str) -> tuple[str, ...]:
    found: list[str] = []
    for slug in [] if text == "none" else text.split(","):
        both = [slug.replace("fp8-", f"{name}-") for name in FORMATS[2:]] if slug.startswith("fp8-") else [slug]
        if unknown := [each for each in both if each not in SLUGS]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SLUGS)}")
        found += both
    return tuple(dict.fromkeys(found))


def _formats(text: str) -> tuple[str, ...]:
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in FORMATS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(FORMATS)}")
    return tuple(dict.fromkeys(names))


COMMAND = Command(
    name="scan",
    summary="what is bad in a checkpoint, and what another precision would lose",
    description="""\
Read all tensors of checkpoints, one at a time: safetensors, also sharded, and torch files, in which no code is run.
Count the numbers that are NaN or inf, and those that a plain cast to a narrower format would lose: overflow, where they
round to more than its largest number, and flush, where they round to zero.""",
    examples="""\
examples:
  overflowstat scan model.safetensors
  overflowstat scan checkpoints/step-1000 --all
  overflowstat scan model/ --fail-on nan,inf,fp16-overflow       for a pipeline, before it is run in float16
  overflowstat scan model/ --json > scan.json

exit status: 0 all is well, 1 there is what --fail-on names, 2 arguments or a file are not as they should be""",
    add_arguments=add_arguments,
    run=run,
)

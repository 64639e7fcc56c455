"""python -m overflowstat run"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..terminal import on_one_line
from . import Command, Parser

__all__ = ["COMMAND", "ELSEWHERE", "OPTIONS", "OptionError", "options_of", "sinks_of"]

VARIABLE = "OVERFLOWSTAT_OPTIONS"


class Option(NamedTuple):
    flag: str
    how: dict[str, Any]
    """What `add_argument` takes."""

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


def _option(flag: str, text: str, **how: Any) -> Option:
    return Option(flag, {"help": text, **how})


def _switch(flag: str, text: str) -> Option:
    return _option(flag, text, action=argparse.BooleanOptionalAction)


def _count_or_all(text: str) -> int | None:
    return None if text == "all" else int(text)


def _batches(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


_count_or_all.__name__ = _batches.__name__ = "number"  # as argparse calls it

OPTIONS: dict[str, list[Option]] = {
    "check": [
        _option(
            "--check",
            "when numbers on a GPU are judged: at each module, at the end of each forward (default), or before the "
            "next optimizer step, which waits least",
            choices=["module", "batch", "step"],
        )
    ],
    "every_n": [_option("--every-n", "watch one batch in so many", type=int, metavar="N")],
    "policy": [
        _option(
            "--include",
            "watch only these: a name, `*.attention`, or `*:output`; repeat it",
            action="append",
            metavar="MODULE:LINE",
        ),
        _option("--exclude", "do not watch these; repeat it", action="append", metavar="MODULE:LINE"),
        _option(
            "--allow",
            "where what kinds of numbers are meant, as `:input[mask]=-inf` or `*.pad=nan,inf`; repeat it",
            action="append",
            metavar="MODULE:LINE=KINDS",
        ),
    ],
    "nested": [_switch("--nested", "keyword inputs, and what is inside of dicts and other structures (default: yes)")],
    "buffers": [_switch("--buffers", "buffers, as running statistics (default: no)")],
    "gradients": [_switch("--gradients", "gradients, too (default: no)")],
    "weights": [
        _option(
            "--weights",
            "read weights with each forward (default), or only those that have changed",
            choices=["forward", "on_change"],
        )
    ],
    "reuse_unchanged": [
        _switch("--reuse-unchanged", "read a tensor once a batch if it does not change (default: without distributed)")
    ],
    "recorder": [_option("--recorder", "what reads (default: auto)", choices=["auto", "native", "torch"])],
    "on_detect": [
        _option(
            "--on-detect",
            "raise an error where numbers go bad (default), or warn and go on, with a summary in the end",
            choices=["raise", "warn"],
        )
    ],
    "agree": [
        _option(
            "--agree",
            "where several ranks run, have all raise at the end of the same batch, for which each waits so long",
            type=float,
            metavar="SECONDS",
        )
    ],
    "max_reports": [_option("--max-reports", "print so many reports at most", type=_count_or_all, metavar="N|all")],
    "max_frames_to_save": [
        _option(
            "--max-frames-to-save",
            "module calls that a report shows (default: 21)",
            type=_count_or_all,
            metavar="N|all",
        )
    ],
    "verdict": [_switch("--verdict", "say what made the numbers, and why (default: yes)")],
    "drill": [_switch("--drill", "run forwards again for that (default: where one process runs)")],
    "warn_at": [
        _option("--warn-at", "warn at this share of what the dtype holds, as 0.5", type=float, metavar="SHARE")
    ],
    "detail": [_switch("--detail", "count zeros and subnormals, and warn of tensors that underflow (default: no)")],
    "trace_batch_nums": [
        _option("--trace-batch-nums", "print all of these batches, as 0,149", type=_batches, metavar="N,M")
    ],
    "abort_after_batch_num": [
        _option("--abort-after-batch-num", "stop with an error after this batch", type=int, metavar="N")
    ],
    "trace_file": [
        _option(
            "--trace-file",
            "write all frames of the first model to this file, as run.jsonl or run.jsonl.gz, of the second one to "
            "run.model2.jsonl, for `overflowstat compare`; a file that is there is kept, and the next name taken",
            metavar="FILE",
        )
    ],
    "sinks": [
        _option(
            "--sink",
            "where reports go: stdout (default), logging, tensorboard=FOLDER, or none; repeat it",
            action="append",
        )
    ],
}
"""By the argument of Monitor that they make."""

ELSEWHERE = {
    "model": "is found",
    "batch_ends": "which depends on how the script calls its models, and is found",
    "group": "has no name on a command line; all ranks are meant",
    "style": "names the model in each report, for which it is taken",
}
"""Arguments of Monitor that have no option, and why."""

QUIET = _switch("--quiet", "tell nothing but what is bad, and what is not watched (default: no)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [options] train.py [arguments of train.py]\n       %(prog)s [options] -m package.module ..."
    )
    parser.add_argument("-m", "--module", action="store_true", help="run a module, as python -m does")
    _add_options(parser)
    # All in one: of two arguments the first would swallow a `--` that is the script's.
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="train.py ...",
        help="a script, - for stdin, or a folder or archive with a __main__.py; all that follows is for the script",
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    for option in [*(each for several in OPTIONS.values() for each in several), QUIET]:
        parser.add_argument(option.flag, default=argparse.SUPPRESS, **option.how)


def run(chosen: argparse.Namespace) -> int:
    from ..running.script import ScriptError, run_script
    from ..running.watch import Watch

    try:
        script, *arguments = chosen.script[chosen.script[:1] == ["--"] :] or [""]
        if not script:
            raise OptionError("no script is given; see overflowstat run --help")
        given = {**_from_environment(), **vars(chosen)}
        options, sinks, trace_file = options_of(given), sinks_of(given), given.get("trace_file")
        _try(options, sinks, trace_file)
        watch = Watch(options, sinks=sinks, trace_file=trace_file, is_quiet=given.get("quiet", False))
        watch.start()
        run_script(script, arguments, chosen.module, watch.end)
    except (OptionError, ScriptError) as error:
        print(on_one_line(f"overflowstat run: {error}"), file=sys.stderr)
        raise SystemExit(2) from None


class OptionError(Exception):
    """An option makes no sense."""


def _from_environment() -> dict[str, Any]:
    parser = Parser(prog=VARIABLE, see="overflowstat run", add_help=False)
    _add_options(parser)
    try:
        words = shlex.split(os.environ.get(VARIABLE, ""))
    except ValueError as error:
        raise OptionError(f"{VARIABLE}: {error}") from None
    return vars(parser.parse_args(words))


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Monitor that all models have in common. Those that were not given have its defaults."""
    from ..policy import Policy

    options = {name: given[name] for name in OPTIONS if name in given}
    options.pop("trace_file", None)
    allow: dict[str, set[str]] = {}
    for text in given.get("allow", ()):
        selector, equals, kinds = text.rpartition("=")
        if not equals:
            raise OptionError(f"--allow {text}: says no kind of number, as {text}=-inf would")
        allow.setdefault(selector, set()).update(kinds.split(","))
    try:
        policy = Policy(include=given.get("include"), exclude=given.get("exclude", ()), allow=allow)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise OptionError(f"--{error}") from None
    if {"include", "exclude", "allow"} & given.keys():
        options["policy"] = policy
    return options


def sinks_of(given: Mapping[str, Any]) -> list[str]:
    return [name for name in given.get("sink", ["stdout"]) if name != "none"]


def _try(options: Mapping[str, Any], sinks: Sequence[str], trace_file: str | None) -> None:
    """Whether there can be such monitors, before the script has computed for an hour."""
    from torch import nn

    from ..monitor import Monitor
    from ..running.outputs import check_sink, check_trace_file

    try:
        for sink in sinks:
            check_sink(sink)
        if trace_file is not None:
            check_trace_file(trace_file)
        Monitor(nn.Identity(), **options).remove()
    except (TypeError, ValueError, RuntimeError, ImportError) as error:
        raise OptionError(error) from None


COMMAND = Command(
    name="run",
    summary="run a script, and watch the models that it calls",
    description="""\
Run a Python script, unchanged, and watch the numbers of every model that it calls. The first NaN or infinity ends it
with NonFiniteError, after a report; with --on-detect warn it goes on. A model is a module that is called while no other
one is; each has a number, and a batch is one forward of it. A loss that is a module is a model, too.

Only this process is watched: none that the script starts, as the workers of a DataLoader. Launchers start this command
as they start a script.""",
    examples=f"""\
examples:
  overflowstat run train.py --lr 1e-3
  overflowstat run --gradients --trace-file run.jsonl -m package.train --lr 1e-3
  overflowstat run --on-detect warn --exclude '*.dropout' --allow ':input[mask]=-inf' train.py
  torchrun --nproc-per-node 2 -m overflowstat run train.py
  {VARIABLE}="--on-detect warn" torchrun --nproc-per-node 2 -m overflowstat run train.py

The variable {VARIABLE} holds options, too; those of the command line win.

exit status: that of the script, which is 1 if bad numbers end it; 2 where the options make no sense, or there is no
such script""",
    add_arguments=add_arguments,
    run=run,
    runs_a_program=True,
)

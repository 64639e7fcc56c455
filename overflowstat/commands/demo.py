"""python -m overflowstat demo"""

from __future__ import annotations

import argparse

from . import Command

__all__ = ["COMMAND"]


def run(chosen: argparse.Namespace) -> int:
    from .. import demo

    return demo.run()


COMMAND = Command(
    name="demo",
    summary="run a small float16 model into overflow and show the report",
    description="Run a small float16 model that overflows as mT5 famously does, and show the report of it.",
    examples="example:\n  overflowstat demo\n\nexit status: 0, or 1 if nothing overflowed",
    add_arguments=lambda parser: None,
    run=run,
)

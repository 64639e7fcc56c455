"""How commands read traces."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection

from ..terminal import Progress, on_one_line
from ..trace import Trace, load_trace

__all__ = ["read_trace"]


def read_trace(path: str, batches: Collection[int] | None = None) -> Trace:
    """`load_trace` with a progress bar; what it warns of is a line on stderr."""
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    with warnings.catch_warnings(record=True) as told, Progress(f"reading {path}", size) as progress:
        warnings.simplefilter("always")
        trace = load_trace(path, batches=batches, progress=progress.at)
    for warning in told:
        print(on_one_line(f"overflowstat: {warning.message}"), file=sys.stderr)
    return trace

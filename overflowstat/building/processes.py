"""Asking a program of somebody else's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

__all__ = ["SECONDS", "output_of"]

SECONDS = 20.0
"""For an answer. A driver that is asleep takes some, a network file system, too; nobody waits longer for what hangs."""


def output_of(*command: str | Path) -> str:
    """What a program prints on stdout.

    Raises OSError if it cannot be started, subprocess.SubprocessError where it fails or takes more than SECONDS; then
    it is ended, with all that it started.
    """
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    return output

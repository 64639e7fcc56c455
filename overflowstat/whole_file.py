"""Write a file wholly, or not at all."""

from __future__ import annotations

import os
import secrets

from .errors import TraceError

__all__ = ["check_free", "write_whole"]


def check_free(path: str, overwrites: bool) -> None:
    """Raise TraceError if nothing could be written there, so that no work is done in vain."""
    folder, name = os.path.split(path)
    if os.path.isdir(path) or not name:
        raise TraceError(f"{path!r} is a folder: give the name of a file in it")
    if folder and not os.path.isdir(folder):
        raise TraceError(f"{path!r} cannot be written: there is no folder {folder!r}")
    if os.path.lexists(path):
        if not overwrites:
            raise TraceError(f"{path!r} exists already: --force overwrites it, -o names another")
        if not os.path.isfile(path):
            raise TraceError(f"{path!r} is no ordinary file, and is not overwritten")


def write_whole(path: str, content: bytes, *, overwrites: bool = False) -> None:
    """Write under a name of its own beside `path`, and rename it when all of it is on the disk.

    Whatever ends this before, a Ctrl-C or a full disk, leaves what was there before, and nothing else.

    Raises:
        TraceError: it cannot be written, or is there and `overwrites` is false.
    """
    check_free(path, overwrites)
    try:
        real = os.path.realpath(path)  # of a link the file is written
        beside = os.path.join(os.path.dirname(real), f".overflowstat-{secrets.token_hex(8)}.tmp")
        try:
            with open(beside, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            check_free(path, overwrites)
            os.replace(beside, real)
        except BaseException:
            if os.path.lexists(beside):
                os.unlink(beside)
            raise
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path!r} cannot be written: {reason}") from error

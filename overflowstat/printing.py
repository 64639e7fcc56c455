"""What several processes print to the same place, one after another."""

import contextlib
import fcntl
import sys
import time
from collections.abc import Iterator

from .ranks import rank_and_world_size

__all__ = ["print_whole"]

PATIENCE = 2.0  # seconds, after which the one that prints is taken to be stopped


def print_whole(text: str) -> None:
    """To stdout, with nothing of another rank in between that prints by this, too."""
    if rank_and_world_size()[1] == 1:
        print(text)
        return
    with contextlib.suppress(AttributeError, OSError, ValueError):  # of what is no file
        sys.stdout.flush()
        with _alone(sys.stdout.fileno()):
            print(text, flush=True)
        return
    print(text)


@contextlib.contextmanager
def _alone(file: int) -> Iterator[None]:
    """Among the processes of this host that ask for the same file. A lock of POSIX is of a process, where one of flock
    is shared by those that have inherited the file."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                break
            time.sleep(0.002)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)

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
    if rank_and_world_size()[1] == 1 or (file := _file_of_stdout()) is None:
        _print(text)
        return
    with _alone(file):
        _print(text)
        sys.stdout.flush()


def _file_of_stdout() -> int | None:
    """None where it is none."""
    try:
        sys.stdout.flush()
        return sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def _print(text: str) -> None:
    """With escapes where stdout has no letters for a name or a line of source."""
    try:
        print(text)
    except UnicodeEncodeError as error:
        print(text.encode(error.encoding, "backslashreplace").decode(error.encoding))


@contextlib.contextmanager
def _alone(file: int) -> Iterator[None]:
    """Among the processes of this host that ask for the same file. A lock of POSIX is of a process, where one of flock
    is shared by those that have inherited the file."""
    end = time.monotonic() + PATIENCE
    with contextlib.suppress(OSError):  # of a file that takes no lock
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
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN)

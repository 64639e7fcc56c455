"""A sink that writes frames to a file as they complete, one JSON object a line."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
import zlib
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import chain, count

import torch

from .errors import TraceError, warn_user
from .frames import Frame
from .ranks import rank_and_world_size
from .report import Report
from .trace_format import END_LINE, VERSION, TraceHeader, frame_line, header_line, report_line

__all__ = ["TraceFile"]

GZIP = 16 + zlib.MAX_WBITS
LEVEL = 1
"""Of compression: text that is this repetitive becomes a fifth, and higher levels take longer than the model may."""


class TraceFile:
    """Writes all frames and reports to a file, which `load_trace` reads.

        >>> Monitor(model, trace_file="run.jsonl.gz")
        >>> Monitor(model, sinks=[TraceFile("run.jsonl")])  # and prints nothing

    A file that is there is never overwritten: `run.jsonl` is followed by `run-1.jsonl`, `run-2.jsonl`; `path` tells
    which it became. Where several processes run, each has a file of its own, with its rank in the name:
    `run.rank0.jsonl`. A name that ends in `.gz` is compressed.

    It is for one monitor, which ends the file when it is removed; otherwise that happens when the process ends. Frames
    that come later, and those of a process that was forked, go to a file of the next name.

    What is written is safe from the death of the process, also if it is compressed: all frames of a batch when it has
    ended, those of gradients before the optimizer takes its step, reports at once. Between these all that is older than
    a tenth of a second when the next frame comes.

    Cost: a frame is made a Python object, which takes 20 to 50 microseconds, and written in 10 to 15; see the README.

    Raises:
        TypeError: `path` is no path.
        TraceError: the file cannot be made. If it cannot be written to later, as when the disk is full, a warning says
            so, once, and the model goes on without.
    """

    every_frame = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        wanted = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
        if not isinstance(wanted, str):
            raise TypeError(f"trace_file={path!r}: must be a path, not {type(path).__name__}")
        self._rank, self._world_size = rank_and_world_size()
        self._names = _Names(wanted, self._rank, self._world_size)
        self._root_class: str | None = None
        self._open()

    def _open(self) -> None:
        self.path, descriptor = self._names.take()
        self._has_header = False
        self._is_closed = False
        self._stream = _Stream(self.path, descriptor)
        # Also when the process ends. What it calls must not keep this object.
        self._end = weakref.finalize(self, self._stream.end)

    def begin(self, root_class: str | None) -> None:
        """Write the header. A monitor tells the class of its model here; without that the first frame does it."""
        if not self._has_header:
            from .environment import version  # which takes as long to import as all that is needed here

            self._has_header = True
            self._root_class = root_class
            started = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            rank, world_size = self._rank, self._world_size
            self._stream.write(
                header_line(TraceHeader(VERSION, version(), torch.__version__, started, rank, world_size, root_class))
            )

    def frame(self, frame: Frame, traced: bool) -> None:
        self._ready().add(frame)

    def report(self, report: Report) -> None:
        stream = self._ready()
        stream.flush()
        stream.write(report_line(report))

    def flush(self) -> None:
        """Leave nothing that would be lost if the process were killed."""
        if not self._is_closed and not self._stream.is_inherited:
            self._stream.flush()

    def close(self) -> None:
        """Write the line that says that nothing is missing."""
        if not self._is_closed:
            self._is_closed = True
            if not self._stream.is_inherited:
                self.begin(self._root_class)
            self._end()

    def _ready(self) -> _Stream:
        if self._is_closed or self._stream.is_inherited:
            self._open()
        self.begin(self._root_class)
        return self._stream


class _Names:
    """Those that a file may have, in the order in which they are tried."""

    def __init__(self, wanted: str, rank: int, world_size: int) -> None:
        folder, name = os.path.split(wanted)
        if not name or os.path.isdir(wanted):
            raise TraceError(f"{wanted!r} is a folder: give the name of a file in it, as {_inside(wanted)!r}")
        if folder and not os.path.isdir(folder):
            raise TraceError(f"{wanted!r} cannot be written: there is no folder {folder!r}")
        name, gz = (name[: -len(".gz")], name[-len(".gz") :]) if name.lower().endswith(".gz") else (name, "")
        stem, suffix = os.path.splitext(name)
        if world_size > 1:
            stem += f".rank{rank:0{len(str(world_size - 1))}}"
        self._stem = os.path.join(folder, stem)
        self._suffix = suffix + gz

    def __iter__(self) -> Iterator[str]:
        yield self._stem + self._suffix
        for number in count(1):
            yield f"{self._stem}-{number}{self._suffix}"

    def take(self) -> tuple[str, int]:
        """Make the first that is free, which no other process can take at the same time."""
        for path in self:
            try:
                return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                continue
            except (OSError, ValueError) as error:  # a name with a null character is a ValueError
                raise TraceError(f"{path!r} cannot be written: {_reason(error)}") from error
        raise AssertionError("there is always another number")


def _inside(folder: str) -> str:
    return os.path.join(folder, "trace.jsonl")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class _Stream:
    """An open file, and the frames that are to be written to it.

    They wait for the end of their batch, or for the next one that comes a tenth of a second after the last were
    written: between the modules of a model the caches are full of other things, and each alone takes four times as
    long.
    """

    LONGEST_WAIT = 0.1

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._file = open(descriptor, "wb")  # noqa: SIM115, which end() closes
        self._pid = os.getpid()
        self._compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP) if path.lower().endswith(".gz") else None
        self._waiting: list[Frame] = []
        self._last = time.monotonic()
        self._has_failed = False

    @property
    def is_inherited(self) -> bool:
        """By a process that was forked, for which neither the file nor the frames are."""
        return os.getpid() != self._pid

    def add(self, frame: Frame) -> None:
        self._waiting.append(frame)
        if time.monotonic() - self._last > self.LONGEST_WAIT:
            self.flush()

    def flush(self) -> None:
        """Leave nothing that would be lost if the process were killed."""
        if self._waiting:
            frames, self._waiting = self._waiting, []
            self.write("".join(map(frame_line, frames)))
            self._last = time.monotonic()

    def write(self, text: str) -> None:
        if not self._has_failed:
            data = text.encode("ascii")
            try:
                if self._compressor is None:
                    self._file.write(data)
                else:
                    # In one call of C code: a Ctrl-C between zlib and the file would lose bytes, and nothing behind
                    # the gap could be read.
                    compress, flush = self._compressor.compress, self._compressor.flush
                    self._file.writelines(chain(map(compress, [data]), map(flush, [zlib.Z_SYNC_FLUSH])))
                self._file.flush()
            except OSError as error:
                self._fail(error)

    def end(self) -> None:
        if self.is_inherited:
            self._file.raw.close()  # what it has not written yet is not written again
            return
        self.flush()
        self.write(END_LINE)
        with contextlib.suppress(OSError):  # of what has failed before
            if self._compressor is not None:
                self._file.write(self._compressor.flush())
            self._file.close()

    def _fail(self, error: OSError) -> None:
        self._has_failed = True
        warn_user(f"{self._path!r} ends here, since it cannot be written to any more: {_reason(error)}")

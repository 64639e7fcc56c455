"""Where what is seen of several models goes, and how it says of which one it is."""

import contextlib
import errno
import os

from ..errors import TraceError
from ..frames import Frame
from ..report import OwnStyle, Report
from ..sinks import LoggingSink, Printer, Sink
from ..tensorboard import TensorBoardSink

__all__ = ["NamedStyle", "check_sink", "check_trace_file", "make_sink", "of_model"]

TENSORBOARD = "tensorboard="


class NamedStyle(OwnStyle):
    """Names the model where it begins a batch, in reports and in exceptions."""

    def __init__(self, model: str) -> None:
        self._model = model

    def frame(self, frame: Frame) -> str:
        begin = f"*** Starting batch number={frame.batch_number}"
        return super().frame(frame).replace(f"{begin} ***", f"{begin} of {self._model} ***", 1)

    def detected(self, report: Report) -> str:
        return self._named(super().detected(report))

    def aborted(self, batches: int, limit: int) -> str:
        return self._named(super().aborted(batches, limit))

    def _named(self, text: str) -> str:
        return text.replace("overflowstat: ", f"overflowstat: {self._model}: ", 1)


def make_sink(name: str, style: OwnStyle, number: int) -> Sink:
    """For model `number`: "stdout"; "logging", which is the logger "overflowstat"; or "tensorboard=FOLDER", in which
    each model has a folder.

    Raises ImportError where there is no TensorBoard, and ValueError for another name, or a folder that cannot be made.
    """
    check_sink(name)
    if name == "stdout":
        return _Stdout(style)
    if name == "logging":
        return LoggingSink(style=style)
    return _TensorBoardFolder(os.path.join(name.removeprefix(TENSORBOARD), f"model-{number}"))


def check_sink(name: str) -> None:
    """Raises as `make_sink` would, and makes the folder."""
    if name.startswith(TENSORBOARD) and name != TENSORBOARD:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise ImportError(f"sink {name!r}: {error}; pip install tensorboard") from error
        try:
            os.makedirs(name.removeprefix(TENSORBOARD), exist_ok=True)
        except OSError as error:
            raise ValueError(f"sink {name!r}: the folder cannot be made: {error.strerror}") from error
    elif name not in ("stdout", "logging"):
        raise ValueError(f"sink {name!r}: must be stdout, logging, {TENSORBOARD}FOLDER or none")


class _Stdout(Printer):
    """That the program may have closed, as a daemon does: what is told there then is lost, and no error of its own."""

    def frame(self, frame: Frame, traced: bool) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().frame(frame, traced)

    def report(self, report: Report) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().report(report)


class _TensorBoardFolder(TensorBoardSink):
    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._own = SummaryWriter(folder)
        super().__init__(self._own)

    def close(self) -> None:
        self._own.close()


def check_trace_file(path: str) -> None:
    """Raises TraceError where `TraceFile` would, without making the file."""
    folder, name = os.path.split(path)
    if not name or os.path.isdir(path):
        raise TraceError(f"{path!r} is a folder: give the name of a file in it")
    if not os.path.isdir(folder or "."):
        raise TraceError(f"{path!r} cannot be written: there is no folder {folder!r}")
    if not os.access(folder or ".", os.W_OK | os.X_OK):
        raise TraceError(f"{path!r} cannot be written: {os.strerror(errno.EACCES)}")


def of_model(path: str, number: int) -> str:
    """As "run.model2.jsonl.gz"; of the first one the path itself."""
    if number == 1:
        return path
    folder, name = os.path.split(path)
    name, gz = (name[:-3], name[-3:]) if name.lower().endswith(".gz") else (name, "")
    stem, suffix = os.path.splitext(name)
    return os.path.join(folder, f"{stem}.model{number}{suffix}{gz}")

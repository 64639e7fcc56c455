"""Find where a PyTorch model's numbers first go bad."""

import importlib
from typing import TYPE_CHECKING

from . import native

native.load()  # says what is lacking, if anything is

if TYPE_CHECKING:
    from .checks import CheckResult, check_gradients, check_weights
    from .debug_utils import DebugUnderflowOverflow, detect_overflow
    from .errors import AgreementError, BatchLimitReached, NonFiniteError, TraceError
    from .float32 import InFloat32, run_in_float32
    from .monitor import Monitor
    from .policy import Policy
    from .sinks import CallableSink, LoggingSink, Printer, Sink
    from .stats import TensorStats, tensor_stats
    from .tensorboard import TensorBoardSink
    from .trace import Trace, load_trace
    from .trace_file import TraceFile

# Each is imported when it is first asked for, which keeps the import of the package itself short.
_HOMES = {
    "checks": ("CheckResult", "check_gradients", "check_weights"),
    "debug_utils": ("DebugUnderflowOverflow", "detect_overflow"),
    "errors": ("AgreementError", "BatchLimitReached", "NonFiniteError", "TraceError"),
    "float32": ("InFloat32", "run_in_float32"),
    "monitor": ("Monitor",),
    "policy": ("Policy",),
    "sinks": ("CallableSink", "LoggingSink", "Printer", "Sink"),
    "stats": ("TensorStats", "tensor_stats"),
    "tensorboard": ("TensorBoardSink",),
    "trace": ("Trace", "load_trace"),
    "trace_file": ("TraceFile",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # or type checkers would take any name for a public one

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if problem := native.torch_problem():  # then there is only `python -m overflowstat env`, which tells what to do
            raise ImportError(f"overflowstat {problem}", name="torch")
        found = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__all__ = [
    "AgreementError",
    "BatchLimitReached",
    "CallableSink",
    "CheckResult",
    "DebugUnderflowOverflow",
    "InFloat32",
    "LoggingSink",
    "Monitor",
    "NonFiniteError",
    "Policy",
    "Printer",
    "Sink",
    "TensorBoardSink",
    "TensorStats",
    "Trace",
    "TraceError",
    "TraceFile",
    "check_gradients",
    "check_weights",
    "detect_overflow",
    "load_trace",
    "run_in_float32",
    "tensor_stats",
]

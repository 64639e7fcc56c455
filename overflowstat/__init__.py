"""Find where a PyTorch model's numbers first go bad."""

from typing import TYPE_CHECKING

from . import native

native.load()  # says what is lacking, if anything is

if TYPE_CHECKING or not native.torch_problem():
    from .checks import CheckResult, check_gradients, check_weights
    from .debug_utils import DebugUnderflowOverflow, detect_overflow
    from .errors import BatchLimitReached, NonFiniteError
    from .float32 import InFloat32, run_in_float32
    from .monitor import Monitor
    from .policy import Policy
    from .stats import TensorStats, tensor_stats
else:
    # Without torch there is only `python -m overflowstat env`, which tells what to do.
    def __getattr__(name: str) -> object:
        if name in __all__:
            raise ImportError(f"overflowstat {native.torch_problem()}", name="torch")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BatchLimitReached",
    "CheckResult",
    "DebugUnderflowOverflow",
    "InFloat32",
    "Monitor",
    "NonFiniteError",
    "Policy",
    "TensorStats",
    "check_gradients",
    "check_weights",
    "detect_overflow",
    "run_in_float32",
    "tensor_stats",
]

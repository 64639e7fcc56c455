"""Find where a PyTorch model's numbers first go bad."""

from . import native

native.load()  # says what is lacking, if anything is; without torch this is an ImportError in one sentence

from .debug_utils import DebugUnderflowOverflow, detect_overflow  # noqa: E402
from .errors import BatchLimitReached, NonFiniteError  # noqa: E402
from .monitor import Monitor  # noqa: E402
from .stats import TensorStats, tensor_stats  # noqa: E402

__all__ = [
    "BatchLimitReached",
    "DebugUnderflowOverflow",
    "Monitor",
    "NonFiniteError",
    "TensorStats",
    "detect_overflow",
    "tensor_stats",
]

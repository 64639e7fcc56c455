"""Find where a PyTorch model's numbers first go bad."""

from .stats import TensorStats, tensor_stats

__all__ = ["TensorStats", "tensor_stats"]

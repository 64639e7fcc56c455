"""How things are called in all texts."""

import torch

from .terminal import on_one_line

__all__ = ["limit_of", "limit_text", "module_text", "short_name"]


def short_name(name: object) -> str:
    """Of a dtype or a layout, as "float16"."""
    return str(name).removeprefix("torch.")


def module_text(name: str, class_name: str | None = None) -> str:
    """Of a module, by its qualified name: as "encoder.block.2 (Block)"."""
    return on_one_line((name or "the model itself") + (f" ({class_name})" if class_name else ""))


def limit_of(dtype: torch.dtype) -> float:
    """The largest number of a floating-point dtype; of a complex one that of its parts."""
    return float(torch.finfo(dtype).max)


def limit_text(dtype: torch.dtype) -> str:
    """The same, as "float16's 65504"."""
    return f"{short_name(dtype)}'s {limit_of(dtype):.5g}"

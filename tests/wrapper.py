"""A tensor that has its numbers in others, for tests of what is read of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["Wrapper"]


class Wrapper(Tensor):
    """Keeps its numbers in other tensors, and tells of them."""

    parts: dict[str, Tensor]

    @staticmethod
    def __new__(cls, *parts: Tensor, **options: Any) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, parts[0].shape, dtype=parts[0].dtype, **options)
        made.parts = {f"part{i}": value for i, value in enumerate(parts)}
        for name, value in made.parts.items():
            setattr(made, name, value)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} is not allowed here")

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.parts), None

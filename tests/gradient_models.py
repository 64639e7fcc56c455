"""Small models whose gradients go bad."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from overflowstat import NonFiniteError
from overflowstat.verdict import Verdict

__all__ = ["Calls", "X", "around", "line", "linear", "sqrt_at_0", "verdict_of"]

X = torch.tensor([[0.0, 0.0], [1.0, 2.0]])


class Calls(nn.Module):
    """Has a function for its forward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def linear(width: int = 2, value: float | None = None) -> nn.Linear:
    """The identity, or a multiple of it, without a bias."""
    module = nn.Linear(width, width, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.eye(width) * (1.0 if value is None else value))
    return module


def around(function: Callable[..., Any]) -> nn.Sequential:
    """before, middle, after: the middle one is what it is about."""
    found = nn.Sequential()
    found.add_module("before", linear())
    found.add_module("middle", Calls(function))
    found.add_module("after", linear())
    return found


def sqrt_at_0(x: Tensor) -> Tensor:
    return (x * x).sqrt()


def verdict_of(error: NonFiniteError) -> Verdict:
    assert error.verdict is not None
    return error.verdict


def line(function: Callable[..., object], number: int = 1) -> str:
    """Of a function, counted from its first, as a verdict's `source` has it."""
    code = function.__code__
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno + number}"

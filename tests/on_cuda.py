"""What the tests on a CUDA device share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from models import Subject
from torch import Tensor, nn

requires_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")


def keep_busy(seconds: float = 0.1) -> None:
    """Gives the current stream something to do for about so long: 2e9 clock cycles a second are reckoned with."""
    torch.cuda._sleep(int(seconds * 2e9))  # type: ignore[no-untyped-call]


def is_busy() -> bool:
    """Whether the current stream has something to do."""
    return not torch.cuda.current_stream().query()


class Step(nn.Module):
    """Tells that it ran, then does something to its input and its weight of 1."""

    def __init__(self, ran: list[str], name: str, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.ran, self.name, self.does = ran, name, does

    def forward(self, x: Tensor) -> Tensor:
        self.ran.append(self.name)
        return self.does(x * self.weight)


def chain(ran: list[str], **steps: Callable[[Tensor], Tensor]) -> nn.Sequential:
    return nn.Sequential(*[Step(ran, name, does) for name, does in steps.items()]).cuda()


def same(x: Tensor) -> Tensor:
    return x


def overflow(x: Tensor) -> Tensor:
    return x * 1e39


def late(x: Tensor) -> Tensor:
    keep_busy(0.3)
    return x


def late_overflow(x: Tensor) -> Tensor:
    return overflow(late(x))


def subject_on_cuda(subject: Subject) -> Subject:
    def batch(number: int) -> dict[str, Tensor]:
        return {name: value.cuda() for name, value in subject.batch(number).items()}

    return replace(subject, model=subject.model.cuda(), batch=batch)

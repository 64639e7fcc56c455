"""Warnings name the line of the user's code that led to them, though torch is in between, which calls hooks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from overflowstat import Monitor
from overflowstat.errors import MonitorWarning
from overflowstat.recorder import RecorderName

pytestmark = pytest.mark.usefixtures("no_optimizer_hooks")
X = torch.ones(2, 3)


def in_a_forward(model: nn.Module, options: dict[str, Any]) -> None:
    Monitor(model, on_detect="warn", sinks=[], **options)
    model(X * torch.inf)  # here


def in_a_forward_of_a_child(model: nn.Module, options: dict[str, Any]) -> None:
    Monitor(model, on_detect="warn", sinks=[], batch_ends="step", **options)
    model[1](X * torch.inf)  # type: ignore[index]  # here


def near_the_limit(model: nn.Module, options: dict[str, Any]) -> None:
    Monitor(model, warn_at=0.5, sinks=[], **options)
    model(torch.full((2, 3), 3e38))  # here


def in_a_backward(model: nn.Module, options: dict[str, Any]) -> None:
    Monitor(model, on_detect="warn", sinks=[], gradients=True, **options)
    loss = model(X).sum() * torch.inf
    loss.backward()  # here


def in_a_step(model: nn.Module, options: dict[str, Any]) -> None:
    monitor = Monitor(model, sinks=[], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0](X).sum().backward()  # type: ignore[index]
    optimizer.step()  # here
    monitor.step()


def at_the_end(model: nn.Module, options: dict[str, Any]) -> None:
    monitor = Monitor(model, on_detect=lambda report: None, sinks=[], **options)
    model[0](X)  # type: ignore[index]
    monitor.remove()  # here


def at_the_beginning(model: nn.Module, options: dict[str, Any]) -> None:
    Monitor(model, sinks=[], **options)
    Monitor(model, sinks=[], **options)  # here


@pytest.mark.parametrize(
    "provoke",
    [
        in_a_forward,
        in_a_forward_of_a_child,
        near_the_limit,
        in_a_backward,
        in_a_step,
        at_the_end,
        at_the_beginning,
    ],
    ids=lambda provoke: provoke.__name__,
)
def test_a_warning_is_of_the_users_line(provoke: Callable[..., None], recorder_name: RecorderName) -> None:
    lines, first = inspect.getsourcelines(provoke)
    here = max(first + number for number, line in enumerate(lines) if line.endswith("# here\n"))
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 3), nn.Identity())
    model[0].weight = nn.Parameter(torch.ones(3))
    nn.init.constant_(model.get_parameter("1.weight"), 0.1)  # with which nothing overflows
    model[0].forward = lambda x: x * model[0].weight
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        provoke(model, {"recorder": recorder_name})
    places = [(warning.filename, warning.lineno) for warning in told if warning.category is MonitorWarning]
    assert set(places) == {(__file__, here)}

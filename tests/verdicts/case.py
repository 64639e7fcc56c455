"""What a case of the corpus is: a model that goes bad, and what is known of the cause before it has run."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from overflowstat.verdict import Kind

__all__ = ["Case", "calls", "constant", "given", "line_of", "mark"]

M = TypeVar("M", bound=nn.Module)
Run = Callable[[], object]
Build = Callable[[], tuple[nn.Module, Run]]
"""Gives a model, and what calls it until it is bad."""


@dataclass(frozen=True)
class Case:
    """The line that does it bears the comment `# <- NAME`, unless `source` tells it."""

    name: str
    build: Build
    module: str
    operation: str | None
    kind: Kind
    label: str = "output"
    produced: bool = True
    source: str | None = "marked"
    options: dict[str, Any] = field(default_factory=dict)
    """Of the monitor."""

    def expected_source(self) -> str | None:
        return mark(self.name) if self.source == "marked" else self.source


def mark(name: str) -> str:
    """The one line of the corpus that has this mark."""
    found = [
        f"{file.name}:{number}"
        for file in Path(__file__).parent.glob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if line.endswith(f"# <- {name}")
    ]
    (only,) = found
    return only


def line_of(function: Callable[..., object], code: str) -> str:
    """Where code that is not of this project has a line, as "file.py:17"."""
    lines, start = inspect.getsourcelines(function)
    (found,) = (number for number, line in enumerate(lines, start) if line.strip() == code)
    return f"{Path(inspect.getfile(function)).name}:{found}"


def calls(make: Callable[[], nn.Module], *args: object, **kwargs: object) -> Build:
    """A model that is called once."""

    def build() -> tuple[nn.Module, Run]:
        model = make()
        return model, lambda: model(*args, **kwargs)

    return build


def constant(module: M, **values: float) -> M:
    """With each weight filled with one number."""
    with torch.no_grad():
        for name, value in values.items():
            module.get_parameter(name).fill_(value)
    return module


def given(name: str, build: Build, module: str, kind: Kind, label: str) -> Case:
    """What a module was given and did not make, so that no operation is to be named."""
    return Case(name, build, module, None, kind, label=label, produced=False, source=None)

"""What torch.compile is told of this package: to break its graphs at the hooks, and to leave alone what they call."""

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["compiled_modules", "has_compiled", "not_compiled"]

_Function = TypeVar("_Function", bound=Any)


def not_compiled(function: _Function) -> _Function:
    """Have neither a function nor what it calls compiled; compiled code calls it as it is.

    As torch.compiler.disable, which imports a compiler and takes a wrapper more.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "overflowstat watches this model, until monitor.disable() or monitor.remove()"
    compiler = torch._C._dynamo.eval_frame
    skip = compiler._FrameAction.SKIP
    compiler.set_code_exec_strategy(function.__code__, compiler._FrameExecStrategy(skip, skip))
    return function


def compiled_modules(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Names of those that torch.compile made, if it has compiled anything yet in this process.

    What it has compiled does not look for hooks that come later. That which `module.compile()` compiles does.
    """
    if not has_compiled():
        return []
    return [name or "the model itself" for name, module in modules if type(module).__name__ == "OptimizedModule"]


def has_compiled() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["frames"]["total"] > 0

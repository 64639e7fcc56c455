"""One look at all weights of a model, or at all their gradients."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from . import capture
from .measurement import measure
from .recorder import Recorder, RecorderName, make_recorder
from .report import bad_numbers
from .stats import TensorStats
from .terminal import on_one_line
from .validation import check_bool, check_module

__all__ = ["CheckResult", "check_gradients", "check_weights"]


@dataclass(frozen=True)
class CheckResult:
    """What `check_weights` or `check_gradients` found. True if no number is bad; `str` lists what is.

    >>> if not (found := check_weights(model)):
    ...     raise ValueError(found)
    """

    of: Literal["weights", "gradients"]
    stats: Mapping[str, TensorStats]
    """Of each that was read, by its qualified name."""
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Of each that could not be read, why: "meta", "uninitialized", "empty here", ... They are not judged."""
    missing: tuple[str, ...] = ()
    """Weights that ask for a gradient and have none."""

    @property
    def offenders(self) -> dict[str, TensorStats]:
        """Those that hold a NaN or an infinity, in the model's order."""
        return {name: stats for name, stats in self.stats.items() if stats.is_bad}

    def __bool__(self) -> bool:
        return not self.offenders

    def __str__(self) -> str:
        bad = self.offenders
        lines = [f"overflowstat: {len(bad) or 'none'} of {len(self.stats)} {self.of} hold nan or inf"]
        lines += [f"  {name}: {bad_numbers(stats)}" for name, stats in bad.items()]
        if self.unreadable:
            lines.append("not read: " + ", ".join(f"{name} ({reason})" for name, reason in self.unreadable.items()))
        if self.missing:
            lines.append("no gradient: " + ", ".join(self.missing))
        return "\n".join(map(on_one_line, lines))


def check_weights(model: nn.Module, *, buffers: bool = True, recorder: RecorderName | Recorder = "auto") -> CheckResult:
    """Read all weights of a model now, in one launch; one that is in several places once, under its first name.

    These are its parameters, and the plain tensors that stand where there were some. Of a sharded, sparse or quantized
    one what holds its numbers here.

    Args:
        model: any module; it need not be watched.
        buffers: its buffers, too: running statistics, tables.
        recorder: what reads, see `tensor_stats`.

    Cost: one pass over their memory, nothing copied; one host sync a CUDA device.

    Raises:
        TypeError, ValueError: an argument is not as told above.
    """
    return _read("weights", dict(_weights(check_module("model", model), check_bool("buffers", buffers))), recorder)


def check_gradients(model: nn.Module, *, recorder: RecorderName | Recorder = "auto") -> CheckResult:
    """Read the `.grad` of all weights of a model now, in one launch. All else is as `check_weights` has it.

    Under a GradScaler these are still scaled, until its `unscale_` or `step`.
    """
    weights = dict(_weights(check_module("model", model), buffers=False))
    gradients = {name: weight.grad for name, weight in weights.items() if weight.is_leaf}
    missing = [name for name, gradient in gradients.items() if gradient is None and weights[name].requires_grad]
    there = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    return _read("gradients", there, recorder, tuple(missing))


def _weights(model: nn.Module, buffers: bool) -> Iterator[tuple[str, Tensor]]:
    met = set()
    for module_name, module in model.named_modules():
        for name, weight in capture.weights(module, capture.weight_names(module), buffers):
            if isinstance(weight, Tensor) and id(weight) not in met:
                met.add(id(weight))
                yield f"{module_name}.{name}" if module_name else name, weight


def _read(
    of: Literal["weights", "gradients"],
    tensors: Mapping[str, Tensor],
    recorder: RecorderName | Recorder,
    missing: tuple[str, ...] = (),
) -> CheckResult:
    opened = [part for name, tensor in tensors.items() for part in capture.opened(name, tensor)]
    names = [name for name, part in opened if isinstance(part, Tensor)]
    with torch.no_grad():
        measurement = measure(make_recorder(recorder), [part for _, part in opened if isinstance(part, Tensor)])
    contents = {name: measurement.content(i) for i, name in enumerate(names)}
    unreadable = {name: capture.stand_in(part) for name, part in opened if not isinstance(part, Tensor)}
    return CheckResult(
        of,
        {name: content for name, content in contents.items() if isinstance(content, TensorStats)},
        unreadable | {name: content for name, content in contents.items() if isinstance(content, str)},
        missing,
    )

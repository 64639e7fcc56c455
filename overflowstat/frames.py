"""What is known of one module call."""

from dataclasses import dataclass

from .row import NOTHING, NonFinite
from .stats import TensorStats

__all__ = ["Frame", "Line"]


@dataclass(frozen=True, slots=True)
class Line:
    """One tensor that a module call touched, or what stood in its place."""

    label: str
    """The parameter's name, `input[i]`, `output`, `output[i]` or `output[i][j]`; of a gradient "grad " before that."""
    content: TensorStats | str
    """The tensor's statistics, or what it is that has none: "None", "not a tensor", "meta", ..."""
    is_judged: bool = True
    """Whether it makes its frame bad. Not so for weights of a child that is not called, and may be used nowhere."""
    allowed: NonFinite = NOTHING
    """What it may hold."""

    @property
    def is_bad(self) -> bool:
        """Whether it holds a NaN or an infinity that it may not hold."""
        content = self.content
        if not isinstance(content, TensorStats) or content.first_bad is None:  # nearly always; flags are slow
            return False
        return bool(content.non_finite & ~self.allowed)


@dataclass(frozen=True, slots=True)
class Frame:
    """One module call: own parameters, inputs, outputs, in this order."""

    batch_number: int
    """Forwards of the root module that had finished before this call; before the forward that it recomputes, if any."""
    module: str
    """Qualified name; "" for the root."""
    class_name: str
    lines: tuple[Line, ...]
    starts_batch: bool
    is_recompute: bool = False
    """In a backward: a forward that activation checkpointing runs once more. It is part of no batch."""
    calls: int = 1
    """Those that a compiled program has merged: each line holds the extremes of all of them."""

    @property
    def bad_lines(self) -> list[Line]:
        """None where the frame is good."""
        bad = [line for line in self.lines if line.is_bad]
        return bad if any(line.is_judged for line in bad) else []

    @property
    def is_backward(self) -> bool:
        """Whether these are gradients, in the order in which they came."""
        return any(line.label.startswith("grad ") for line in self.lines)

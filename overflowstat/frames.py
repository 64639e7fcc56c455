"""What is known of one module call."""

from dataclasses import dataclass

from .stats import TensorStats

__all__ = ["Frame", "Line"]


@dataclass(frozen=True, slots=True)
class Line:
    """One tensor that a module call touched, or what stood in its place."""

    label: str
    """The parameter's name, `input[i]`, `output`, `output[i]` or `output[i][j]`."""
    content: TensorStats | str
    """The tensor's statistics, or what it is that has none: "None", "not a tensor", "meta", ..."""

    @property
    def is_bad(self) -> bool:
        return isinstance(self.content, TensorStats) and self.content.is_bad


@dataclass(frozen=True, slots=True)
class Frame:
    """One module call: own parameters, inputs, outputs, in this order."""

    batch_number: int
    """Forwards of the root module that had finished before this call."""
    module: str
    """Qualified name; "" for the root."""
    class_name: str
    lines: tuple[Line, ...]
    starts_batch: bool

    @property
    def bad_lines(self) -> list[Line]:
        return [line for line in self.lines if line.is_bad]

"""What a monitor says of a detection: which module did it, by which operation, why, and what to try."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .stats import TensorStats
from .wording import short_name

__all__ = ["KINDS", "Kind", "Operand", "Verdict"]

Kind = Literal[
    "cast-overflow",
    "arithmetic-overflow",
    "accumulation-overflow",
    "division-by-zero",
    "zero-times-inf",
    "inf-minus-inf",
    "domain",
    "masked-row",
    "empty-reduction",
    "uninitialised",
    "bad-weight",
    "bad-input",
    "unknown",
]
"""Why numbers went bad:

- cast-overflow: a conversion to a dtype that does not hold them.
- arithmetic-overflow: an elementwise operation on finite numbers whose result its dtype does not hold.
- accumulation-overflow: a sum, a product of matrices or another reduction of finite numbers, likewise.
- division-by-zero: also by what rounded to zero, and its reciprocal, its root's, or a negative power.
- zero-times-inf, inf-minus-inf: what has no value, where infinities were there before.
- domain: a logarithm, root, power or inverse function of what it has no value for.
- masked-row: a softmax over nothing but -inf.
- empty-reduction: a mean, standard deviation or loss over no element at all.
- uninitialised: suspected where numbers have no relation to what went in, and differ when run again.
- bad-weight, bad-input: they were bad before the module was called.
- unknown: none of these for certain.
"""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Operand:
    """What an operation was given, or gave."""

    name: str
    """As its schema calls it."""
    content: TensorStats | str
    """Statistics of a tensor, the number itself, or what stands in place of a tensor."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of the cause of a detection; what is not known is None."""

    batch_number: int
    module: str
    """Qualified name of the one that made the numbers, or was the first to meet them; "" for the root."""
    class_name: str
    label: str
    """The line of its frame where they were first seen: "output", "input[0]", "weight"."""
    produced: bool
    """Whether the module made them, itself or between its children; else it was given them, or it is not known."""
    kind: Kind
    operation: str | None = None
    """As "aten.div"; in a backward the name of autograd's node, as "SqrtBackward0"."""
    source: str | None = None
    """The line of the user's code that called the operation, as "model.py:17"."""
    operands: tuple[Operand, ...] = ()
    """Of the operation, its result last; in a backward of the operation of aten in the node."""
    advice: str | None = None
    """What to try."""
    text: str = ""
    """All of it, in a few lines."""

    def to_json(self) -> dict[str, Any]:
        """For `json.dumps`; numbers that are not finite are texts, dtypes are names."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not float("-inf") < value < float("inf"):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return short_name(value)

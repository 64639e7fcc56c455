"""Why an operation gave a number that is not finite: told from its name, its operands, and what float64 would give."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree

from .operation_names import (
    ACCUMULATING,
    CASTS,
    DIVISORS,
    DOMAINS,
    ELEMENTWISE,
    EMPTY,
    GROWING,
    PRODUCTS,
    SOFTMAX,
    SYMBOLS,
)
from .verdict import Kind
from .wording import limit_of, limit_text, short_name

__all__ = ["Cause", "Operation", "find_cause"]

Number = bool | int | float | complex

# An operation on more is not run again in float64 to tell how far it went: a copy of 128 MiB.
MOST_IN_FLOAT64 = 1 << 24


class Cause(NamedTuple):
    kind: Kind
    why: str
    """The numbers that tell so; may be empty."""


class Operation(NamedTuple):
    """One that gave a number which is not finite."""

    function: Any
    name: str
    """Without namespace, overload and the underscore that stands for in place."""
    given: Mapping[str, object]
    """The arguments by their names, as they were before; without `out`, which is not read."""
    result: Tensor
    """The one that is bad."""
    first_bad: tuple[int, ...]
    """Coordinates of an element of it that is not finite."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.given.items() if isinstance(value, Tensor)}

    @property
    def value(self) -> Number:
        return cast(Number, self.result[self.first_bad].item())

    def at_first_bad(self, value: object) -> object:
        """The element of an operand that the bad one was made of, where each is made of one."""
        if not isinstance(value, Tensor):
            return value
        return value.broadcast_to(self.result.shape)[self.first_bad].item()


def find_cause(operation: Operation) -> Cause:
    """Takes nothing for granted that the numbers do not show; what they do not tell is "unknown"."""
    try:
        with torch.no_grad():
            return _find(operation) or Cause("unknown", _facts(operation))
    except Exception:  # of an operation or a tensor of a kind that was not thought of
        return Cause("unknown", "")


def _find(operation: Operation) -> Cause | None:
    if operation.name in EMPTY:
        return Cause("uninitialised", "its memory is used before anything is written to it")
    if (cause := _empty(operation)) is not None:
        return cause
    if operation.name in CASTS:
        return _cast(operation)
    if operation.name in SOFTMAX:
        return _softmax(operation)
    if operation.name.startswith("_scaled_dot_product"):
        return _attention(operation)
    if operation.name in ACCUMULATING or torch.Tag.reduction in operation.function.tags:
        return _accumulation(operation)
    if torch.Tag.pointwise in operation.function.tags or operation.name in ELEMENTWISE:
        return _elementwise(operation)
    return None


def _empty(operation: Operation) -> Cause | None:
    """A mean of no element, and what is like one."""
    x = operation.tensors.get("self")
    is_nan = _is_nan(operation.value)
    if operation.name.startswith("nll_loss") and x is not None and is_nan and operation.first_bad == ():
        target, ignored = operation.given.get("target"), operation.given.get("ignore_index", -100)
        if isinstance(target, Tensor) and bool(torch.eq(target, cast(int, ignored)).all()):
            return Cause("empty-reduction", f"all {target.numel()} labels are {ignored}, which is ignored")
    if x is None or not (operation.name in ACCUMULATING or torch.Tag.reduction in operation.function.tags):
        return None
    if x.numel() == 0 and is_nan:
        return Cause("empty-reduction", f"{operation.name} over no element: its input is of shape {list(x.shape)}")
    reduced = x.numel() // max(1, operation.result.numel())
    if operation.name in ("var", "std", "var_mean", "std_mean") and is_nan:
        correction = operation.given.get("correction")
        correction = int(operation.given.get("unbiased", True) is True) if correction is None else correction
        if isinstance(correction, (int, float)) and reduced <= correction:
            return Cause("empty-reduction", f"{operation.name} over {reduced} less {correction} elements")
    return None


def _cast(operation: Operation) -> Cause | None:
    source = operation.given.get("value" if operation.name == "fill" else "src", operation.given.get("self"))
    x = operation.at_first_bad(source)
    if not isinstance(source, Tensor) or not _is_finite(x) or source.dtype == operation.result.dtype:
        return None
    return Cause("cast-overflow", f"{_text(x)} in {short_name(source.dtype)} is {_beyond(operation)}")


def _softmax(operation: Operation) -> Cause | None:
    x, dim = operation.given.get("self"), operation.given.get("dim")
    if not isinstance(x, Tensor) or not isinstance(dim, int):
        return None
    if not _is_nan(operation.value):
        return _log_softmax(operation, x)
    row = x.movedim(dim, -1)[_without(operation.first_bad, dim % x.dim())] if x.dim() else x.reshape(1)
    if bool((row == -math.inf).all()):
        return Cause("masked-row", f"all {row.numel()} elements of a row are -inf, so that none is left to choose from")
    if bool((row == math.inf).any()):
        return Cause("inf-minus-inf", "softmax takes the largest of a row from all of it, and that is +inf")
    return None


def _log_softmax(operation: Operation, x: Tensor) -> Cause | None:
    """Of what is further below the largest of its row than the dtype reaches."""
    in_float64 = _in_float64(operation) if _all_finite(x) else None
    if in_float64 is None or not limit_of(operation.result.dtype) < in_float64 < math.inf:
        return None
    return Cause("arithmetic-overflow", f"{operation.name} is {-in_float64:.3g} there, {_beyond(operation)}")


def _attention(operation: Operation) -> Cause | None:
    mask = operation.given.get("attn_mask", operation.given.get("attn_bias"))
    if isinstance(mask, Tensor) and _is_nan(operation.value):
        masked = ~mask if mask.dtype == torch.bool else mask == -math.inf
        if bool(masked.all(-1).any()):
            return Cause("masked-row", "a row of the attention mask lets nothing through")
    return _accumulation(operation)


def _accumulation(operation: Operation) -> Cause | None:
    if all(map(_all_finite, operation.tensors.values())):
        # Doubles that overflow prove nothing: the next wider type is not at hand.
        in_float64 = operation.result.dtype in (torch.float64, torch.complex128) or _in_float64(operation)
        if in_float64 is True:
            certain = operation.name in PRODUCTS or operation.name in ("sum", "cumsum", "prod", "cumprod")
            return Cause("accumulation-overflow", "its operands are finite") if certain else None
        if in_float64 is not None and math.isfinite(in_float64):
            is_beyond = in_float64 > limit_of(operation.result.dtype)
            text = _beyond(operation) if is_beyond else "but what is summed on the way to it overflows"
            return Cause("accumulation-overflow", f"of finite numbers it would be {in_float64:.3g}, {text}")
        return None
    if operation.name in PRODUCTS:
        return _product_with_infinities(operation)
    x = operation.tensors.get("self")
    if operation.name not in ("sum", "mean", "cumsum") or x is None or not _is_nan(operation.value):
        return None
    if bool((x == math.inf).any()) and bool((x == -math.inf).any()) and not bool(x.isnan().any()):
        return Cause("inf-minus-inf", "it adds +inf and -inf")
    return None


def _product_with_infinities(operation: Operation) -> Cause | None:
    """Of the row and the column that made the bad element."""
    if not _is_nan(operation.value):
        return None
    a, b = list(operation.tensors.values())[-2:]  # before them may come what is added
    left = a[operation.first_bad[: a.dim() - 1]]
    right = b if b.dim() == 1 else b[operation.first_bad[: b.dim() - 2]][:, operation.first_bad[-1]]
    products = left.double() * right.double()
    if bool(left.isnan().any()) or bool(right.isnan().any()):
        return None
    if bool(products.isnan().any()):
        return Cause("zero-times-inf", "an element is infinite, and the one that it is multiplied by is 0")
    if bool((products == math.inf).any()) and bool((products == -math.inf).any()):
        return Cause("inf-minus-inf", "products of both signs are infinite, and are added")
    return None


def _elementwise(operation: Operation) -> Cause | None:
    operands = {name: operation.at_first_bad(value) for name, value in operation.given.items()}
    numbers = {name: x for name, x in operands.items() if isinstance(x, (bool, int, float, complex))}
    if operation.name == "native_dropout":
        kept = 1 - cast(float, numbers["p"])
        return Cause("arithmetic-overflow", f"{_text(numbers['input'])} / {kept:.3g} is {_beyond(operation)}")
    call = _call(operation.name, numbers)
    x = numbers.get("self")
    infinite = [v for v in numbers.values() if not _is_finite(v)]
    if any(map(_is_nan, infinite)):
        return None
    if infinite:
        if not _is_nan(operation.value):
            return None
        if operation.name in ("mul", "multiply") and any(v == 0 for v in numbers.values()):
            return Cause("zero-times-inf", call)
        if operation.name in ("add", "sub", "rsub", "subtract") and len(infinite) == 2:
            return Cause("inf-minus-inf", call)
        return None
    divisor = numbers.get(DIVISORS.get(operation.name, ""))
    if divisor == 0 or (operation.name == "pow" and x == 0 and _is_negative(numbers.get("exponent"))):
        return Cause("division-by-zero", call)
    if operation.name in ("log", "log2", "log10") and x == 0:
        return Cause("domain", f"{call}: {operation.name} has no value at 0")
    if operation.name in DOMAINS and isinstance(x, (int, float)):
        is_inside, text = DOMAINS[operation.name]
        if not is_inside(x):
            return Cause("domain", f"{call}: {operation.name} {text}")
    if operation.name == "pow" and _is_negative(x) and _is_nan(operation.value):
        return Cause("domain", f"{call}: a negative number has no such power")
    in_float64 = _in_float64(operation, operands)
    if in_float64 is None or math.isnan(in_float64) or (math.isinf(in_float64) and operation.name not in GROWING):
        return None
    if in_float64 <= limit_of(operation.result.dtype):
        if _is_nan(operation.value) and not operation.result.is_complex():
            return None  # as of 0 times a constant beyond the dtype
        return Cause("arithmetic-overflow", f"{call} overflows on its way to {in_float64:.3g}")
    equals = "" if math.isinf(in_float64) else f" = {math.copysign(in_float64, _sign(operation.value)):.3g}"
    return Cause("arithmetic-overflow", f"{call}{equals} is {_beyond(operation)}")


def _in_float64(operation: Operation, operands: Mapping[str, object] | None = None) -> float | None:
    """The magnitude that the bad element has if all is computed in float64; None if that cannot be told.

    With `operands` these are the elements that it is made of, in place of the tensors.
    """
    given: dict[str, Any] = dict(operation.given)
    if operands is not None:
        given = {
            name: torch.tensor(operands[name], dtype=_wide(value.dtype)) if isinstance(value, Tensor) else value
            for name, value in given.items()
        }
    elif sum(x.numel() for x in (*operation.tensors.values(), operation.result)) > MOST_IN_FLOAT64:
        return None
    else:
        given = _pytree.tree_map_only(Tensor, lambda x: x.to(_wide(x.dtype)), given)
    if given.get("dtype") is not None:
        given["dtype"] = _wide(given["dtype"])
    try:
        # Of the overload that writes to `out` there is one that gives a new tensor.
        has_out = any(argument.is_out for argument in operation.function._schema.arguments)
        found = (operation.function.overloadpacket if has_out else operation.function)(**given)
    except RuntimeError:  # of an operation that does not compute in float64
        return None
    found = found[0] if isinstance(found, (tuple, list)) else found
    if operands is None:
        if found.shape != operation.result.shape:
            return None
        found = found[operation.first_bad]
    return float(abs(found.item()))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype


def _facts(operation: Operation) -> str:
    """What is there to say of an operation that gave it for a reason which is not known."""
    bad = [name for name, x in operation.tensors.items() if not _all_finite(x)]
    return f"not finite before: {', '.join(bad)}" if bad else "all that it was given is finite"


def _call(name: str, numbers: Mapping[str, Number]) -> str:
    """As "6.27e+04 * 1.11" or "exp(98.1)"."""
    values = [_text(x) for argument, x in numbers.items() if argument != "alpha" or x != 1]
    if name in SYMBOLS and len(values) == 2:
        return f" {SYMBOLS[name]} ".join(f"({x})" if x.startswith("-") else x for x in values)
    return f"{name}({', '.join(values)})"


def _beyond(operation: Operation) -> str:
    return f"beyond {limit_text(operation.result.dtype)}"


def _text(number: object) -> str:
    return f"{number:.3g}" if isinstance(number, (float, complex)) else str(number)


def _all_finite(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor).all())


def _is_nan(number: object) -> bool:
    return number != number


def _is_finite(number: object) -> bool:
    return isinstance(number, (bool, int)) or (isinstance(number, (float, complex)) and abs(number) < math.inf)


def _is_negative(number: object) -> bool:
    return isinstance(number, (int, float)) and number < 0


def _sign(number: object) -> float:
    return -1.0 if _is_negative(number) else 1.0


def _without(coordinates: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return coordinates[:dim] + coordinates[dim + 1 :]

"""An operation that was done, and may be done again without some of what was bad in its operands."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from .capture import is_tensor
from .operation_names import OVERWRITING
from .provenance import Provenance, not_finite

__all__ = ["DoneOperation", "Repeated", "tensors_in"]

# Of other libraries nothing is known of what it does beside its results.
_KNOWN = ("aten", "prims", "quantized")


class Repeated(NamedTuple):
    given: Mapping[str, object]
    """Its operands, some of their elements replaced."""
    result: Tensor


class DoneOperation:
    """As it comes to a dispatch mode.

    Attributes:
        operands: the arguments by the names in the schema, as far as they were given; those of an operation without one
            are numbered. Not those whose contents do not matter, as `out`.
        written: the tensors among the arguments that it writes to.
        before: copies of these, from before it was done, by the id of the tensor.
        results: all tensors that it gave.
        constants: the numbers of the origins of infinities and NaN that are no tensors.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self._args = args
        self._kwargs = kwargs
        given = _by_name(function, args, kwargs)
        self.operands = {name: value for name, value in given.items() if name not in _overwritten(function)}
        self.written = list(tensors_in([given[name] for name in _written(function) if name in given]))
        self.before: dict[int, Tensor] = {}
        self.results: list[Tensor] = []
        self.constants: set[int] = set()

    @property
    def full_name(self) -> str:
        """As "aten.div_"."""
        return str(getattr(self.function, "overloadpacket", self.function))

    @property
    def name(self) -> str:
        """As "div", in place or not."""
        return _name(self.function)

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return torch.Tag.nondeterministic_seeded in getattr(self.function, "tags", ())

    def run(self) -> Any:
        found = self.function(*self._args, **self._kwargs)
        self.results = list(tensors_in(found))
        return found

    def given(self) -> Iterator[Tensor]:
        return tensors_in((self._args, self._kwargs))

    def operands_before(self) -> dict[str, object]:
        """As they were before it was done."""
        found: dict[str, object] = _pytree.tree_map_only(Tensor, self._before, dict(self.operands))
        return found

    def _before(self, tensor: Tensor) -> Tensor:
        return self.before.get(id(tensor), tensor)

    def again(self, result: Tensor, provenance: Provenance, keep: set[int]) -> Repeated | None:
        """One of its results, if of what is bad in its operands all is 1 but what comes from the origins `keep`.

        None where that cannot be told. Cost: that of the operation, and of a copy of operands that are bad or written.
        """
        # The running statistics of a batch norm are written to, and its schema does not tell.
        if self.draws or "batch_norm" in self.name or getattr(self.function, "namespace", "") not in _KNOWN:
            return None
        made: dict[int, Tensor] = {}

        def replaced(value: object) -> object:
            if isinstance(value, float):
                return value if value - value == 0 or self.constants & keep else 1.0
            if not is_tensor(value):
                return value
            if id(value) not in made:
                made[id(value)] = _replaced(value, self._before(value), provenance, keep)
            return made[id(value)]

        try:
            args, kwargs = _pytree.tree_map(replaced, (self._args, self._kwargs))
            results = list(tensors_in(self.function(*args, **kwargs)))
            index = next((i for i, each in enumerate(self.results) if each is result), None)
            found = made[id(result)] if index is None else results[index]
        except Exception:  # of an operation or a tensor of a kind that was not thought of
            return None
        # Those that it wrote to are no longer what they were given as.
        given = {name: value for name, value in _by_name(self.function, args, kwargs).items() if name in self.operands}
        for name, value in self.operands.items():
            if is_tensor(value) and id(value) in self.before:
                given[name] = _replaced(value, self._before(value), provenance, keep)
        return Repeated(given, found) if found.shape == result.shape else None


def _replaced(tensor: Tensor, before: Tensor, provenance: Provenance, keep: set[int]) -> Tensor:
    """A tensor that may be written to if the original was."""
    bad = not_finite(before)
    if bad is not None and bool(bad.any()):
        if keep:
            of = provenance.of(tensor)
            kept = torch.tensor(sorted(keep), dtype=torch.int32, device=before.device)
            bad = bad & ~(torch.isin(of, kept) if isinstance(of, Tensor) else torch.tensor(of in keep))
        return before.masked_fill(bad.to(before.device), 1.0)
    return before if before is tensor else before.clone()


def _by_name(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, object]:
    schema = getattr(function, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else map(str, range(len(args)))
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _written(function: Any) -> list[str]:
    schema = getattr(function, "_schema", None)
    arguments: Sequence[Any] = schema.arguments if schema else ()
    return [argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write]


def _overwritten(function: Any) -> list[str]:
    """Arguments whose contents do not matter."""
    if _name(function) in OVERWRITING:
        return _written(function)
    schema = getattr(function, "_schema", None)
    return [argument.name for argument in schema.arguments if argument.is_out] if schema else []


def _name(function: Any) -> str:
    name = str(getattr(function, "overloadpacket", function)).rpartition(".")[2]
    return name[:-1] if name.endswith("_") else name


def tensors_in(values: object) -> Iterator[Tensor]:
    return (value for value in _pytree.tree_leaves(values) if is_tensor(value))

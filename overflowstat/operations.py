"""The operations of a forward, each looked at: where numbers that are not finite were born, and what bears them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .bad_tensors import kinds_in
from .calls import Source, calls_in_progress, user_source
from .capture import is_tensor
from .cause import Cause, Operation, find_cause
from .kept_tensors import KeptTensors
from .measurement import measure
from .operation_names import EMPTY, OVERWRITING
from .recorder import Recorder
from .row import NOTHING, NonFinite, is_new
from .stats import TensorStats
from .verdict import Operand

__all__ = ["Birth", "Operations"]


@dataclass(frozen=True, slots=True, eq=False)
class Birth:
    """An operation that gave numbers which are not finite, and was given none of their kind."""

    number: int
    """Of those before."""
    operation: str
    source: Source | None
    module: nn.Module
    """The innermost whose forward was running."""
    operands: tuple[Operand, ...]
    cause: Cause


class _Given:
    """Where numbers come from that were there before, or that the code wrote down as they are."""


GIVEN = _Given()
Origin = Birth | _Given


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this is entered, the results of each operation are read, and what they bear is followed from its birth on.

    Cost: a pass over the results of each operation, and a wait for their device; over its operands where a result is
    bad; a copy of what is written to, for as long as the operation runs.

    Args:
        recorder: what reads.
        module: whose forward runs in it.
        kept: where what was there before is kept when it is written to.
        fill_empty: whether memory that is not initialised is filled with NaN, so that its use shows.
    """

    def __init__(self, recorder: Recorder, module: nn.Module, kept: KeptTensors, fill_empty: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._module = module
        self._depth = sum(1 for _ in calls_in_progress())
        self._fill_empty = fill_empty
        self._origins: dict[int, Origin] = {}  # of what bears something, by its storage
        self._made: set[int] = set()  # storages; where one is freed, only one that is made here can take its place
        self._kept = kept
        self._births = 0
        self.has_seen_empty = False
        """Whether there was memory that is not initialised."""

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(function, args, kwargs or {})

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _arguments(function, args, kwargs)
        written = list(_tensors([given[name] for name in _written(function) if name in given]))
        copies = self._copies(written)
        results = function(*args, **kwargs)
        known = {_storage(tensor) for tensor in _tensors(given)}
        made = [tensor for tensor in _tensors(results) if _storage(tensor) not in known]
        self._made.update(map(_storage, made))
        if _name(function) in EMPTY:
            self.has_seen_empty = True
            if self._fill_empty:
                _fill(made)
        read = {name: value for name, value in given.items() if name not in _overwritten(function)}
        self._follow(function, read, copies, [*made, *written])
        return results

    def birth_of(self, tensor: Tensor) -> Birth | None:
        """Of what this one bears; None if it was given."""
        origin = self._origins.get(_storage(tensor), GIVEN)
        return origin if isinstance(origin, Birth) else None

    def _copies(self, written: Sequence[Tensor]) -> dict[int, Tensor]:
        self._kept.keep(tensor for tensor in written if _storage(tensor) not in self._made)
        return {id(tensor): tensor.detach().clone() for tensor in written}

    def _follow(
        self, function: Any, given: Mapping[str, object], copies: Mapping[int, Tensor], results: Sequence[Tensor]
    ) -> None:
        inherited: Origin | None = None
        before = NOTHING
        was_traced = False
        for result in results:
            kinds = kinds_in(self._recorder, result)
            storage = _storage(result)
            if not kinds:
                if _is_whole(result):
                    self._origins.pop(storage, None)
                continue
            if not was_traced:
                was_traced = True
                inherited, before = self._heritage(given, copies)
            if inherited is None or (inherited is GIVEN and is_new(kinds, before)):
                inherited = self._birth(function, given, copies, result, before)
            self._origins[storage] = inherited

    def _heritage(self, given: Mapping[str, object], copies: Mapping[int, Tensor]) -> tuple[Origin | None, NonFinite]:
        """What the operands bear: the earliest birth, or GIVEN, or None if they bear nothing; and its kinds."""
        found: list[Origin] = []
        kinds = NOTHING
        for tensor in _tensors(given):
            if borne := kinds_in(self._recorder, copies.get(id(tensor), tensor)):
                kinds |= borne
                found.append(self._origins.get(_storage(tensor), GIVEN))
        for number in (value for value in _pytree.tree_leaves(given) if isinstance(value, float)):
            if number - number != 0:
                kinds |= NonFinite.of(number != number, number > 0, number < 0)
                found.append(GIVEN)
        births = [origin for origin in found if isinstance(origin, Birth)]
        if births:
            return min(births, key=lambda birth: birth.number), kinds
        return (GIVEN if found else None), kinds

    def _birth(
        self,
        function: Any,
        given: Mapping[str, object],
        copies: Mapping[int, Tensor],
        result: Tensor,
        kinds_before: NonFinite,
    ) -> Birth:
        self._births += 1
        before: dict[str, object] = _pytree.tree_map_only(Tensor, lambda t: copies.get(id(t), t), dict(given))
        stats = self._stats(result)
        cause = Cause("unknown", "")
        if isinstance(stats, TensorStats) and stats.first_bad is not None:
            first_new = _first_new(result, kinds_before) or stats.first_bad
            cause = find_cause(Operation(function, _name(function), before, result, first_new))
        operands = [Operand(name, self._stats(x) if is_tensor(x) else str(x)) for name, x in before.items()]
        calls = list(calls_in_progress())
        return Birth(
            self._births,
            _full_name(function),
            user_source(),
            calls[0].module if len(calls) > self._depth else self._module,
            (*operands, Operand("result", stats)),
            cause,
        )

    def _stats(self, tensor: Tensor) -> TensorStats | str:
        return "zeros" if tensor._is_zerotensor() else measure(self._recorder, [tensor]).content(0)


def _arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, object]:
    """By the names in the schema, as far as they were given; those of an operation without one are numbered."""
    schema = getattr(function, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else map(str, range(len(args)))
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _written(function: Any) -> list[str]:
    schema = getattr(function, "_schema", None)
    arguments = schema.arguments if schema else []
    return [argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write]


def _overwritten(function: Any) -> list[str]:
    """Arguments whose contents do not matter."""
    if _name(function) in OVERWRITING:
        return _written(function)
    schema = getattr(function, "_schema", None)
    return [argument.name for argument in schema.arguments if argument.is_out] if schema else []


def _name(function: Any) -> str:
    name = _full_name(function).rpartition(".")[2]
    return name[:-1] if name.endswith("_") else name


def _full_name(function: Any) -> str:
    """As "aten.div_"."""
    return str(getattr(function, "overloadpacket", function))


def _fill(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))


def _first_new(result: Tensor, before: NonFinite) -> tuple[int, ...] | None:
    """Of an element that bears what no operand did, where those bore something; which others may have from them."""
    if not before:
        return None
    found = (torch.isinf(result) if before & NonFinite.NAN else torch.isnan(result)).nonzero()
    return tuple(found[0].tolist()) if len(found) else None


def _is_whole(tensor: Tensor) -> bool:
    """Whether it is all that is in its storage."""
    try:
        return tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes()
    except Exception:  # of a subclass's own making
        return True


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except Exception:  # of one that has none
        return id(tensor)


def _tensors(values: object) -> Iterator[Tensor]:
    return (value for value in _pytree.tree_leaves(values) if is_tensor(value))

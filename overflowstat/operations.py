"""The operations of a forward, each looked at: where numbers that are not finite were born, and what bears them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .bad_tensors import kinds_in
from .calls import Source, calls_in_progress, user_source
from .capture import is_tensor
from .cause import Cause, Operation, find_cause
from .done_operation import DoneOperation, Repeated, tensors_in
from .fused import parts_of
from .kept_tensors import KeptTensors
from .measurement import measure
from .operation_names import EMPTY
from .provenance import UNMET, Provenance, is_whole, not_finite, storage_of
from .recorder import Recorder
from .row import NOTHING, NonFinite, is_new
from .stats import TensorStats
from .verdict import Operand

__all__ = ["Birth", "Entry", "Operations", "Origin"]

NOT_OF_PARTS = ("unknown", "uninitialised", "cast-overflow", "arithmetic-overflow", "accumulation-overflow")


@dataclass(frozen=True, slots=True, eq=False)
class Birth:
    """An operation that gave numbers which are not finite, and was given none that they come from."""

    number: int
    """Of those before."""
    operation: str
    source: Source | None
    module: nn.Module
    """The innermost whose forward was running."""
    operands: tuple[Operand, ...]
    cause: Cause

    @property
    def is_uninitialised(self) -> bool:
        return self.cause.kind == "uninitialised"


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """The first operation that was given numbers which were there before, or that the code wrote down as they are."""

    number: int
    operation: str | None
    """None if no operation was, as of an input that is given on."""
    source: Source | None
    module: nn.Module
    operand: Operand
    """Which bears them."""
    tensor: Tensor | None
    """The same; None for a number."""
    is_written: bool
    """The forward had written to it, and may have made it so when it first ran."""
    is_uninitialised = False


Origin = Birth | Entry


class _Borne(NamedTuple):
    """What the operands of an operation bear."""

    kinds: NonFinite
    numbers: set[int]
    """Of the origins."""


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this is entered, the results of each operation are read, and what they bear is followed from its birth on:
    of each element, if several births meet.

    Cost: a pass over the results of each operation, and a wait for their device; where a result is bad, over its
    operands, and if they are, too, the operation again for each origin and once more; a copy of what is written to, for
    as long as the operation runs.

    Args:
        recorder: what reads.
        module: whose forward runs in it.
        kept: where what was there before is kept when it is written to.
        fill_empty: whether memory that is not initialised is filled with NaN, so that its use shows.
        is_part: whether all that runs is part of one operation.
    """

    def __init__(
        self,
        recorder: Recorder,
        module: nn.Module,
        kept: KeptTensors,
        fill_empty: bool = False,
        is_part: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._module = module
        self._depth = sum(1 for _ in calls_in_progress())
        self._fill_empty = fill_empty
        self._is_part = is_part
        self._origins: list[Origin] = []
        self._provenance = Provenance()
        self._made: set[int] = set()  # storages; where one is freed, only one that is made here can take its place
        self._written: set[int] = set()
        self._read: list[tuple[float, set[int]]] = []  # numbers that went to Python, with their origins
        self._kept = kept
        self.has_seen_empty = False
        """Whether there was memory that is not initialised."""
        self.has_drawn = False
        """Whether random numbers were drawn."""
        self.failure = ""
        """Why what is born is no longer followed; empty as long as it is."""

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            if torch.is_inference_mode_enabled() and (parts := self._decomposed(function, args, kwargs or {})):
                return parts[0]
            return self._run(function, args, kwargs or {})

    def _decomposed(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """What torch makes of several operations, which elsewhere is done before they come here."""
        if not isinstance(function, torch._ops.OpOverload):
            return None
        with self:
            result = function.decompose(*args, **kwargs)
        return None if result is NotImplemented else (result,)

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        done = DoneOperation(function, args, kwargs)
        self._kept.keep(tensor for tensor in done.written if storage_of(tensor) not in self._made)
        done.before = {id(tensor): tensor.detach().clone() for tensor in done.written}
        self.has_drawn = self.has_drawn or done.draws
        results = done.run()
        known = set(map(storage_of, done.given()))
        made = [tensor for tensor in done.results if storage_of(tensor) not in known]
        for tensor in made:
            self._made.add(storage_of(tensor))
            self._provenance.forget(tensor)
        self._written.update(map(storage_of, done.written))
        if isinstance(results, float) and results - results != 0:  # as item() gives it
            with _apart():
                self._read.append((results, self._borne(done).numbers))
        if done.name in EMPTY:
            self.has_seen_empty = True
            if self._fill_empty:
                _fill(made)
        if not self.failure:
            try:
                self._follow(done, [*made, *done.written])
            except Exception as error:  # which is none of the forward's
                self.failure = f"{type(error).__name__}: {error}"
        return results

    def origin_of(self, tensor: Tensor, kinds: NonFinite) -> Origin:
        """Of what a tensor bears of some kinds: of births the first, or else what was there."""
        with _apart():
            found = self._provenance.numbers(tensor, _of_kinds(tensor, kinds)) - {UNMET}
            if found:
                return self._origin(self._in_order(found)[0])
            operand = Operand("result", self._stats(tensor))
        return Entry(0, None, None, self._module, operand, tensor, storage_of(tensor) in self._written)

    def _origin(self, number: int) -> Origin:
        return self._origins[number - 1]

    def _in_order(self, numbers: set[int]) -> list[int]:
        """What was there, as a mask is, may be meant: births come first."""
        return sorted(numbers, key=lambda number: (isinstance(self._origin(number), Entry), number))

    def _follow(self, done: DoneOperation, results: Sequence[Tensor]) -> None:
        borne: _Borne | None = None
        for result in results:
            kinds = kinds_in(self._recorder, result)
            if kinds:
                with _apart():
                    borne = borne or self._borne(done)
                    self._provenance.put(result, self._numbers(done, result, kinds, borne))
            elif is_whole(result):
                self._provenance.forget(result)

    def _borne(self, done: DoneOperation) -> _Borne:
        numbers: set[int] = set()
        kinds = NOTHING
        for name, value in done.operands.items():
            for tensor in tensors_in(value):
                before = done.before.get(id(tensor), tensor)
                if not (found := kinds_in(self._recorder, before)):
                    continue
                kinds |= found
                of = self._provenance.numbers(tensor, not_finite(before))
                if UNMET in of:
                    number = self._entry(done, name, tensor, before)
                    self._provenance.meet(tensor, number)
                    of = of - {UNMET} | {number}
                numbers |= of
            for x in _pytree.tree_leaves(value):
                if isinstance(x, float) and x - x != 0:
                    kinds |= NonFinite.of(x != x, x > 0, x < 0)
                    read = [origins for number, origins in self._read if repr(number) == repr(x)]
                    done.constants |= read[0] if read else {self._entry(done, name, None, x)}
        return _Borne(kinds, numbers | done.constants)

    def _numbers(self, done: DoneOperation, result: Tensor, kinds: NonFinite, borne: _Borne) -> int | Tensor:
        """The origins of what is bad in a result: one for all, or one for each element.

        What is bad though nothing in the operands is was born here. Else it is from the first birth that alone gives
        it. What no birth gives is born here if its kind is new, and else from what was there.
        """
        if not borne.numbers:
            return self._birth(done, result)
        candidates = self._in_order(borne.numbers)
        births = [number for number in candidates if isinstance(self._origin(number), Birth)]
        bad = not_finite(result)
        # What was written to may have had other numbers when the forward first ran.
        is_known = not any(origin.is_written for origin in map(self._origin, candidates) if isinstance(origin, Entry))
        clean = done.again(result, self._provenance, keep=set()) if bad is not None and is_known else None
        if bad is None or clean is None or (left := not_finite(clean.result)) is None:
            return self._birth(done, result) if not births and is_new(kinds, borne.kinds) else candidates[0]
        numbers = torch.zeros(result.shape, dtype=torch.int32, device=result.device)
        if bool((born := bad & left).any()):
            numbers[born] = self._birth(done, result, _first(born), clean)
        left = bad & ~born
        for number in births if len(candidates) > 1 else []:
            alone = done.again(result, self._provenance, {number}) if bool(left.any()) else None
            if alone is not None and (does := not_finite(alone.result)) is not None:
                numbers[left & does] = number
                left = left & ~does
        if not births and bool((born := left & _of_new_kind(result, borne.kinds)).any()):
            numbers[born] = self._birth(done, result, _first(born))
            left = left & ~born
        numbers[left] = candidates[0]
        of_bad = numbers[bad]
        return int(of_bad[0]) if bool((of_bad == of_bad[0]).all()) else numbers

    def _entry(self, done: DoneOperation, name: str, tensor: Tensor | None, before: Tensor | float) -> int:
        operand = Operand(name, self._stats(before) if isinstance(before, Tensor) else str(before))
        is_written = tensor is not None and storage_of(tensor) in self._written
        number = len(self._origins) + 1
        entry = Entry(number, done.full_name, user_source(), self._running(), operand, tensor, is_written)
        self._origins.append(entry)
        return number

    def _birth(
        self,
        done: DoneOperation,
        result: Tensor,
        first: tuple[int, ...] | None = None,
        clean: Repeated | None = None,
    ) -> int:
        """At an element of the result; in `clean` without what is bad and has no part in that one."""
        before = done.operands_before()
        stats = self._stats(result)
        cause = Cause("unknown", "")
        if isinstance(stats, TensorStats) and stats.first_bad is not None:
            given, seen = (before, result) if clean is None else clean
            first = first or stats.first_bad
            cause = find_cause(Operation(done.function, done.name, given, seen, first))
            if cause.kind == "unknown":
                cause = self._cause_of_part(done, given, first) or cause
        operands = [Operand(name, self._stats(x) if is_tensor(x) else str(x)) for name, x in before.items()]
        operands.append(Operand("result", stats))
        number = len(self._origins) + 1
        birth = Birth(number, done.full_name, user_source(), self._running(), tuple(operands), cause)
        self._origins.append(birth)
        return number

    def _cause_of_part(self, done: DoneOperation, given: Mapping[str, object], first: tuple[int, ...]) -> Cause | None:
        """Of an operation that does several things in one, where one of them tells it."""
        if self._is_part or any(kinds_in(self._recorder, tensor) for tensor in tensors_in(given)):
            return None
        kept = KeptTensors()
        parts = Operations(self._recorder, self._module, kept, is_part=True)
        try:
            made = parts_of(done.function, given)
            if made is None:
                return None
            with parts:
                result = next(tensors_in(made()))
            origin = parts.origin_of(result[first], NonFinite.NAN | NonFinite.POSINF | NonFinite.NEGINF)
        except Exception:  # of what torch does not decompose for such operands
            return None
        finally:
            kept.put_back()
        # How far numbers go beyond a limit depends on the dtypes of the parts, which may be others here.
        if not isinstance(origin, Birth) or origin.cause.kind in NOT_OF_PARTS:
            return None
        return Cause(origin.cause.kind, f"{origin.cause.why}, as a part of {done.name}")

    def _running(self) -> nn.Module:
        calls = list(calls_in_progress())
        return calls[0].module if len(calls) > self._depth else self._module

    def _stats(self, tensor: Tensor) -> TensorStats | str:
        return "zeros" if tensor._is_zerotensor() else measure(self._recorder, [tensor]).content(0)


@contextmanager
def _apart() -> Iterator[None]:
    """Looking at numbers is no operation of the forward; but it may enter a mode of its own."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _fill(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))


def _first(which: Tensor) -> tuple[int, ...]:
    return tuple(which.nonzero()[0].tolist())


def _of_new_kind(result: Tensor, before: NonFinite) -> Tensor:
    """Elements of a kind that no operand has. An infinity may have been negated."""
    found = torch.zeros(result.shape, dtype=torch.bool, device=result.device)
    if not before & NonFinite.NAN:
        found |= torch.isnan(result)
    if not before & (NonFinite.POSINF | NonFinite.NEGINF):
        found |= torch.isinf(result)
    return found


def _of_kinds(tensor: Tensor, kinds: NonFinite) -> Tensor | None:
    if (bad := not_finite(tensor)) is None or tensor.is_complex() or tensor.itemsize == 1:
        return bad
    found = torch.zeros_like(bad)
    for kind, is_it in (
        (NonFinite.NAN, torch.isnan),
        (NonFinite.POSINF, torch.isposinf),
        (NonFinite.NEGINF, torch.isneginf),
    ):
        if kinds & kind:
            found |= is_it(tensor)
    return found

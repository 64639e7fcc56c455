"""A module of a model that computes in float32, whatever the rest computes in."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .dynamo import not_compiled
from .errors import warn_user
from .hooks import is_in_backward
from .measurement import Measurement, measure
from .names import has_forward, module_around, named_modules
from .recorder import Recorder, RecorderName, is_capturing, make_recorder
from .stats import TensorStats
from .validation import check_module
from .wording import limit_text

__all__ = ["InFloat32", "run_in_float32", "run_module_in_float32"]

NARROW = (torch.float16, torch.bfloat16)


def run_in_float32(model: nn.Module, name: str, *, recorder: RecorderName | Recorder = "auto") -> InFloat32:
    """Have one module of a model compute in float32 from now on, or for a `with` block.

        >>> run_in_float32(model, "encoder.block.2.layer.1")  # until its remove()
        >>> with run_in_float32(model, "encoder.block.2.layer.1"):  # in this block
        ...     train()

    In its forward autocast is off, and what is float16 or bfloat16 is float32: inputs, also by keyword and in tuples,
    lists, dicts and dataclasses, and the parameters and buffers of all that is in it. Under autocast what it gives
    stays float32. Else that is cast back to the dtype of its first input of floating point, or where there is none, of
    its weights. Values that do not fit that dtype are told of, once, with what to do.

    The model's parameters stay the ones that they are, for optimizers and `state_dict`: the forward sees copies, whose
    gradients go on to them, and which are gone when it ends, but for those that autograd keeps for the backward. What
    the forward writes into buffers or inputs is written back. What activation checkpointing runs once more is run in
    float32, too, as far as it calls modules. Hooks on the module see what it is given and gives outside, hooks on
    those in it float32. Copies of the model, deep or pickled, do as it does. torch.compile runs the module as it is.

    Not done: what an object of another kind holds, as a cache of keys and values, is not cast; a method that is not the
    module's forward does not run in float32. Threads take turns in the module.

    Args:
        model: a module.
        name: the qualified name of one in it; "" for itself.
        recorder: what reads outputs that are cast back, see `tensor_stats`.

    Cost: a copy of the weights in float32 at each forward, and what computing in it takes; a pass over outputs that are
    cast back, before and after, until some did not fit. No wait for a GPU.

    Raises:
        TypeError: an argument is of another type, or the module is one of TorchScript.
        ValueError: the model has no module of that name; the text says which are near.
    """
    name, module = _find(check_module("model", model), name)
    _refuse_scripted(name, module)
    return InFloat32(module, _Region(name, module_around(model, name), make_recorder(recorder)))


def run_module_in_float32(module: nn.Module, recorder: Recorder, casts_back: bool) -> InFloat32:
    """As `run_in_float32`, of the module itself; what it gives stays float32 if it is not cast back."""
    _refuse_scripted("", module)
    return InFloat32(module, _Region("", None, recorder, casts_back))


class InFloat32:
    """A module that runs in float32, until `remove()` or the end of a `with` block; see `run_in_float32`."""

    def __init__(self, module: nn.Module, region: _Region) -> None:
        self._region = region
        self._forwards: list[_Forward] = []
        for each in module.modules():
            if has_forward(each):
                forward = _Forward(each, region)
                each.__dict__["forward"] = forward
                self._forwards.append(forward)

    def remove(self) -> None:
        """Let the module run as it did; calling it again does nothing."""
        for forward in self._forwards:
            forward.remove()
        self._forwards.clear()
        self._region.tell(wait=True)

    def __enter__(self) -> InFloat32:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Forward:
    """In place of the forward of a module. All modules of a region have one, so that what runs one of them by itself,
    as a checkpoint does in the backward, finds its weights cast, too."""

    def __init__(self, module: nn.Module, region: _Region) -> None:
        self._module = weakref.ref(module)
        self._region = region
        self._before: Callable[..., Any] | None = module.__dict__.get("forward")
        self._is_on = True

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        if not self._is_on:
            return self._forward(*args, **kwargs)
        return self._region.run(module, self._forward, args, kwargs)

    @property
    def _forward(self) -> Callable[..., Any]:
        module = self._module()
        return self._before or functools.partial(type(module).forward, module)  # type: ignore[union-attr]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward)

    def remove(self) -> None:
        self._is_on = False
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self:
            return  # something else has wrapped this one since
        if self._before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self._before

    def __getstate__(self) -> tuple[Any, ...]:
        return self._module(), self._region, self._before, self._is_on

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        module, self._region, self._before, self._is_on = state
        self._module = weakref.ref(module)


class _Region:
    """What the modules that were put into float32 together share."""

    def __init__(self, name: str, around: str | None, recorder: Recorder, casts_back: bool = True) -> None:
        self._name = name
        self._casts_back = casts_back
        self._around = around
        self._recorder = recorder
        self._lock = threading.RLock()
        self._depth = 0
        self._cast_back: Measurement | None = None  # outputs before and after, in turn
        self._is_told = False

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # In a backward on a thread of autograd's the lock may be held by a forward that waits for this backward, and
        # has the weights cast.
        is_locked = self._lock.acquire(blocking=not is_in_backward())
        is_inside = self._depth > 0
        self._depth += 1
        try:
            # Those of all modules in it, since it may use them without a call; but inside that is done.
            modules = [module] if is_inside else list(module.modules())
            return self._run(modules, forward, args, kwargs, is_inside)
        finally:
            self._depth -= 1
            if is_locked:
                self._lock.release()

    def _run(self, modules: list[nn.Module], forward: Callable[..., Any], args: Any, kwargs: Any, inside: bool) -> Any:
        copies = _Copies()
        weights = _Weights(modules, copies)
        first: list[torch.dtype] = []

        def cast(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                first.append(tensor.dtype)
            return copies.of(tensor)

        try:
            args, kwargs = _mapped(args, cast), _mapped(kwargs, cast)
            if not first:
                first = [tensor.dtype for tensor in weights.tensors()]
            with ExitStack() as stack:
                kinds = filter(torch.amp.is_autocast_available, copies.device_types)
                autocast = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
                for kind in autocast:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                output = forward(*args, **kwargs)
        finally:
            weights.put_back()
            copies.write_back()
        if inside:
            return output
        dtype = first[0] if first and self._casts_back and not autocast else None
        return self._cast_output(output, copies, dtype)

    def _cast_output(self, output: Any, copies: _Copies, dtype: torch.dtype | None) -> Any:
        """To this dtype, or None for none; what went through unchanged is itself again."""
        found: list[Tensor] = []
        met: dict[int, Tensor] = {}

        def cast(tensor: Tensor) -> Tensor:
            if id(tensor) not in met:
                original = copies.original(tensor, even_if_written=dtype is not None)
                if original is not None:
                    met[id(tensor)] = original
                elif dtype in NARROW and tensor.dtype is torch.float32:
                    met[id(tensor)] = tensor.to(dtype)
                    found.extend([tensor, met[id(tensor)]])
                else:
                    met[id(tensor)] = tensor
            return met[id(tensor)]

        output = _mapped(output, cast)
        self.tell(wait=False)
        if found and not self._is_told and self._cast_back is None and not is_capturing():
            self._cast_back = measure(self._recorder, found)
            self.tell(wait=False)
        return output

    def tell(self, wait: bool) -> None:
        """If values did not fit where they were cast back."""
        if self._cast_back is None or not (wait or self._cast_back.ready()):
            return
        measurement, self._cast_back = self._cast_back, None
        contents = [measurement.content(i) for i in range(measurement.count)]
        for before, after in zip(contents[::2], contents[1::2], strict=True):
            if not isinstance(before, TensorStats) or not isinstance(after, TensorStats) or self._is_told:
                continue
            count = after.nan_count + after.inf_count - before.nan_count - before.inf_count
            if count > 0:
                self._is_told = True
                warn_user(self._advice(count, before, after))

    def _advice(self, count: int, before: TensorStats, after: TensorStats) -> str:
        around = "" if self._around is None else f'run_in_float32(model, "{self._around}") for the module around it, '
        return (
            f"{self._name or 'the model'} runs in float32, and {count} of {before.numel} values of its output, up to "
            f"{before.finite_abs_max:.3g}, are beyond {limit_text(after.dtype)}, so that they are "
            f"inf where it is cast back. What to do: {around}bfloat16 for the model, or a clamp of its output"
        )

    def __getstate__(self) -> tuple[Any, ...]:
        return self._name, self._around, self._recorder.name, self._casts_back

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        name, around, recorder, casts_back = state
        made = make_recorder(recorder if recorder in ("native", "torch") else "auto")
        self.__init__(name, around, made, casts_back)  # type: ignore[misc]


class _Copies:
    """Of tensors in float32, each of which there is one."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, Tensor]] = {}  # by the original's id
        self._originals: dict[int, Tensor] = {}  # by the copy's id
        self._always_written: set[int] = set()
        self.device_types: set[str] = set()

    def of_buffer(self, tensor: Tensor) -> Tensor:
        """As `of`, where writes may not show: batch norm's into its running statistics change no version."""
        made = self.of(tensor)
        if made is not tensor and 0 not in tensor.stride():
            self._always_written.add(id(tensor))
        return made

    def of(self, tensor: Tensor) -> Tensor:
        """The tensor itself if it is not narrow."""
        self.device_types.add(tensor.device.type)
        if tensor.dtype not in NARROW or is_lazy(tensor):
            return tensor
        if id(tensor) not in self._of:
            if torch.is_inference_mode_enabled():  # where no write would show
                with torch.inference_mode(False), torch.no_grad():
                    made = tensor.float()
            else:
                made = tensor.float()
            self._of[id(tensor)] = tensor, made
            self._originals[id(made)] = tensor
        return self._of[id(tensor)][1]

    def write_back(self) -> None:
        """What was written into the copies."""
        for original, made in self._of.values():
            if made._version == 0 and id(original) not in self._always_written:
                continue
            if original.is_leaf and original.requires_grad:  # a weight, which only a forward without gradients writes
                with torch.no_grad():
                    original.copy_(made)
            else:
                original.copy_(made)

    def original(self, made: Tensor, even_if_written: bool) -> Tensor | None:
        return self._originals.get(id(made)) if even_if_written or made._version == 0 else None


class _Weights:
    """Copies in place of the narrow parameters, buffers and other tensors of modules, until `put_back()`.

    Put into the tables of the modules as they are: parameters in torch.func.functional_call's way, which leaves out
    attributes that are plain tensors, and the list that an LSTM has of its weights.
    """

    def __init__(self, modules: Iterable[nn.Module], copies: _Copies) -> None:
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        for module in modules:
            for table in (module._parameters, module._buffers, module.__dict__):
                for name, value in list(table.items()):
                    if isinstance(value, Tensor) or name == "_flat_weights":
                        is_buffer = table is module._buffers and module.training
                        made = _mapped(value, copies.of_buffer if is_buffer else copies.of)
                        if made is not value:
                            self._replaced.append((table, name, value, made))
                            table[name] = made

    def tensors(self) -> list[Tensor]:
        """The ones that were replaced."""
        return [value for _, _, value, _ in self._replaced if isinstance(value, Tensor)]

    def put_back(self) -> None:
        for table, name, value, made in self._replaced:
            now = table.get(name)
            if now is made:
                table[name] = value
            elif isinstance(now, Tensor) and not isinstance(now, nn.Parameter):  # one that the forward has put there
                table[name] = now.to(value.dtype)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with each tensor replaced; the very same one if none was."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [_mapped(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            made = copy.copy(value)
            made[:] = items
            return made
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        new = {key: _mapped(item, function) for key, item in value.items()}
        changed = {key: item for key, item in new.items() if item is not value[key]}
        if changed:
            value = copy.copy(value)
            for key, item in changed.items():
                value[key] = item
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        new = {name: _mapped(item, function) for name, item in fields.items()}
        changed = {name: item for name, item in new.items() if item is not fields[name]}
        if changed:
            value = copy.copy(value)
            for name, item in changed.items():
                object.__setattr__(value, name, item)
    return value


def _find(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    """Its name without wrappers, and it."""
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: must be the qualified name of a module, not {type(name).__name__}")
    names: dict[str, nn.Module] = dict(named_modules(model, remove_duplicate=False))
    with_wrappers = dict(model.named_modules(remove_duplicate=False))
    if name not in names and name in with_wrappers:
        return next((each, module) for each, module in named_modules(model) if module is with_wrappers[name])
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        ends = [each for each in names if each.endswith(f".{name}")][:3]
        hint = ", ".join(map(repr, dict.fromkeys([*ends, *near])))
        raise ValueError(f"name={name!r}: the model has no such module" + (f"; near: {hint}" if hint else ""))
    return name, names[name]


def _refuse_scripted(name: str, module: nn.Module) -> None:
    if any(isinstance(each, torch.jit.ScriptModule) for each in module.modules()):
        raise TypeError(f"{name or 'the model'} holds what TorchScript has compiled, whose dtypes are fixed")

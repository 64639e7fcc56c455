"""Checks of arguments: each returns the value, or raises TypeError or ValueError naming argument and value."""

import sys
from collections.abc import Collection
from operator import index
from typing import TypeVar

from torch import Tensor, nn

__all__ = [
    "check_batch_numbers",
    "check_count",
    "check_methods",
    "check_model",
    "check_module",
    "check_one_of",
    "check_optional_count",
    "check_optional_positive",
    "check_optional_share",
    "check_positive",
    "check_tensor",
]

_Name = TypeVar("_Name", bound=str)


def check_module(name: str, value: object) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, not {type(value).__name__}")
    return value


def check_model(value: object) -> nn.Module:
    model = check_module("model", value)
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel):
            raise TypeError(
                f"model{f'.{name}' if name else ''} is an nn.DataParallel, whose replicas come and go with every "
                "forward and cannot be watched: use nn.parallel.DistributedDataParallel"
            )
    return model


def check_count(name: str, value: object) -> int:
    """A whole number, 0 or more. True and 1.0 are none."""
    number = _whole(name, value)
    if not 0 <= number <= sys.maxsize:
        raise ValueError(f"{name}={value!r}: must be {'0 or more' if number < 0 else f'at most {sys.maxsize}'}")
    return number


def check_optional_count(name: str, value: object) -> int | None:
    return None if value is None else check_count(name, value)


def check_positive(name: str, value: object) -> int:
    number = check_count(name, value)
    if number == 0:
        raise ValueError(f"{name}={value!r}: must be 1 or more")
    return number


def check_optional_positive(name: str, value: object) -> int | None:
    return None if value is None else check_positive(name, value)


def check_optional_share(name: str, value: object) -> float | None:
    """Above 0 and at most 1."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r}: must be a number, not {type(value).__name__}")
    if not 0 < value <= 1:
        raise ValueError(f"{name}={value!r}: must be above 0 and at most 1")
    return float(value)


def check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be True or False, not {type(value).__name__}")
    return value


def check_optional_bool(name: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be True, False or None, not {type(value).__name__}")
    return value


def check_batch_numbers(name: str, value: object) -> Collection[int]:
    """The very collection that was given, so that what is put into it later counts."""
    if not isinstance(value, Collection) or isinstance(value, (str, bytes)):
        raise TypeError(f"{name}={value!r}: must be a list of batch numbers, not {type(value).__name__}")
    for number in value:
        check_count(f"{name}: batch number", number)
    return value


def check_methods(name: str, value: object, protocol: type) -> None:
    for method in vars(protocol):
        if not method.startswith("_") and not callable(getattr(value, method, None)):
            raise TypeError(f"{name}: {value!r} has no method {method}(), which {protocol.__name__} asks for")


def check_tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
    return value


def check_one_of(name: str, value: _Name, allowed: Collection[str]) -> _Name:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
    return value


def _whole(name: str, value: object) -> int:
    try:
        if not isinstance(value, bool):
            return index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise TypeError(f"{name}={value!r}: must be a whole number, not {type(value).__name__}")

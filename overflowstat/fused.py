"""Operations that do several things in one."""

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["parts_of"]


def parts_of(function: Any, given: Mapping[str, Any]) -> Callable[[], Any] | None:
    """What does the same by smaller operations, as torch tells; None if it does not.

    Args:
        function: an operation of torch's.
        given: its arguments by name, in their order.
    """
    from torch._decomp import decomposition_table  # which takes a second

    made_of: Callable[..., Any] | None = decomposition_table.get(function)
    if made_of is None:
        return None
    is_keyword = {argument.name: argument.kwarg_only for argument in function._schema.arguments}
    args = [value for name, value in given.items() if not is_keyword[name]]  # whose names may be others there
    kwargs = {name: value for name, value in given.items() if is_keyword[name]}
    return lambda: made_of(*args, **kwargs)

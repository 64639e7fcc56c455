"""The walk over what a hook is given: which tensors there are, and by which names. csrc/walk.h does the same."""

from collections.abc import Iterator

from torch import nn

__all__ = ["inputs", "outputs", "stand_in", "weights"]


def weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of each of a module's own, once. Not by parameters(), which models override."""
    met = set()
    for name, weight in module._parameters.items():
        if weight is not None and id(weight) not in met:
            met.add(id(weight))
            yield name, weight


def inputs(args: object) -> Iterator[tuple[str, object]]:
    """(label, value) of each positional input: `input[i]`."""
    return _walk(args, "input", depth=1)


def outputs(output: object) -> Iterator[tuple[str, object]]:
    """(label, value) of each output: `output`, `output[i]`, `output[i][j]`."""
    return _walk(output, "output", depth=2)


def stand_in(value: object) -> str:
    """What a line says in place of numbers for a value that is no tensor."""
    return "None" if value is None else "not a tensor"


def _walk(value: object, label: str, depth: int) -> Iterator[tuple[str, object]]:
    """Tuples are opened to this depth, as the reference does; all else is one value."""
    if depth > 0 and isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _walk(item, f"{label}[{i}]", depth - 1)
    else:
        yield label, value

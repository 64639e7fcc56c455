"""Calls in compiled code as the eager model has them: which of them are one frame, and in which order they come."""

import collections
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from keeps import Keeps
from torch import Tensor, nn
from torch.utils import _pytree

from overflowstat import Monitor, NonFiniteError, Policy
from overflowstat.compiled.row import ROWS
from overflowstat.errors import MonitorWarning
from overflowstat.recorder import RecorderName

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:", "ignore::DeprecationWarning"),
]

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def compiled(model: nn.Module) -> Callable[..., Any]:
    run: Callable[..., Any] = torch.compile(model, backend="aot_eager")
    return run


class Passes(nn.Module):
    """What it is given, times a number; of several the first as it is, the others times inf."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, *x: Tensor) -> Tensor | tuple[Tensor, ...]:
        if len(x) == 1:
            return x[0] * self.factor
        return x[0] * self.factor, *(each * torch.inf for each in x[1:])


class Calls(nn.Module):
    def __init__(self, calls: Callable[..., Tensor], factor: float = 1.0) -> None:
        super().__init__()
        self.part = Passes(factor)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        return self.calls(self.part, x)


def first_bad_then_fewer(part: nn.Module, x: Tensor) -> Tensor:
    part(x, x)
    result: Tensor = part(x)
    return result


def first_bad_then_no_elements(part: nn.Module, x: Tensor) -> Tensor:
    part(x * torch.inf)
    part(x[:0])
    return x


def first_of_another_dtype(part: nn.Module, x: Tensor) -> Tensor:
    part(x.double() * 1e300 * 1e300)
    result: Tensor = part(x)
    return result


@pytest.mark.parametrize(
    ("calls", "where"),
    [
        (first_bad_then_fewer, "output[1]: some of 4 are +inf; float32, shape [2, 2]"),
        (first_bad_then_no_elements, "input[0]: some of 4 are +inf; float32, shape [2, 2]"),
        (first_of_another_dtype, "input[0]: some of 4 are +inf; float64, shape [2, 2]"),
    ],
)
def test_a_bad_call_is_found_before_another_one_of_the_same_module(
    recorder_name: RecorderName, calls: Callable[..., Tensor], where: str
) -> None:
    model = Calls(calls)
    Monitor(model, recorder=recorder_name, sinks=[])
    with pytest.raises(NonFiniteError) as caught:
        compiled(model)(X)
    assert f"inf in batch 0, first in part (Passes), {where}\n" in str(caught.value)


def test_what_is_allowed_of_one_call_is_not_held_against_another(recorder_name: RecorderName) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x if mask is None else torch.where(mask < 0, 0.0, x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Masked()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(self.layer(x, torch.where(x > 3, -torch.inf, 0.0)))
            return result

    model, sink = Model(), Keeps()
    Monitor(model, recorder=recorder_name, policy=Policy(allow={"layer:input[1]": "-inf"}), sinks=[sink])
    compiled(model)(X)
    assert [[line.label for line in frame.lines] for frame in sink.frames] == [
        ["input[0]", "input[1]", "output"],
        ["input[0]", "output"],
        ["input[0]", "output"],
    ]


def test_where_there_are_more_kinds_of_calls_than_rows_none_that_is_bad_is_lost(recorder_name: RecorderName) -> None:
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1.0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: Tensor) -> Tensor:
            self.part(x * torch.inf)
            for dtype in (torch.float64, torch.float16, torch.bfloat16)[: ROWS - 1]:
                self.part(x.to(dtype))
            self.part(x[:0])  # has the row of the first one
            return x

    model, sink = Model(), Keeps()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    with pytest.raises(NonFiniteError, match=r"first in part \(Part\), input\[of another call\]: some of 1 are \+inf"):
        compiled(model)(X)


class Log(nn.Module):
    """In which a graph breaks."""

    def forward(self, x: Tensor) -> Tensor:
        print(end="")
        return x * 1.0


class InOrder(nn.Module):
    """Calls those of its parts that it is asked for, in this order."""

    def __init__(self, **factors: float) -> None:
        super().__init__()
        for name, factor in factors.items():
            self.add_module(name, Log() if name == "log" else Passes(factor))

    def forward(self, x: Tensor, names: tuple[str, ...]) -> Tensor:
        for name in names:
            x = self.get_submodule(name)(x)
        return x


BATCHES: dict[str, list[tuple[str, ...]]] = {
    "a part that a branch adds": [("a", "b"), ("a", "c", "b")],
    "the other way round": [("a", "b"), ("b", "a"), ("a", "b")],
    "a break between": [("a", "log", "b")],
    "a break between, the other way round": [("a", "log", "b"), ("b", "log", "a"), ("a", "log", "b")],
}


@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_the_order_is_that_of_each_batch(batches: list[tuple[str, ...]]) -> None:
    """Told by the clock that the extension's operations have."""
    model, sink = InOrder(b=1.0, c=1.0, a=1.0, log=1.0), Keeps()
    Monitor(model, recorder="native", sinks=[sink])
    run = compiled(model)
    for names in batches:
        run(X, names)
        assert sink.modules() == [*names, ""]


def test_a_part_that_has_come_in_place_of_another_is_where_that_was() -> None:
    model, sink = InOrder(a=1.0, b=1.0), Keeps()
    Monitor(model, recorder="native", sinks=[sink])
    run = compiled(model)
    run(X, ("a", "b"))
    model.a = nn.Sequential(Passes(), Passes())
    run(X, ("a", "b"))
    sink.take()
    run(X, ("a", "b"))
    assert sink.modules() == ["a.0", "a.1", "a", "b", ""]


@pytest.mark.parametrize("layers", [2, 3])
def test_layers_that_share_a_graph_come_one_after_the_other(recorder_name: RecorderName, layers: int) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Passes(), Passes()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(x))
            return result

    model, sink = nn.Sequential(*(Layer() for _ in range(layers))), Keeps()
    Monitor(model, recorder=recorder_name, sinks=[sink])
    for layer in model:
        layer.compile(backend="aot_eager")
    for _ in range(2):
        model(X)
        parts = [f"{i}{part}" for i in range(layers) for part in (".first", ".second", "")]
        assert sink.modules() == [*parts, ""]


def test_with_graph_breaks_the_bad_part_is_the_one_that_made_it() -> None:
    model = InOrder(a=torch.inf, log=1.0, b=1.0)
    Monitor(model, recorder="native", sinks=[], drill=False)
    with pytest.raises(NonFiniteError, match=r"first in a \(Passes\), output: .*\n +made here +its inputs are finite"):
        compiled(model)(X, ("a", "log", "b"))


def test_calls_that_are_one_frame_leave_open_what_made_what_between_them(recorder_name: RecorderName) -> None:
    model = InOrder(a=1.0, b=torch.inf)
    Monitor(model, recorder=recorder_name, sinks=[], drill=False)
    with pytest.raises(NonFiniteError) as caught:
        compiled(model)(X, ("a", "b") * 2)
    assert "or in a module between the 2 calls that are shown as one" in str(caught.value)


class MyCache:
    def __init__(self, x: Tensor) -> None:
        self.layers = [self]
        self.keys = self.values = x


class Rotated(MyCache):
    """Whose name does not say it."""


class Node:
    def __init__(self, x: Tensor) -> None:
        self.x = x


_pytree.register_pytree_node(Node, lambda node: ([node.x], None), lambda children, _: Node(*children))


class Subclass(Tensor):
    pass


class Gives(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> object:
        return self.wrap(x * torch.nan)


class Around(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.part = Gives(wrap)

    def forward(self, x: Tensor) -> Tensor:
        self.part(x)
        return x * 2


UNREAD: dict[str, Callable[[Tensor], object]] = {
    "Subclass": lambda x: x.as_subclass(Subclass),
    "NestedTensor": lambda x: torch.nested.nested_tensor_from_jagged(x.view(-1), torch.tensor([0, 1, 4])),
    "deque": lambda x: collections.deque([x]),
    "Node": Node,
}


@pytest.mark.parametrize("kind", UNREAD)
def test_what_is_not_read_in_a_graph_is_told_once(recorder_name: RecorderName, kind: str) -> None:
    model = Around(UNREAD[kind])
    Monitor(model, recorder=recorder_name, sinks=[])
    run = compiled(model)
    with pytest.warns(MonitorWarning, match=rf"part \(Gives\): .* does not read output, a {kind};"):
        run(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        run(X)
        torch.compiler.reset()
        run(X)


def test_a_cache_is_known_by_any_of_its_classes(recorder_name: RecorderName) -> None:
    model = Around(Rotated)
    Monitor(model, recorder=recorder_name, sinks=[])
    with pytest.raises(NonFiniteError, match=r"first in part \(Gives\), output.layers\[0\].keys: some of 4 are nan"):
        compiled(model)(X)

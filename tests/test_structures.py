"""Tensors inside of what a hook is given: keywords, lists, dicts, dataclasses, caches, a user's own structures."""

import itertools
import weakref
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree
from transformers import DynamicCache, LlamaConfig, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from overflowstat import DebugUnderflowOverflow, Monitor, NonFiniteError, TensorStats, capture
from overflowstat.recorder import RecorderName


class Takes(nn.Module):
    """Takes anything and gives something else."""

    def __init__(self, gives: Any = None) -> None:
        super().__init__()
        self.gives = gives

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.gives


def ones(value: float = 1.0) -> Tensor:
    return torch.full((2,), value)


def lines_of(monitor: Monitor | DebugUnderflowOverflow) -> list[tuple[str, float | str]]:
    """(label, abs_max or what stands there) of the last frame."""
    frame = (monitor if isinstance(monitor, Monitor) else monitor._monitor).frames[-1]
    return [
        (line.label, float(line.content.abs_max) if isinstance(line.content, TensorStats) else line.content)
        for line in frame.lines
    ]


def watched(recorder_name: RecorderName, gives: Any = None, **options: Any) -> tuple[Takes, Monitor]:
    model = Takes(gives)
    return model, Monitor(model, recorder=recorder_name, sinks=[], **options)


Point = namedtuple("Point", "x y")


class Typed(NamedTuple):
    first: Tensor
    rest: list[Tensor]


@dataclass
class Data:
    logits: Tensor
    note: str = "of a user"


class Pair:
    """Only torch.utils._pytree knows what is in it."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b


_pytree.register_pytree_node(Pair, lambda pair: ([pair.a, pair.b], None), lambda children, _: Pair(*children))


def cache() -> DynamicCache:
    filled = DynamicCache()
    filled.update(torch.ones(1, 1, 2, 2), torch.full((1, 1, 2, 2), 2.0), 0)
    return filled


STRUCTURES: list[tuple[Callable[[], Any], list[tuple[str, float]]]] = [
    (lambda: [ones(1), ones(2)], [("[0]", 1), ("[1]", 2)]),
    (lambda: (ones(1), (ones(2), [ones(3)])), [("[0]", 1), ("[1][0]", 2), ("[1][1][0]", 3)]),
    (lambda: {"a": ones(1), "b": {"c": ones(2)}}, [("[a]", 1), ("[b][c]", 2)]),
    (lambda: {3: ones(1)}, [("[3]", 1)]),
    (lambda: OrderedDict(z=ones(1), a=ones(2)), [("[z]", 1), ("[a]", 2)]),
    (lambda: UserDict(a=ones(1)), [("[a]", 1)]),
    (lambda: Point(ones(1), ones(2)), [(".x", 1), (".y", 2)]),
    (lambda: Typed(ones(1), [ones(2)]), [(".first", 1), (".rest[0]", 2)]),
    (lambda: Data(ones(1)), [(".logits", 1)]),
    (lambda: [Data(ones(1))], [("[0].logits", 1)]),
    (lambda: BaseModelOutputWithPast(last_hidden_state=ones(1)), [("[last_hidden_state]", 1)]),
    (cache, [(".layers[0].keys", 1), (".layers[0].values", 2)]),
    (lambda: Pair(ones(1), ones(2)), [("[0]", 1), ("[1]", 2)]),
    (lambda: [None, 3, "text", ones(4), True, 2.5, object(), set()], [("[3]", 4)]),
]


@pytest.mark.parametrize(("make", "expected"), STRUCTURES)
def test_what_is_inside_of_a_structure_is_seen_wherever_it_is(
    recorder_name: RecorderName, make: Callable[[], Any], expected: list[tuple[str, float]]
) -> None:
    def at(place: str) -> list[tuple[str, float]]:
        return [(place + suffix, value) for suffix, value in expected]

    model, monitor = watched(recorder_name, gives=make(), reuse_unchanged=False)
    model(make(), key=make())
    assert lines_of(monitor) == [*at("input[0]"), *at("input[key]"), *at("output")]


@pytest.mark.parametrize("value", [None, 3, "text", object(), [], {}, [1, 2], {"a": None}])
def test_values_without_a_tensor_are_a_line_unless_they_are_given_by_name(
    recorder_name: RecorderName, value: Any
) -> None:
    model, monitor = watched(recorder_name, gives=value)
    model(value, key=value)
    word = "None" if value is None else "not a tensor"
    assert lines_of(monitor) == [("input[0]", word), ("output", word)]


def test_a_bad_number_in_a_structure_is_found_and_named(recorder_name: RecorderName) -> None:
    model, _ = watched(recorder_name, gives={"states": [ones(), ones(float("nan"))]})
    with pytest.raises(NonFiniteError, match=r"output\[states\]\[1\]: 2 of 2 are nan"):
        model()
    model, _ = watched(recorder_name)
    with pytest.raises(NonFiniteError, match=r"input\[hidden_states\]: 2 of 2 are \+inf"):
        model(hidden_states=ones(float("inf")))


def test_what_is_deeper_or_more_than_is_looked_at_is_a_line(recorder_name: RecorderName) -> None:
    deep: Any = ones()
    for _ in range(capture.MAX_DEPTH):
        deep = [deep]
    model, monitor = watched(recorder_name, gives=[deep])
    model(deep)
    assert lines_of(monitor) == [
        ("input[0]" + "[0]" * capture.MAX_DEPTH, 1),
        ("output" + "[0]" * capture.MAX_DEPTH, "too deep"),
    ]
    one = ones()
    model, monitor = watched(recorder_name, gives=[one] * (capture.MAX_VALUES + 5))
    model([one] * (capture.MAX_VALUES - 1), [one])
    lines = lines_of(monitor)
    assert [label for label, content in lines if content == "too many"] == [f"output[{capture.MAX_VALUES - 1}]"]
    assert len(lines) == (capture.MAX_VALUES - 1) + 1 + capture.MAX_VALUES


def test_structures_that_contain_themselves_come_to_an_end(recorder_name: RecorderName) -> None:
    wide: list[Any] = []
    wide += [wide] * 20
    model, monitor = watched(recorder_name, gives={"a": wide})
    model(wide)
    contents = {content for _, content in lines_of(monitor)}
    assert "too many" in contents and len(lines_of(monitor)) <= 2 * capture.MAX_VALUES


class Raises(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise RuntimeError("not to be looked at")


@dataclass
class Refuses:
    x: int = 1

    def __getattribute__(self, name: str) -> Any:
        if name == "x":
            raise RuntimeError("not to be looked at")
        return super().__getattribute__(name)


class Endless(tuple):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("not to be looked at")


@pytest.mark.parametrize("structure", [Raises(a=ones()), object.__new__(Refuses), Endless((ones(),))])
def test_a_structure_that_raises_when_it_is_looked_at_does_not_reach_the_model(
    recorder_name: RecorderName, structure: Any
) -> None:
    model, monitor = watched(recorder_name, gives=structure)
    model(structure)
    assert lines_of(monitor) == [("input[0]", "not a tensor"), ("output", "not a tensor")]


def test_names_that_are_made_anew_in_each_call_do_not_pile_up(recorder_name: RecorderName) -> None:
    model, monitor = watched(recorder_name)
    for number in range(3000):
        model({f"request-{number}": ones()})
    label, value = lines_of(monitor)[0]
    assert value == 1 and (label == "input[0][...]" if recorder_name == "native" else "request" in label)


def test_the_drop_in_sees_what_the_original_sees_unless_it_is_told_to_see_more(recorder_name: RecorderName) -> None:
    for nested, expected in ((False, [("output", "not a tensor")]), (True, [("input[key]", 1), ("output[0]", 2)])):
        model = Takes(gives=[ones(2)])
        debugger = DebugUnderflowOverflow(model, recorder=recorder_name, nested=nested)
        model(key=ones())
        assert lines_of(debugger) == expected


def test_every_tensor_that_passes_through_a_real_model_is_seen(recorder_name: RecorderName) -> None:
    model = LlamaModel(
        LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2,
        )
    )  # fmt: skip
    monitor = Monitor(model, recorder=recorder_name, max_frames_to_save=None)
    with torch.no_grad():
        model(input_ids=torch.arange(6).unsqueeze(0), attention_mask=torch.ones(1, 6, dtype=torch.long), use_cache=True)
    # What the cache is called has changed from one version of transformers to another.
    shown = {
        (frame.module, line.label.replace("[past_key_values]", "[cache]"))
        for frame in monitor.frames
        for line in frame.lines
    }
    assert {
        ("", "input[input_ids]"),
        ("", "input[attention_mask]"),
        ("", "output[last_hidden_state]"),
        ("", "output[cache].layers[1].keys"),
        ("layers.0.self_attn", "input[hidden_states]"),
        ("layers.0.self_attn", "input[position_embeddings][1]"),
        ("layers.1.self_attn", "input[cache].layers[0].values"),
    } <= shown


class Raising:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("not to be asked")


class Pretends:
    __class__ = torch.Tensor  # type: ignore[assignment]


def proxy_of_nothing() -> Any:
    class Short:
        pass

    return weakref.proxy(Short())


@pytest.mark.parametrize(
    "make",
    [Raising, Pretends, proxy_of_nothing, lambda: MagicMock(spec=torch.Tensor), MagicMock],
    ids=["raises", "pretends", "a dead proxy", "a mock of a tensor", "a mock"],
)
def test_what_an_object_says_of_its_class_is_not_believed(recorder_name: RecorderName, make: Any) -> None:
    value = make()
    model, monitor = watched(recorder_name, gives=[value])
    model(value, [value], named=value)
    assert lines_of(monitor) == [
        ("input[0]", "not a tensor"),
        ("input[1]", "not a tensor"),
        ("output", "not a tensor"),
    ]


class Unnamed:
    def __str__(self) -> str:
        raise RuntimeError("not to be shown")


@pytest.mark.parametrize(
    ("key", "shown"),
    [("\ud800", "\\ud800"), (1.5, "1.5"), ((1, 2), "(1, 2)"), (Unnamed(), "<Unnamed>"), ("a\u20ac", "a\u20ac")],
    ids=["half a character", "a number", "a pair", "without a text", "beyond ASCII"],
)
def test_a_key_without_a_text_that_can_be_printed_hides_no_tensor(
    recorder_name: RecorderName, key: Any, shown: str
) -> None:
    model, monitor = watched(recorder_name, gives={key: ones()})
    model(**({key: ones()} if isinstance(key, str) else {}))
    labels = [label for label, _ in lines_of(monitor)]
    assert labels == [*([f"input[{shown}]"] if isinstance(key, str) else []), f"output[{shown}]"]
    for label in labels:
        label.encode()


class MadeWhenAsked(Mapping[int, torch.Tensor]):
    """As a mapping over a file."""

    def __init__(self) -> None:
        self.made = 0

    def __getitem__(self, key: int) -> torch.Tensor:
        self.made += 1
        return ones()

    def __iter__(self) -> Iterator[int]:
        return itertools.count()

    def __len__(self) -> int:
        return 1 << 40


def test_no_more_of_a_mapping_is_asked_for_than_is_shown(recorder_name: RecorderName) -> None:
    mapping = MadeWhenAsked()
    model, monitor = watched(recorder_name)
    model(mapping)
    assert mapping.made == capture.MAX_VALUES
    contents = [content for label, content in lines_of(monitor) if label.startswith("input")]
    assert contents[-1] == "too many" and len(contents) == capture.MAX_VALUES

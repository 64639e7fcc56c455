"""Arguments that make no sense are refused by name and value before anything on the model is changed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.debug_utils
from parity import Reference
from torch import nn

from overflowstat import DebugUnderflowOverflow, detect_overflow, tensor_stats
from overflowstat.debug_utils import DebugOption, get_abs_min_max
from overflowstat.recorder import RecorderName

reference_module: Any = transformers.debug_utils


def assert_untouched(model: nn.Module, attributes: list[dict[str, Any]]) -> None:
    assert [dict(vars(module)) for module in model.modules()] == attributes
    for module in model.modules():
        assert not any(vars(module)[name] for name in vars(module) if name.endswith("_hooks"))


@pytest.mark.parametrize(
    "model",
    [None, 3, "model", torch.ones(2), nn.Linear, [nn.Linear(2, 2)], lambda x: x],
    ids=lambda m: type(m).__name__,
)
def test_a_model_that_is_no_module(recorder_name: RecorderName, model: Any) -> None:
    with pytest.raises(TypeError, match=rf"\bmodel\b.*\b{type(model).__name__}\b"):
        DebugUnderflowOverflow(model, recorder=recorder_name)


BAD_FRAMES = [-1, -21, 2.0, 0.5, "21", [21], True, False, float("nan"), torch.tensor(3.5)]
BAD_TRACES = ["1", "1,3", b"1", [-1], [1, -3], [1.0], ["1"], [None], [True], [[1]], (0, 2.5), 3, 1.5, True]
BAD_ABORTS = [-1, 2.0, "3", [3], True, False, float("inf")]


@pytest.mark.parametrize(
    ("argument", "value"),
    [("max_frames_to_save", value) for value in BAD_FRAMES]
    + [("trace_batch_nums", value) for value in BAD_TRACES]
    + [("abort_after_batch_num", value) for value in BAD_ABORTS],
    ids=lambda value: value if isinstance(value, str) and "_" in value else repr(value),
)
def test_an_argument_out_of_its_range_is_named_with_its_value(
    recorder_name: RecorderName, argument: str, value: Any
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    attributes = [{k: v.copy() if isinstance(v, dict) else v for k, v in vars(m).items()} for m in model.modules()]
    with pytest.raises((TypeError, ValueError)) as raised:
        DebugUnderflowOverflow(model, recorder=recorder_name, **{argument: value})
    culprit = value
    if argument == "trace_batch_nums" and isinstance(value, (list, tuple)):
        culprit = next(number for number in value if type(number) is not int or number < 0)
    assert argument in str(raised.value)
    assert repr(culprit) in str(raised.value)
    assert_untouched(model, attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DebugUnderflowOverflow(model, recorder=recorder_name)


def test_a_string_of_batch_numbers_is_a_type_error(recorder_name: RecorderName) -> None:
    with pytest.raises(TypeError, match="trace_batch_nums"):
        DebugUnderflowOverflow(nn.Linear(2, 2), trace_batch_nums="13", recorder=recorder_name)  # type: ignore[arg-type]


@pytest.mark.parametrize("frames", [0, None, 1, 21, 10**6])
@pytest.mark.parametrize("trace", [None, [], (), [0], [3, 1], range(4), {1}])
@pytest.mark.parametrize("abort", [None, 0, 7])
def test_every_argument_that_makes_sense_is_taken_and_kept(frames: Any, trace: Any, abort: Any) -> None:
    ours = DebugUnderflowOverflow(nn.Linear(2, 2), frames, trace, abort)
    reference = Reference(nn.Linear(2, 2), frames, trace, abort)
    assert ours.trace_batch_nums == reference.trace_batch_nums
    assert ours.abort_after_batch_num == reference.abort_after_batch_num
    assert list(ours.frames) == list(reference.frames) == []
    assert (ours.batch_number, ours.total_calls, ours.detected_overflow) == (0, 0, False)
    assert list(ours.module_names.values()) == [""]


@pytest.mark.parametrize("name", ["cuda", "", None, 1])
def test_a_recorder_that_does_not_exist(name: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises((TypeError, ValueError), match="recorder") as raised:
        DebugUnderflowOverflow(model, recorder=name)
    assert repr(name) in str(raised.value)
    assert not model._forward_hooks


def test_the_recorder_is_keyword_only() -> None:
    with pytest.raises(TypeError):
        DebugUnderflowOverflow(nn.Linear(2, 2), 21, None, None, "torch")  # type: ignore[call-arg]


NO_TENSORS = [None, 1.5, "tensor", {"a": torch.ones(1)}, torch.float32]


@pytest.mark.parametrize("value", NO_TENSORS, ids=repr)
def test_statistics_of_something_that_is_no_tensor(value: Any) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        tensor_stats(value)
    with pytest.raises(TypeError, match=type(value).__name__):
        tensor_stats([torch.ones(2), value])
    with pytest.raises(TypeError, match=type(value).__name__):
        detect_overflow(value, "context")
    with pytest.raises(TypeError, match=type(value).__name__):
        get_abs_min_max(value, "context")


# the functions beside the class, against the reference's


def with_large_elements_counted() -> Callable[[torch.Tensor, str], bool]:
    """The reference's `detect_overflow` with the block switched on that its source holds switched off."""
    from inspect import getsource

    source, switched = re.subn(r"if 0:(?=  # and detected)", "if 1:", getsource(reference_module.detect_overflow))
    assert switched == 1
    namespace: dict[str, Any] = {"torch": torch}
    exec(source, namespace)
    function: Callable[[torch.Tensor, str], bool] = namespace["detect_overflow"]
    return function


TENSORS = {
    "small": torch.tensor([0.5, -99.9]),
    "hundred": torch.tensor([100.0, -100.0, 99.0]),
    "thousands": torch.tensor([[1000.0, -5000.0], [20.0, 999.0]]),
    "all three": torch.tensor([-1e4, 2e5, 300.0, 1.0, 0.0]),
    "nan": torch.tensor([float("nan"), 200.0]),
    "inf": torch.tensor([float("-inf"), 1.0]),
    "nan and inf": torch.tensor([float("nan"), float("inf"), 1500.0]),
    "float16": torch.tensor([65504.0, float("inf"), 3.0], dtype=torch.float16),
    "bfloat16": torch.tensor([1e38, 128.0, 3.0], dtype=torch.bfloat16),
    "float64": torch.tensor([1e300, float("nan")], dtype=torch.float64),
    "int64": torch.tensor([100, -1000, 10**12, 7]),
    "uint8": torch.tensor([100, 99, 255], dtype=torch.uint8),
    "int16": torch.tensor([100, -1000, 30000, 7], dtype=torch.int16),
    "complex": torch.tensor([60 + 80j, 3 + 4j, complex(float("nan"), 0)]),
    "scalar": torch.tensor(-12345.0),
    "strided": torch.arange(30000.0).reshape(100, 300)[:, ::7],
    "grad": torch.tensor([150.0, 2.0], requires_grad=True),
    "large": torch.linspace(-20000, 20000, 100_001),
}


@pytest.mark.parametrize("name", TENSORS)
def test_detect_overflow_says_what_the_reference_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    x = TENSORS[name]
    expected = reference_module.detect_overflow(x, "hidden_states")
    printed = capsys.readouterr().out
    assert detect_overflow(x, "hidden_states") is expected
    assert capsys.readouterr().out == printed


# torch compares a uint8 with 1000 as if it were 1000 % 256, so the reference's counts are wrong there.
COUNTABLE = [name for name in TENSORS if name != "uint8"]


@pytest.mark.parametrize("name", COUNTABLE)
def test_counts_of_large_elements_are_those_of_the_switched_off_block(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    x = TENSORS[name]
    expected = with_large_elements_counted()(x, "hidden_states")
    printed = capsys.readouterr().out
    assert detect_overflow(x, "hidden_states", thresholds=(100, 1000, 10000)) is expected
    assert capsys.readouterr().out == printed


def test_counts_of_integers_too_narrow_for_the_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    detect_overflow(TENSORS["uint8"], "x", thresholds=(100, 1000, 10000))
    assert capsys.readouterr().out == "x:  n100=2\n"


def test_counts_at_thresholds_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    detect_overflow(torch.tensor([1.0, -7.0, 60.0, 70.0]), "x", thresholds=(5, 60))
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["x:", "n5=3"], ["x:", "n60=2"]]


@pytest.mark.parametrize("name", TENSORS)
def test_get_abs_min_max_says_what_the_reference_says(name: str) -> None:
    assert get_abs_min_max(TENSORS[name], "weight") == reference_module.get_abs_min_max(TENSORS[name], "weight")


def test_debug_option_is_the_references() -> None:
    theirs = reference_module.DebugOption
    assert {option.name: option.value for option in DebugOption} == {option.name: option.value for option in theirs}
    for option in DebugOption:
        assert option == theirs[option.name] == option.value
        assert option in [theirs[option.name]] and DebugOption(option.value) is option
    with pytest.raises(ValueError, match="overflow_underflow"):
        DebugOption("overflow_underflow")

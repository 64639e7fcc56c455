"""Who is told to have made bad numbers, where a policy lets some of them be."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError, Policy
from overflowstat.recorder import RecorderName
from overflowstat.verdict import Verdict

INF, NAN = float("inf"), float("nan")


class Does(nn.Module):
    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x)


def verdict_of(model: nn.Module, x: Tensor, allow: Mapping[Any, Any], recorder: RecorderName) -> Verdict:
    monitor = Monitor(model, recorder=recorder, sinks=[], policy=Policy(allow=allow))
    with pytest.raises(NonFiniteError) as raised:
        model(x)
    monitor.disable()
    assert raised.value.verdict is not None
    return raised.value.verdict


@pytest.mark.parametrize("number", [INF, -INF, NAN])
@pytest.mark.parametrize("does", [lambda x: x * 1, lambda x: -x, lambda x: x[:, :1]], ids=["same", "negated", "part"])
def test_what_is_allowed_to_come_and_only_given_on_was_not_made_here(
    recorder_name: RecorderName, number: float, does: Callable[[Tensor], Tensor]
) -> None:
    model = nn.Sequential(Does(does))
    verdict = verdict_of(model, torch.tensor([[number, 1.0]]), {":input*": ["inf", "-inf", "nan"]}, recorder_name)
    assert (verdict.module, verdict.label, verdict.produced) == ("0", "output", False)
    assert (verdict.kind, verdict.operation) == ("bad-input", None)
    assert "it came as input[0], where it is allowed" in verdict.text and "made" not in verdict.text


def test_what_is_made_of_an_infinity_that_may_come_is_made_here(recorder_name: RecorderName) -> None:
    model = nn.Sequential(Does(lambda x: x.softmax(-1)))
    verdict = verdict_of(model, torch.full((1, 2), -INF), {":input*": "-inf"}, recorder_name)
    assert (verdict.produced, verdict.operation, verdict.kind) == (True, "aten._softmax", "masked-row")
    assert "its inputs are finite, but for what is allowed in input[0]" in verdict.text
    assert "self 2 -inf (float32)" in verdict.text


@pytest.mark.parametrize("number", [INF, -INF, NAN])
def test_a_module_that_may_give_it_has_given_it(recorder_name: RecorderName, number: float) -> None:
    model = nn.Sequential(Does(lambda x: x + 1), Does(lambda x: torch.full_like(x, number)), nn.Identity())
    verdict = verdict_of(model, torch.zeros(3), {"1": ["inf", "-inf", "nan"]}, recorder_name)
    assert (verdict.module, verdict.label, verdict.produced) == ("1", "input[0]", False)
    assert verdict.operation is None and "1 (Does) gave it, where it is allowed" in verdict.text


def test_a_module_that_has_given_the_same_in_another_batch_has_not_given_it(recorder_name: RecorderName) -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gives, self.takes = Does(lambda x: x / 0), nn.Identity()
            self.asks = True

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.gives(x) if self.asks else self.takes(x * 1e39)
            return y.new_zeros(())

    model = Switch()
    monitor = Monitor(model, recorder=recorder_name, sinks=[], policy=Policy(allow={"gives": "inf"}))
    model(torch.ones(2))
    model.asks = False
    with pytest.raises(NonFiniteError) as raised:
        model(torch.ones(2))
    monitor.disable()
    verdict = raised.value.verdict
    assert verdict is not None and (verdict.module, verdict.operation, verdict.produced) == ("", "aten.mul", True)


def test_a_constant_is_told_with_its_line(recorder_name: RecorderName) -> None:
    for does, operation in (
        (lambda x: x + NAN, "aten.add"),
        (lambda x: x.masked_fill(x > 0, NAN), "aten.masked_fill"),
        (lambda x: torch.where(x > 0, NAN, x), "aten.scalar_tensor"),
        (lambda x: torch.full_like(x, NAN), "aten.full_like"),
    ):
        verdict = verdict_of(nn.Sequential(Does(does)), torch.ones(2), {}, recorder_name)
        assert (verdict.module, verdict.operation, verdict.kind) == ("0", operation, "unknown")
        assert verdict.source == f"test_origin.py:{does.__code__.co_firstlineno}"
        assert "the constant nan is written there as it stands" in verdict.text
        assert verdict.advice == """if it is meant: policy=Policy(allow={"0:output": "nan"})"""
        allowed = Policy(allow={"0:output": "nan", ":output": "nan"})
        with Monitor(nn.Sequential(Does(does)), recorder=recorder_name, sinks=[], policy=allowed) as monitor:
            monitor.model(torch.ones(2))


def test_a_tensor_that_no_line_shows_is_told_as_one(recorder_name: RecorderName) -> None:
    hidden = torch.tensor([NAN, 1.0])
    verdict = verdict_of(nn.Sequential(Does(lambda x: x + hidden)), torch.zeros(2), {}, recorder_name)
    assert (verdict.module, verdict.operation, verdict.kind) == ("0", "aten.add", "unknown")
    assert "other, which no line shows: up to 1 and 1 nan (float32)" in verdict.text

"""Where a verdict is found, in which form, and when a forward is run again for it."""

import json
import pickle
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overflowstat import DebugUnderflowOverflow, Monitor, NonFiniteError
from overflowstat.recorder import RecorderName
from overflowstat.report import Report
from overflowstat.verdict import Verdict


class Divides(nn.Module):
    """And counts how often it did."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        self.calls += 1
        return x / by


LINE = f"test_verdict_forms.py:{Divides.forward.__code__.co_firstlineno + 2}"
X, ZERO = torch.ones(2), torch.zeros(2)


def error_of(model: nn.Module, *args: Any, **options: Any) -> NonFiniteError:
    with pytest.raises(NonFiniteError) as raised, Monitor(model, **options):
        model(*args)
    return raised.value


def test_the_exception_has_it_as_data_and_as_text(recorder_name: RecorderName) -> None:
    error = error_of(Divides(), X, ZERO, recorder=recorder_name, sinks=[])
    verdict = error.verdict
    assert verdict is not None
    assert (verdict.batch_number, verdict.module, verdict.class_name) == (0, "", "Divides")
    assert (verdict.label, verdict.produced, verdict.kind) == ("output", True, "division-by-zero")
    assert (verdict.operation, verdict.source) == ("aten.div", LINE)
    assert [operand.name for operand in verdict.operands] == ["self", "other", "result"]
    assert str(error).endswith(verdict.text) and f"aten.div, {LINE}: return x / by" in verdict.text
    assert repr(pickle.loads(pickle.dumps(error)).verdict) == repr(verdict)  # with NaN in it, that is not itself


def test_as_json_its_numbers_are_numbers_and_infinities_are_texts(recorder_name: RecorderName) -> None:
    verdict = error_of(Divides(), X, ZERO, recorder=recorder_name, sinks=[]).verdict
    assert verdict is not None
    found = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert (found["module"], found["produced"], found["kind"]) == ("", True, "division-by-zero")
    by, result = found["operands"][1:]
    assert by["content"]["abs_max"] == 0.0 and by["content"]["dtype"] == "float32" and by["content"]["shape"] == [2]
    assert result["content"]["abs_max"] == "inf" and result["content"]["posinf_count"] == 2


def test_a_report_ends_with_it(recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = error_of(Divides(), X, ZERO, recorder=recorder_name).verdict
    assert verdict is not None
    assert capsys.readouterr().out.rstrip().endswith(verdict.text)


def test_whoever_is_called_with_a_report_has_it(recorder_name: RecorderName) -> None:
    found: list[Report] = []
    model = Divides()
    with Monitor(model, recorder=recorder_name, on_detect=found.append, sinks=[]):
        assert bool(model(X, ZERO).isinf().all())
    assert isinstance(found[0].verdict, Verdict) and found[0].verdict.operation == "aten.div"


def test_what_is_only_counted_is_not_run_again(recorder_name: RecorderName) -> None:
    model = Divides()
    with Monitor(model, recorder=recorder_name, on_detect=lambda report: None, sinks=[]) as monitor:
        for _ in range(5):
            model(X, ZERO)
        assert monitor.detections[0].batches == 5 and model.calls == 5 + 1


def test_the_drop_in_prints_the_originals_text_unless_it_is_asked_for_a_verdict(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, errors = [], []
    for asks in (False, True):
        model = Divides()
        with (
            pytest.raises(NonFiniteError) as raised,
            DebugUnderflowOverflow(model, recorder=recorder_name, verdict=asks),
        ):
            model(X, ZERO)
        printed.append(capsys.readouterr().out)
        errors.append(raised.value)
        assert model.calls == len(printed)  # once, and once more
    assert errors[0].verdict is None and errors[1].verdict is not None
    assert str(errors[0]) == str(errors[1])
    assert printed[1] == f"{printed[0].rstrip()}\n\n{errors[1].verdict.text}\n\n\n\n"


def test_without_a_verdict_nothing_is_run_again(recorder_name: RecorderName) -> None:
    model = Divides()
    error = error_of(model, X, ZERO, recorder=recorder_name, sinks=[], verdict=False)
    assert error.verdict is None and model.calls == 1


@pytest.mark.parametrize(
    ("drill", "processes", "calls"), [(None, 1, 2), (False, 1, 1), (None, 2, 1), (True, 2, 2), (False, 2, 1)]
)
def test_a_forward_is_run_again_where_that_was_asked_for_or_one_process_runs(
    recorder_name: RecorderName, drill: bool | None, processes: int, calls: int
) -> None:
    model = Divides()
    with (
        patch.object(dist, "is_initialized", lambda: processes > 1),
        patch.object(dist, "get_world_size", lambda: processes),
        patch.object(dist, "get_rank", lambda: 0),
    ):
        verdict = error_of(model, X, ZERO, recorder=recorder_name, sinks=[], drill=drill).verdict
    assert verdict is not None and model.calls == calls
    assert verdict.produced and (verdict.operation, verdict.source) == (
        ("aten.div", LINE) if calls == 2 else (None, None)
    )
    assert ("not known" in verdict.text) == (calls == 1)


def test_what_a_checkpoint_recomputes_is_not_run_again(recorder_name: RecorderName) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.divides = Divides()

        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.divides, x, by, use_reentrant=True)
            return y

    model, by = Outer(), torch.ones(2, requires_grad=True)
    with Monitor(model, recorder=recorder_name, sinks=[]):
        output = model(X, by).sum()
        by.data.zero_()  # unseen, so that autograd does not complain
        with pytest.raises(NonFiniteError) as raised:
            output.backward()
    verdict = raised.value.verdict
    assert verdict is not None and model.divides.calls == 2
    assert (verdict.module, verdict.produced, verdict.operation) == ("divides", True, None)


def test_a_weight_tells_since_when(recorder_name: RecorderName) -> None:
    linear = nn.Linear(2, 2)
    model = nn.Sequential(linear)
    monitor = Monitor(model, recorder=recorder_name, sinks=[])
    for _ in range(3):
        model(X)
    with torch.no_grad():
        linear.weight[1, 0] = float("nan")
    with pytest.raises(NonFiniteError) as raised:
        model(X)
    verdict = raised.value.verdict
    assert verdict is not None and monitor.batch_number == 4
    assert (verdict.module, verdict.label, verdict.produced, verdict.kind) == ("0", "weight", False, "bad-weight")
    assert "it was finite in batch 2" in verdict.text
    monitor.remove()
    verdict = error_of(model, X, recorder=recorder_name, sinks=[]).verdict
    assert verdict is not None and "it was so when it was first read" in verdict.text


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, which: str) -> Tensor:
        y: Tensor = self.get_submodule(which)(x)
        return y


def test_a_weight_that_no_batch_has_used_is_not_said_to_have_been_finite(recorder_name: RecorderName) -> None:
    model = OneOfTwo()
    with torch.no_grad():
        model.second.weight[0, 0] = float("nan")
    with Monitor(model, recorder=recorder_name, sinks=[]) as monitor:
        for _ in range(3):
            model(X, "first")
        with pytest.raises(NonFiniteError) as raised:
            model(X, "second")
        assert monitor.batch_number == 4
    verdict = raised.value.verdict
    assert verdict is not None and "was finite" not in verdict.text
    assert "in batch 2 no weight of a module that was called was bad" in verdict.text


def test_a_weight_that_goes_bad_in_a_batch_is_told_as_that(recorder_name: RecorderName) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            with torch.no_grad():
                self.inner.weight[0, 0] = float("inf")
            y: Tensor = self.inner(x)
            return y

    verdict = error_of(Twice(), X, recorder=recorder_name, sinks=[]).verdict
    assert verdict is not None and (verdict.module, verdict.kind) == ("inner", "bad-weight")
    assert "it was finite earlier in this batch" in verdict.text


def test_an_overflow_is_told_with_where_the_growth_to_it_began(recorder_name: RecorderName) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(6))).half()
    for layer, weight in zip(model, (1.0, 0.5, 8.0, 16.0, 32.0, 64.0), strict=True):
        nn.init.constant_(layer.weight, weight)  # type: ignore[arg-type]
    verdict = error_of(model, torch.ones(1).half(), recorder=recorder_name, sinks=[]).verdict
    assert verdict is not None and (verdict.module, verdict.kind) == ("5", "accumulation-overflow")
    # 1, 0.5, 4, 64, 2048, and then 131072.
    assert "growth      5.00e-01 -> 4.00e+00 -> 6.40e+01 -> 2.05e+03 over the last 4 frames, from 1" in verdict.text
    divides = error_of(Divides(), X, ZERO, recorder=recorder_name, sinks=[]).verdict
    assert divides is not None and "growth" not in divides.text


def test_the_growth_of_layers_has_a_factor(recorder_name: RecorderName) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(2, elementwise_affine=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = 4 * x + self.norm(x)
            return y

    model = nn.Sequential(*(Layer() for _ in range(12))).half()
    verdict = error_of(model, torch.tensor([[16.0, -16.0]]).half(), recorder=recorder_name, sinks=[]).verdict
    assert verdict is not None and (verdict.module, verdict.operation) == ("5", "aten.mul")
    # 16 becomes 65, 261, 1045, 4181 and 16725; 4 times that is beyond 65504.
    assert "over 5 layers, 4 times each, from 0" in verdict.text


def test_what_the_originals_call_was_given_is_told_apart_from_what_it_made(recorder_name: RecorderName) -> None:
    """Of a NaN that is given, and another one that is made, the line which is bad tells nothing."""

    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.divides = True

        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            y: Tensor = self.inner(x / x.sum() if self.divides else x + unused)
            return y

    model = Mixes()
    given = torch.full((2,), float("nan"))
    for divides, drill, kind in (
        (True, None, "division-by-zero"),
        (False, None, "bad-input"),
        (True, False, "unknown"),
        (False, False, "unknown"),
    ):
        model.divides = divides
        verdict = error_of(model, ZERO, given, recorder=recorder_name, sinks=[], drill=drill).verdict
        assert verdict is not None and verdict.kind == kind and verdict.produced == (kind == "division-by-zero")
        assert ("was given such numbers as input[1], too" in verdict.text) == (drill is False)

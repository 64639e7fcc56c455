"""A warning where numbers come near the limit of their dtype."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from warned import warned

from overflowstat import Monitor, NonFiniteError, Policy
from overflowstat.recorder import RecorderName

HALF = torch.float16


class Scale(nn.Module):
    """Gives what it is given, times a factor of its own."""

    factor = 1.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x * self.factor


def test_it_warns_once_for_a_place_and_says_how_near(recorder_name: RecorderName) -> None:
    doubles = Scale()
    doubles.factor = 2.0
    model = nn.Sequential(Scale(), doubles)
    batches = [torch.full((2,), value, dtype=HALF) for value in (100.0, 16376.0, 16376.0)]
    # 16376 is a quarter of 65504.
    assert warned(model, *batches, warn_at=0.5, recorder=recorder_name) == [
        "1 (Scale), output: 3.28e+04 is 50 % of the limit of float16, in batch 1",
        "the model itself (Sequential), output: 3.28e+04 is 50 % of the limit of float16, in batch 1",
    ]


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        (torch.float16, 65504.0),
        (torch.bfloat16, (2 - 2**-7) * 2.0**127),
        (torch.float32, (2 - 2**-23) * 2.0**127),
        (torch.float64, (2 - 2**-52) * 2.0**1023),
        (torch.complex64, (2 - 2**-23) * 2.0**127),
    ],
    ids=str,
)
def test_the_share_is_reached_or_not(dtype: torch.dtype, limit: float, recorder_name: RecorderName) -> None:
    model = nn.Identity()
    for value, count in ((limit / 2, 2), (limit / 4, 0)):
        x = torch.full((3,), -value, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
        assert len(warned(model, x, warn_at=0.5, recorder=recorder_name)) == count, value


@pytest.mark.parametrize("x", [torch.tensor([2**31 - 1], dtype=torch.int32), torch.tensor([True])], ids=["int", "bool"])
def test_whole_numbers_are_exempt(x: Tensor, recorder_name: RecorderName) -> None:
    assert warned(nn.Identity(), x, warn_at=0.01, recorder=recorder_name) == []


def test_lines_that_a_policy_hides_or_allows_something_are_exempt(recorder_name: RecorderName) -> None:
    x = torch.full((2,), 60000.0, dtype=HALF)
    policy = Policy(exclude=[":input[0]"], allow={":output": "inf"})
    assert warned(nn.Identity(), x, warn_at=0.5, policy=policy, recorder=recorder_name) == []


class OfPython(Tensor):
    """Which the extension leaves to Python."""


def test_a_tensor_of_another_class_is_warned_of_once_too(recorder_name: RecorderName) -> None:
    x = torch.full((2,), 65504.0, dtype=HALF).as_subclass(OfPython)
    assert len(warned(nn.Identity(), x, x, warn_at=0.5, recorder=recorder_name)) == 2


def test_without_it_nothing_is_said(recorder_name: RecorderName) -> None:
    assert warned(nn.Identity(), torch.full((2,), 65504.0, dtype=HALF), recorder=recorder_name) == []


def test_traced_batches_warn_too(recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.full((2,), 65504.0, dtype=HALF)
    assert len(warned(nn.Identity(), x, x, warn_at=1, trace_batch_nums=[0], recorder=recorder_name)) == 2


def test_numbers_that_are_bad_are_reported_as_such(recorder_name: RecorderName) -> None:
    x = torch.tensor([65504.0, float("inf")], dtype=HALF)
    monitor = Monitor(nn.Identity(), warn_at=0.5, recorder=recorder_name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(NonFiniteError):
            monitor.model(x)


@pytest.mark.parametrize(
    ("value", "error"),
    [(0, ValueError), (1.5, ValueError), (float("nan"), ValueError), (True, TypeError), ("1", TypeError)],
)
def test_a_share_is_above_0_and_at_most_1(value: object, error: type[Exception]) -> None:
    model = nn.Identity()
    with pytest.raises(error, match="warn_at="):
        Monitor(model, warn_at=value)  # type: ignore[arg-type]
    assert not model._forward_hooks

"""`detail=True`: zeros, subnormals and the smallest magnitude that is not 0, of a tensor and in a monitor."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from warned import warned

from overflowstat import DebugUnderflowOverflow, Monitor, Policy, TensorStats, tensor_stats
from overflowstat.errors import MonitorWarning
from overflowstat.recorder import Recorder, RecorderName, make_recorder
from overflowstat.report import detail_text
from overflowstat.subnormal import is_mostly_subnormal

HALF = torch.float16
TINY = 2.0**-24  # the smallest number of float16; from 2**-14 on they are normal


def detail(x: Tensor, recorder: RecorderName | Recorder) -> tuple[int | None, int | None, float | int | None]:
    found = tensor_stats(x, detail=True, recorder=recorder)
    return found.zero_count, found.subnormal_count, found.abs_min_nonzero


def test_what_is_counted(recorder_name: RecorderName) -> None:
    x = torch.tensor([0.0, -0.0, TINY, -(2.0**-15), 2.0**-14, 3.0, math.nan], dtype=HALF)
    assert detail(x, recorder_name) == (2, 2, TINY)


def test_it_is_none_where_nobody_asks(recorder_name: RecorderName) -> None:
    found = tensor_stats(torch.zeros(3), recorder=recorder_name)
    assert found.zero_count is found.subnormal_count is found.abs_min_nonzero is None


@pytest.mark.parametrize(
    "x", [torch.zeros(70_000), torch.full((3,), math.nan), torch.empty(0), torch.tensor([0, 0]), torch.tensor([False])]
)
def test_there_is_no_smallest_where_nothing_is_but_zeros_and_nan(x: Tensor, recorder_name: RecorderName) -> None:
    zeros, subnormals, smallest = detail(x, recorder_name)
    assert (zeros, subnormals) == (int((x == 0).sum()), 0)
    assert smallest is not None and math.isnan(smallest)


def test_an_infinity_is_the_smallest_beside_zeros(recorder_name: RecorderName) -> None:
    assert detail(torch.tensor([0.0, -math.inf, math.nan]), recorder_name) == (1, 0, math.inf)


def test_what_a_view_repeats_counts_as_often(recorder_name: RecorderName) -> None:
    x = torch.tensor([0.0, TINY, 1.0], dtype=HALF)
    assert detail(x.expand(5, 3), recorder_name) == (5, 5, TINY)
    assert detail(x[:, None].expand(3, 50_000), recorder_name) == (50_000, 50_000, TINY)


def test_counts_of_more_elements_than_a_lane_of_a_vector_holds(recorder_name: RecorderName) -> None:
    """Of 8 and 16 bits, and with no normal number among them."""
    count = 1_000_003
    for dtype, subnormal in ((torch.float8_e4m3fn, 2.0**-9), (HALF, TINY)):
        assert detail(torch.full((count,), subnormal).to(dtype), recorder_name) == (0, count, subnormal)
    assert detail(torch.zeros(count, dtype=torch.uint8), recorder_name)[:2] == (count, 0)


def test_a_complex_number_counts_by_its_modulus(recorder_name: RecorderName) -> None:
    """3 and 4 make 5: of 2**-16 that is beyond 2**-14, of 2**-17 it is not."""
    parts = [[3 * 2.0**-16, 4 * 2.0**-16], [3 * 2.0**-17, 4 * 2.0**-17], [0.0, -0.0], [0.0, 1.0]]
    x = torch.view_as_complex(torch.tensor(parts, dtype=HALF))
    assert detail(x, recorder_name) == (1, 1, 5 * 2.0**-17)


@pytest.mark.parametrize("layout", ["x.mT", "x[:, ::3]", "x[::7]", "x.mT[5:, 1:]"])
def test_every_layout(layout: str, recorder_name: RecorderName) -> None:
    x = torch.arange(600 * 700, dtype=torch.int32).remainder(5).view(600, 700).to(torch.float64)
    x[x == 1] = 1e-310
    view = eval(layout, {"x": x})
    found = tensor_stats(view, detail=True, recorder=recorder_name)
    assert (found.zero_count, found.subnormal_count) == (int((view == 0).sum()), int((view == 1e-310).sum()))


def test_a_recorder_of_ones_own_has_to_be_able_to() -> None:
    class Own:
        name = "own"

        def record(self, tensors: Any) -> Any:
            return make_recorder("torch").record(tensors)

        def capture(self) -> None:
            return None

    class Able(Own):
        def detailed(self) -> Recorder:
            return make_recorder("torch", detail=True)

    assert detail(torch.zeros(2), Able())[0] == 2
    with pytest.raises(TypeError, match=r"no method detailed\(\), which detail=True asks for"):
        tensor_stats(torch.zeros(2), detail=True, recorder=Own())
    model = nn.Identity()
    with pytest.raises(TypeError, match="detailed"):
        Monitor(model, detail=True, recorder=Own())
    assert not model._forward_hooks


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_it_is_true_or_false(value: Any) -> None:
    for call in (lambda: tensor_stats(torch.zeros(1), detail=value), lambda: Monitor(nn.Identity(), detail=value)):
        with pytest.raises(TypeError, match="detail="):
            call()


# the monitor


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class OfPython(Tensor):
    """Which the extension leaves to Python."""


def test_frames_have_it_also_where_a_tensor_is_not_read_again(recorder_name: RecorderName) -> None:
    x = torch.tensor([0.0, 1e-6, 1.0], dtype=HALF)
    with Monitor(nn.Sequential(nn.Identity(), nn.Identity()), detail=True, recorder=recorder_name) as monitor:
        monitor.model(x)
        assert monitor.counters().tensors == 1
    lines = [line.content for frame in monitor.frames for line in frame.lines]
    assert len(lines) == 6
    for content in lines:
        assert isinstance(content, TensorStats)
        assert (content.zero_count, content.subnormal_count) == (1, 1)
        assert content.abs_min_nonzero == x[1].item()


def test_weights_have_it_too(recorder_name: RecorderName) -> None:
    model = nn.Linear(4, 2)
    nn.init.zeros_(model.weight)
    with Monitor(model, detail=True, recorder=recorder_name) as monitor:
        model(torch.ones(1, 4))
    content = monitor.frames[0].lines[0].content
    assert isinstance(content, TensorStats) and content.zero_count == 8


def test_a_tensor_that_is_mostly_subnormal_is_warned_of_once_for_a_place(recorder_name: RecorderName) -> None:
    """Of 6 in 8 that are not zero; the zeros do not count."""
    model = nn.Sequential(Scale(1.0), Scale(2.0**-20))
    x = torch.tensor([0.0] * 92 + [1.0] * 6 + [64.0] * 2, dtype=HALF)
    assert warned(model, x, x, detail=True, recorder=recorder_name) == [
        "1 (Scale), output: 75 % of what is not zero is subnormal in float16, down to 9.54e-07, in batch 0",
        "the model itself (Sequential), output: 75 % of what is not zero is subnormal in float16, down to 9.54e-07, "
        "in batch 0",
    ]


@pytest.mark.parametrize(
    ("numbers", "is_one"),
    [
        ([TINY] * 8, True),
        ([TINY] * 7, False),  # too few to speak of a share
        ([TINY] * 8 + [1.0] * 8, True),
        ([TINY] * 8 + [1.0] * 9, False),
        ([TINY] * 4 + [0.0] * 1000, False),
        ([0.0] * 1000, False),
        ([TINY] * 8 + [math.nan] * 1000, True),
    ],
)
def test_from_a_half_of_eight_numbers_on(numbers: list[float], is_one: bool, recorder_name: RecorderName) -> None:
    x = torch.tensor(numbers, dtype=HALF)
    assert is_mostly_subnormal(tensor_stats(x, detail=True, recorder=recorder_name)) == is_one
    assert not is_mostly_subnormal(tensor_stats(x, recorder=recorder_name))
    if not x.isnan().any():
        assert bool(warned(nn.Identity(), x, detail=True, recorder=recorder_name)) == is_one
        as_python = x.as_subclass(OfPython)
        assert bool(warned(nn.Identity(), as_python, detail=True, recorder=recorder_name)) == is_one


@pytest.mark.parametrize(
    ("dtype", "smallest_normal"),
    [
        (torch.float64, 2.0**-1022),
        (torch.float32, 2.0**-126),
        (torch.bfloat16, 2.0**-126),
        (torch.float16, 2.0**-14),
        (torch.complex64, 2.0**-126),
    ],
    ids=str,
)
def test_it_is_the_dtype_s_own_smallest_normal_number(
    dtype: torch.dtype, smallest_normal: float, recorder_name: RecorderName
) -> None:
    for value, warnings_of in ((smallest_normal, 0), (smallest_normal / 2, 2)):
        wide = torch.full((9,), value, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        assert len(warned(nn.Identity(), wide.to(dtype), detail=True, recorder=recorder_name)) == warnings_of


@pytest.mark.parametrize("x", [torch.ones(9, dtype=torch.int8), torch.tensor([True] * 9 + [False] * 9)], ids=str)
def test_whole_numbers_are_none(x: Tensor, recorder_name: RecorderName) -> None:
    assert warned(nn.Identity(), x, detail=True, recorder=recorder_name) == []


def test_healthy_layers_and_dead_ones_are_none(recorder_name: RecorderName) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 8), nn.Softmax(-1)).half()
    x = torch.randn(32, 64).half()
    assert warned(model, x, torch.zeros_like(x), -x.abs(), detail=True, recorder=recorder_name) == []


def test_lines_that_a_policy_hides_or_allows_something_are_none(recorder_name: RecorderName) -> None:
    x = torch.full((9,), TINY, dtype=HALF)
    policy = Policy(exclude=[":input[0]"], allow={":output": "inf"})
    assert warned(nn.Identity(), x, detail=True, policy=policy, recorder=recorder_name) == []
    assert warned(nn.Identity(), x, recorder=recorder_name) == []


def test_near_its_limit_and_mostly_subnormal_are_told_apart(recorder_name: RecorderName) -> None:
    x = torch.full((9,), TINY, dtype=HALF)
    both = torch.cat([x, torch.tensor([65504.0], dtype=HALF)])
    found = warned(nn.Identity(), x, both, both, detail=True, warn_at=0.5, recorder=recorder_name)
    assert [("subnormal" in text, text.split(",")[1]) for text in found] == [
        (True, " input[0]: 100 % of what is not zero is subnormal in float16"),
        (True, " output: 100 % of what is not zero is subnormal in float16"),
        (False, " input[0]: 6.55e+04 is 100 % of the limit of float16"),
        (False, " output: 6.55e+04 is 100 % of the limit of float16"),
    ]


def test_gradients_that_underflow_are_told_of(recorder_name: RecorderName) -> None:
    """As those of a loss that nobody has scaled do in float16."""
    model = nn.Linear(8, 8, bias=False).half()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with Monitor(model, detail=True, gradients=True, recorder=recorder_name):
            (model(torch.ones(2, 8, dtype=HALF)) * 2.0**-18).sum().backward()
    texts = [str(w.message).split(",")[1] for w in found if w.category is MonitorWarning]
    assert texts == [
        f" {label}: 100 % of what is not zero is subnormal in float16" for label in ("grad output", "grad weight")
    ]


def test_drilling_does_not_tell_it_again(recorder_name: RecorderName) -> None:
    model = nn.Sequential(Scale(2.0**-20), Scale(math.inf))
    x = torch.full((9,), 1.0, dtype=HALF)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with Monitor(model, detail=True, on_detect=lambda report: None, sinks=[], recorder=recorder_name) as monitor:
            model(x)
            monitor.drill(x)
    assert len([w for w in found if "subnormal" in str(w.message)]) == 1


# texts


def test_a_line_ends_with_it_where_there_is_something_to_tell(recorder_name: RecorderName) -> None:
    texts = [
        detail_text(tensor_stats(torch.tensor(numbers, dtype=HALF), detail=True, recorder=recorder_name))
        for numbers in ([1.0, 2.0], [0.0, 1.0, 0.0, 2.0**-20], [TINY, 1.0], [0.0, 0.0], [0.0, 0.0, 2.0], [])
    ]
    assert texts == [
        "",
        " (50 % zero, 25 % subnormal, smallest 9.54e-07)",
        " (50 % subnormal)",
        " (100 % zero)",
        " (66.7 % zero, smallest 2.00e+00)",
        "",
    ]
    assert detail_text("None") == detail_text(tensor_stats(torch.zeros(3), recorder=recorder_name)) == ""


def test_frames_show_it(recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.tensor([0.0, 2.0], dtype=HALF)
    with Monitor(nn.Identity(), detail=True, trace_batch_nums=[0], recorder=recorder_name) as monitor:
        monitor.model(x)
    assert "0.00e+00 2.00e+00 output (50 % zero, smallest 2.00e+00)\n" in capsys.readouterr().out


def test_the_drop_in_s_text_is_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    with DebugUnderflowOverflow(model := nn.Identity(), trace_batch_nums=[0]):
        model(torch.zeros(3))
    assert "0.00e+00 0.00e+00 output\n" in capsys.readouterr().out

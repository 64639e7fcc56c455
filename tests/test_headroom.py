"""How near numbers are to their dtype's limit, and where they began to grow."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError, TensorStats, tensor_stats
from overflowstat.frames import Frame, Line
from overflowstat.headroom import growth, headroom, headroom_of
from overflowstat.recorder import RecorderName

HALF, INF = torch.float16, float("inf")


def stats(largest: float, dtype: torch.dtype = HALF, posinf_count: int = 0) -> TensorStats:
    first_bad = (0,) if posinf_count else None
    return TensorStats(0.0, INF if posinf_count else largest, largest, 0, posinf_count, 0, first_bad, 8, dtype, (8,))


def frame(module: str, given: float, gave: float, *, infs: int = 0, batch: int = 0, kind: str = "Linear") -> Frame:
    lines = (Line("input[0]", stats(given)), Line("output", stats(gave, posinf_count=infs)))
    return Frame(batch, module, kind, lines, starts_batch=False)


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1.0, -32752.0], torch.float16, 1.0),  # the half of 65504
        ([65504.0], torch.float16, 0.0),
        ([448.0, 1.0], torch.float8_e4m3fn, 0.0),
        ([57344.0 / 4], torch.float8_e5m2, 2.0),
        ([0.0, 0.0], torch.float32, math.inf),
        ([2.0**1000], torch.float64, 24.0),
    ],
)
def test_headroom_is_in_powers_of_two(
    values: list[float], dtype: torch.dtype, expected: float, recorder_name: RecorderName
) -> None:
    found = headroom(tensor_stats(torch.tensor(values, dtype=torch.float64).to(dtype), recorder=recorder_name))
    assert found == pytest.approx(expected, abs=1e-12)


def test_headroom_in_float16_is_negative_where_it_would_overflow(recorder_name: RecorderName) -> None:
    found = tensor_stats(torch.tensor([4 * 65504.0]), recorder=recorder_name)
    assert headroom(found, torch.float16) == pytest.approx(-2.0)


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor([3]), torch.tensor([True]), torch.tensor([1j]), torch.tensor([math.nan, INF]), torch.empty(0)],
    ids=["int", "bool", "complex", "nothing finite", "empty"],
)
def test_there_is_no_headroom_without_a_finite_real_number(tensor: Tensor, recorder_name: RecorderName) -> None:
    assert headroom(tensor_stats(tensor, recorder=recorder_name)) is None


def test_a_monitor_lists_the_lines_nearest_to_their_limit(recorder_name: RecorderName) -> None:
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    model = nn.Sequential(first, second)
    with torch.no_grad():
        first.weight.fill_(8.0)
        second.weight.fill_(65504.0)
    with Monitor(model, recorder=recorder_name) as monitor, torch.no_grad():
        model(torch.ones(1, 1))
        model(torch.full((1, 1), 2.0))
    found = monitor.headroom()
    nearest = found[0]
    assert (nearest.module, nearest.label, nearest.value, nearest.batch_number) == ("1", "output", 16 * 65504.0, 1)
    assert nearest.powers_left_in_float16 == pytest.approx(-4.0)
    assert [line.powers_left for line in found] == sorted(line.powers_left for line in found)
    assert len({(line.module, line.label) for line in found}) == len(found)
    text = str(found).splitlines()
    assert text[0] == "powers of two left"
    assert text[1] == " 108.0 1.05e+06 float32 1 output; would overflow if run in float16, by 4.0"


def test_a_dtype_no_wider_than_float16_has_no_second_limit() -> None:
    assert headroom_of([frame("a", 1.0, 2.0)])[0].powers_left_in_float16 is None
    assert str(headroom_of([])) == "no floating-point numbers were kept"


def test_growth_over_frames_that_follow_each_other_ends_before_the_bad_one() -> None:
    """The figures of the T5 block that overflows in float16."""
    ff = "encoder.block.2.layer.1.DenseReluDense"
    run = growth(
        [
            frame("encoder.block.2.layer.1.layer_norm", 6.0e2, 1.8),
            frame(f"{ff}.wi_0", 1.8, 53.0),
            frame(f"{ff}.wi_1", 1.8, 237.0),
            frame(f"{ff}.dropout", 8760.0, 9740.0, kind="Dropout"),
            frame(f"{ff}.wo", 9740.0, 62700.0),
            frame(ff, 1.8, 62700.0, kind="T5DenseGatedGeluDense"),
            frame("encoder.block.2.layer.1.dropout", 62700.0, 62700.0, infs=3, kind="Dropout"),
        ]
    )
    assert run is not None
    assert run.text == f"2.37e+02 -> 9.74e+03 -> 6.27e+04 over the last 4 frames, from {ff}.wi_1"
    assert run.start.module == f"{ff}.wi_1"
    assert run.factor == pytest.approx((62700 / 237) ** 0.5)


def blocks(values: Sequence[float], fed: bool = True) -> list[Frame]:
    """Each with a norm that brings the values down, and adds to what it was given."""
    frames = []
    for i, (given, gave) in enumerate(itertools.pairwise(values)):
        given = given if fed else 1.0
        frames.append(frame(f"layers.{i}.norm", given, 2.0, kind="LayerNorm"))
        frames.append(frame(f"layers.{i}.linear", 2.0, gave - given))
        frames.append(frame(f"layers.{i}", given, gave, kind="Block"))
    return frames


def test_growth_of_a_residual_stream_is_seen_over_the_norms_inside_of_its_blocks() -> None:
    run = growth(blocks([1.0, 4.0, 16.0, 64.0, 256.0]))
    assert run is not None and run.of_layers
    assert [f.module for f in run.frames] == ["layers.0", "layers.1", "layers.2", "layers.3"]
    assert run.text == "4.00e+00 -> 1.60e+01 -> 6.40e+01 -> 2.56e+02 over 4 layers, 4 times each, from layers.0"


def test_growth_of_layers_begins_where_one_began_to_multiply() -> None:
    run = growth(blocks([9.0, 9.5, 10.0, 30.0, 90.0, 270.0]))
    assert run is not None and run.values == (10.0, 30.0, 90.0, 270.0) and run.start.module == "layers.1"


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([], id="none"),
        pytest.param([frame("a", 1.0, 1000.0)], id="one frame"),
        pytest.param([frame("a", 3.0, 10.0), frame("b", 10.0, 20.0), frame("c", 20.0, 60.0)], id="a factor of 6"),
        pytest.param([frame("q", 1.0, 2.0), frame("k", 1.0, 500.0)], id="side by side"),
        pytest.param([frame(f"experts.{i}", 1.0, 10.0**i) for i in range(5)], id="experts side by side"),
        pytest.param([frame("a", 1.0, 2.0, batch=0), frame("b", 2.0, 900.0, batch=1)], id="of another batch"),
        pytest.param([frame("a", 1.0, 2.0), frame("b", 2.0, 900.0), frame("c", 900.0, 3.0)], id="taken back"),
        pytest.param([frame("a", 1.0, 0.0), frame("b", 0.0, 900.0)], id="from zeros"),
    ],
)
def test_there_is_no_story_without_a_run(frames: list[Frame]) -> None:
    assert growth(frames) is None


def test_layers_that_did_not_feed_each_other_are_no_run() -> None:
    run = growth(blocks([1.0, 4.0, 16.0, 64.0, 256.0], fed=False))
    assert run is None or not run.of_layers


def test_the_run_of_a_model_that_explodes_over_8_layers(recorder_name: RecorderName) -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(8)]
    model = nn.Sequential(*layers).half()
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(1.25)  # of 4 equal inputs: 5 times
    with Monitor(model, recorder=recorder_name), pytest.raises(NonFiniteError) as error, torch.no_grad():
        model(torch.ones(1, 4, dtype=HALF))
    run = growth(error.value.frames)
    assert run is not None
    assert run.start.module == "0" and run.values[:4] == (5.0, 25.0, 125.0, 625.0)
    assert run.factor == pytest.approx(5.0, rel=1e-2)
    assert run.text == (
        "5.00e+00 -> 2.50e+01 -> 1.25e+02 -> 6.25e+02 -> 3.12e+03 -> 1.56e+04 over the last 6 frames, from 0"
    )


class GatedBlock(nn.Module):
    """Normed, gated, and added to what came in, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.wi_0 = nn.Linear(4, 4, bias=False)
        self.wi_1 = nn.Linear(4, 4, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.wo = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        gated = self.dropout(self.wi_0(normed).relu() * self.wi_1(normed))
        summed: Tensor = x + self.wo(gated)
        return summed


def test_the_run_of_a_gated_block_begins_at_its_gates(recorder_name: RecorderName) -> None:
    blocks = [GatedBlock(), GatedBlock()]
    model = nn.Sequential(*blocks).eval()
    with torch.no_grad():
        for block, weight in zip(blocks, (0.0, 30.0), strict=True):
            for linear in (block.wi_0, block.wi_1, block.wo):
                linear.weight.copy_(torch.eye(4) * weight)
    monitor = Monitor(model, recorder=recorder_name)
    with torch.no_grad():
        model(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    frames = [f for f in monitor.frames if f.module]
    run = growth(frames)
    assert run is not None and not run.of_layers
    # Both gates are fed by the norm, the second one is not fed by the first. The normed row ends in 3 / 5**0.5.
    gate = 30 * 3 / 5**0.5
    assert [f.module for f in run.frames] == ["1.wi_1", "1.dropout", "1.wo", "1"]
    assert run.values == pytest.approx((gate, gate**2, 30 * gate**2, 30 * gate**2 + 4), rel=1e-4)

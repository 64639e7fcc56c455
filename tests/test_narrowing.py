"""How many numbers a narrower format would lose: counted by native code and by plain torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from overflowstat import native, tensor_stats, torch_recorder
from overflowstat.narrowing import FORMATS, Narrowed, narrowed
from overflowstat.recorder import RecorderName

NAN, INF = math.nan, math.inf
ALL = list(FORMATS.values())
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
NARROW = [torch.float16, torch.bfloat16, *FLOAT8]


def lost(x: Tensor, dtypes: list[torch.dtype], recorder_name: RecorderName) -> list[Narrowed]:
    return narrowed(x, tensor_stats(x), dtypes, recorder_name)


def native_counts(x: Tensor, thresholds: list[float]) -> list[int] | None:
    extension = native.load()
    assert extension is not None
    counts: list[int] | None = extension.count_at_least(x, thresholds)
    return counts


def all_codes(dtype: torch.dtype) -> Tensor:
    bits = 8 * dtype.itemsize
    codes = torch.arange(1 << bits, dtype=torch.int32)
    return codes.to(torch.uint16 if bits == 16 else torch.uint8).view(dtype)


# (largest number that stays, smallest that overflows, largest that becomes zero, smallest that does not), worked out
# from the bits of each format: half a step beyond the largest number, and half of the smallest.
EDGES = {
    "fp16": (65519.996, 65520.0, 2.0**-25, 2.0**-25 * (1 + 2**-23)),
    "bf16": ((2 - 2**-8 - 2**-23) * 2.0**127, (2 - 2**-8) * 2.0**127, 2.0**-134, 1.5 * 2.0**-134),
    "fp8_e4m3": (464.0, 464.00003, 2.0**-10, 2.0**-10 * (1 + 2**-23)),
    "fp8_e5m2": (61439.996, 61440.0, 2.0**-17, 2.0**-17 * (1 + 2**-23)),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_rounds_beyond_a_format_is_counted_to_the_last_bit(
    name: str, dtype: torch.dtype, recorder_name: RecorderName
) -> None:
    stays, overflows, vanishes, remains = EDGES[name]
    x = torch.tensor(
        [stays, -stays, overflows, -overflows, vanishes, -vanishes, remains, 0.0, -0.0, NAN, INF, -INF, 1.0],
        dtype=dtype,
    )
    assert lost(x, [FORMATS[name]], recorder_name) == [Narrowed(2, 2)]


def test_float64_is_not_rounded_to_float32_before(recorder_name: RecorderName) -> None:
    above = [math.nextafter(edge, INF) for edge in (464.0, 2.0**-25, 2.0**-10)]
    below = [math.nextafter(edge, 0.0) for edge in (65520.0, 61440.0)]
    x = torch.tensor([*above, *below, 5e-324, 1e308], dtype=torch.float64)
    # By hand: what each format loses of 464+, 2^-25+, 2^-10+, 65520-, 61440-, 5e-324, 1e308.
    assert lost(x, ALL, recorder_name) == [Narrowed(1, 1), Narrowed(1, 1), Narrowed(4, 2), Narrowed(2, 2)]


@pytest.mark.parametrize("source", NARROW)
def test_every_number_of_a_format_is_lost_where_the_cast_loses_it(
    source: torch.dtype, recorder_name: RecorderName
) -> None:
    x = all_codes(source)
    exact = x.to(torch.float64)
    for name, found in zip(FORMATS, lost(x, ALL, recorder_name), strict=True):
        cast = exact.to(FORMATS[name]).to(torch.float64)
        flushed = int(((exact != 0) & (cast == 0)).sum())
        if name == "fp8_e4m3":  # this torch saturates: NVIDIA's and the OCP's casts may give NaN
            overflows = int(((exact.abs() > 464) & exact.isfinite()).sum())
        else:
            overflows = int((exact.isfinite() & ~cast.isfinite()).sum())
        assert found == Narrowed(overflows, flushed), name


def test_numbers_in_every_part_of_a_large_tensor_count(recorder_name: RecorderName) -> None:
    x = torch.ones(300, 1000)
    x[::3, 7] = 1e5
    x[:, 500] = -1e-9
    x[5, 5] = NAN
    x[6] = 0.0
    expected = [Narrowed(99, 299), Narrowed(0, 0), Narrowed(99, 299), Narrowed(99, 299)]
    assert x[::3, 7].numel() == 100  # of which row 6 was written over
    wide = torch.ones(300, 1500)
    wide[:, 250:1250] = x
    for same in (x, x.t(), wide[:, 250:1250]):
        assert lost(same, ALL, recorder_name) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("count", [1, 254, 255, 256, 8191, 8192, 8193, 70001, 1100000])
def test_each_of_the_last_ones_counts(dtype: torch.dtype, count: int) -> None:
    """Native: at the edges of blocks, and where counters of few bits would run over."""
    x = torch.full((count,), 0.5).to(dtype)
    assert native_counts(x, [0.25, 0.5, 1.0, INF]) == [count, count, 0, 0]
    x[-1] = 4.0
    x[0] = NAN
    assert native_counts(x[1:], [0.5, 1.0]) == [count - 1, int(count > 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *NARROW])
def test_thresholds_are_compared_as_the_numbers_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (20000 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    x = codes.view(dtype)
    numbers = x.to(torch.float64).abs()
    thresholds = [0.0, 5e-324, 2.0**-127, 1e-30, 0.3, 1.0, 7.5, 448.0, 57344.5, 3e38, 1e300, INF]
    expected = [int((numbers >= threshold).sum()) for threshold in thresholds]  # which no NaN is
    assert native_counts(x, thresholds) == expected
    if dtype == torch.float64:
        assert torch_recorder.count_at_least(x, thresholds) == expected


def test_elements_that_an_expanded_view_repeats_count_as_often(recorder_name: RecorderName) -> None:
    x = torch.tensor([1e5, 1e-9, 0.0, 1.0]).expand(1 << 30, 4)
    assert lost(x, [torch.float16], recorder_name) == [Narrowed(1 << 30, 1 << 30)]


@pytest.mark.parametrize("x", [torch.zeros(0, 4), torch.tensor(1e5), torch.ones(3).to_sparse().to_dense()])
def test_empty_tensors_and_scalars(x: Tensor, recorder_name: RecorderName) -> None:
    assert lost(x, [torch.float16], recorder_name) == [Narrowed(int(x.dim() == 0), 0)]


def test_both_parts_of_complex_numbers_count(recorder_name: RecorderName) -> None:
    x = torch.tensor([1e5 + 1e-9j, 1 + 1j, 0j, complex(INF, 1e5), complex(NAN, -1e-9), 4e4 + 4e4j])
    assert lost(x, [torch.float16], recorder_name) == [Narrowed(2, 2)]
    assert lost(x[:2].conj(), [torch.float16], recorder_name) == [Narrowed(1, 1)]


@pytest.mark.parametrize(
    "x",
    [torch.arange(3), torch.ones(3, dtype=torch.complex64), torch.ones(4, 4)[:, :2], torch.empty(2, device="meta")],
    ids=["integers", "complex", "not dense", "meta"],
)
def test_native_code_says_what_it_cannot_count(x: Tensor) -> None:
    assert native_counts(x, [1.0]) is None


def test_nothing_is_read_again_where_the_statistics_tell_that_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[int]:
        raise AssertionError("read again")

    monkeypatch.setattr(torch_recorder, "count_at_least", refuse)
    for x in (torch.linspace(0.01, 400, 100), torch.tensor([-3.0, NAN]), torch.ones(4, dtype=torch.float16)):
        assert lost(x, ALL, "torch") == [Narrowed(0, 0)] * 4
    with pytest.raises(AssertionError, match="read again"):
        lost(torch.tensor([0.0, 1.0]), ALL, "torch")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counting_takes_little_more_than_reading(dtype: torch.dtype, one_thread: None) -> None:
    """Native: three times as long as the statistics, on an idle machine and a busy one."""
    x = torch.randn(1 << 24).to(dtype)
    stats = tensor_stats(x, recorder="native")

    def seconds(run: Callable[[], object]) -> float:
        def once() -> float:
            start = time.process_time()
            run()
            return time.process_time() - start

        return min(once() for _ in range(7))

    reading = seconds(lambda: tensor_stats(x, recorder="native"))
    counting = seconds(lambda: narrowed(x, stats, ALL, "native"))
    assert counting < 8 * reading

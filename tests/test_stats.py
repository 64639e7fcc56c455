"""The rows of both recorders are those that a slow and obvious computation gives."""

import math
from collections.abc import Iterable

import pytest
import torch
from expected_rows import SMALLEST_NORMAL, detailed_row, expected_row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from overflowstat import TensorStats, tensor_stats
from overflowstat.recorder import Recorder
from overflowstat.stats import READABLE_DTYPES

DTYPES = sorted(READABLE_DTYPES, key=str)
EIGHT_BIT = [d for d in DTYPES if d.itemsize == 1]
SIXTEEN_BIT = [d for d in DTYPES if d.itemsize == 2]
FLOATS = [d for d in DTYPES if d.is_floating_point]
# A code of each format that is not finite, for placing one among good elements: NaN where there is no infinity.
NOT_FINITE = {
    torch.float64: 0x7FF0000000000000,
    torch.float32: 0xFF800000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0xFF80,
    torch.float8_e4m3fn: 0xFF,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
    torch.float8_e8m0fnu: 0xFF,
}
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}

# For tests that take plain torch more than a few seconds.
torch_is_slow = pytest.mark.parametrize(
    "recorder_name", ["native", pytest.param("torch", marks=pytest.mark.slow)], indirect=True
)

property_test = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def from_codes(codes: Iterable[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(codes), dtype=UNSIGNED[dtype.itemsize]).view(dtype)


def from_bytes(data: bytes, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """A tensor of these bytes whose first element lies `offset` bytes past a 64-byte boundary."""
    buffer = torch.empty(len(data) + 128, dtype=torch.uint8)
    start = -buffer.data_ptr() % 64 + offset
    buffer[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    # torch itself refuses to view bytes at an odd offset as a wider dtype, numpy does not.
    return torch.from_numpy(buffer.numpy()[start : start + len(data)]).view(dtype) if data else torch.empty(0).to(dtype)


def pieces(tensor: Tensor, size: int) -> list[Tensor]:
    return list(torch.split(tensor, size))


def assert_row(stats: TensorStats, tensor: Tensor) -> None:
    expected = expected_row(tensor)
    for field, value in expected.items():
        got = getattr(stats, field)
        same = got == value or (isinstance(got, float) and math.isnan(got) and math.isnan(value))  # type: ignore[arg-type]
        assert same and type(got) is type(value), f"{field}: {got!r} instead of {value!r}, {tensor.dtype}"
    assert stats.dtype == tensor.dtype and stats.shape == tuple(tensor.shape)


def assert_detail(stats: TensorStats, tensor: Tensor) -> None:
    """Also that all else is as without detail."""
    for field, value in detailed_row(tensor).items():
        got = getattr(stats, field)
        assert repr(got) == repr(value), f"{field}: {got!r} instead of {value!r}, {tensor.dtype}"


def check_without_detail(recorder: Recorder, *tensors: Tensor) -> None:
    for stats, tensor in zip(tensor_stats(list(tensors), recorder=recorder), tensors, strict=True):
        assert_row(stats, tensor)
        assert stats.zero_count is stats.subnormal_count is stats.abs_min_nonzero is None


def check(recorder: Recorder, *tensors: Tensor) -> None:
    """Without detail and with it."""
    check_without_detail(recorder, *tensors)
    for stats, tensor in zip(tensor_stats(list(tensors), detail=True, recorder=recorder), tensors, strict=True):
        assert_detail(stats, tensor)


# every code of the narrow formats


@pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
def test_every_8_bit_code_alone_and_all_together(recorder: Recorder, dtype: torch.dtype) -> None:
    every = from_codes(range(256), dtype)
    check(recorder, every, *pieces(every, 1))


@torch_is_slow
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_every_16_bit_code_alone(recorder: Recorder, dtype: torch.dtype) -> None:
    """A row is checked field by field as whole columns: 65 536 calls of expected_row would take minutes."""
    every = from_codes(range(65536), dtype)
    rows = tensor_stats(pieces(every, 1), detail=True, recorder=recorder)
    value = every.to(torch.float64)
    magnitude = value.abs()
    for field, column in {
        "abs_min": magnitude,
        "abs_max": magnitude,
        "finite_abs_max": magnitude.where(magnitude < math.inf, math.nan),
        "nan_count": value.isnan(),
        "posinf_count": value == math.inf,
        "neginf_count": value == -math.inf,
        "zero_count": value == 0,
        "subnormal_count": (magnitude > 0) & (magnitude < SMALLEST_NORMAL.get(dtype, 0)),
        "abs_min_nonzero": magnitude.where(magnitude > 0, math.nan),
    }.items():
        got = torch.tensor([getattr(row, field) for row in rows], dtype=torch.float64)
        assert torch.equal(got.nan_to_num(-1), column.to(torch.float64).nan_to_num(-1)), field
    assert [row.first_bad for row in rows] == [None if finite else (0,) for finite in (magnitude < math.inf).tolist()]


@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_all_16_bit_codes_together(recorder: Recorder, dtype: torch.dtype) -> None:
    every = from_codes(range(65536), dtype)
    backwards = from_codes(range(65535, -1, -1), dtype)
    check(recorder, every, backwards, *pieces(every, 4096))


# special values of the wide ones

FLOAT64_CODES = {
    "zeros": [0, 1 << 63],
    "subnormals": [1, 0xFFFFFFFFFFFFF, 1 << 63 | 1],
    "normal ends": [0x0010000000000000, 0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF],
    "infinities": [0x7FF0000000000000, 0xFFF0000000000000],
    "quiet NaNs": [0x7FF8000000000000, 0xFFF8000000000001, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF],
    "signalling NaNs": [0x7FF0000000000001, 0xFFF0000000000001],
    "mixed": [0x7FF0000000000001, 0x7FF0000000000000, 0x3FF0000000000000, 1, 0xFFF0000000000000],
}
FLOAT32_CODES = {
    "zeros": [0, 1 << 31],
    "subnormals": [1, 0x7FFFFF, 1 << 31 | 1],
    "normal ends": [0x00800000, 0x7F7FFFFF, 0xFF7FFFFF],
    "infinities": [0x7F800000, 0xFF800000],
    "quiet NaNs": [0x7FC00000, 0xFFC00001, 0x7FFFFFFF, 0xFFFFFFFF],
    "signalling NaNs": [0x7F800001, 0xFF800001],
    "mixed": [0x7F800001, 0x7F800000, 0x3F800000, 1, 0xFF800000],
}


@pytest.mark.parametrize(
    ("dtype", "codes"),
    [(torch.float64, codes) for codes in FLOAT64_CODES.values()]
    + [(torch.float32, codes) for codes in FLOAT32_CODES.values()],
    ids=[f"{d} {name}" for d, table in (("float64", FLOAT64_CODES), ("float32", FLOAT32_CODES)) for name in table],
)
def test_special_values(recorder: Recorder, dtype: torch.dtype, codes: list[int]) -> None:
    alone = from_codes(codes, dtype)
    check(recorder, alone, *pieces(alone, 1), torch.cat([torch.linspace(-3, 3, 1000).to(dtype), alone]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8], ids=str)
def test_the_smallest_integer_has_its_true_magnitude(recorder: Recorder, dtype: torch.dtype) -> None:
    smallest = torch.iinfo(dtype).min
    stats = tensor_stats(torch.tensor([5, smallest, -3], dtype=dtype), recorder=recorder)
    assert (stats.abs_min, stats.abs_max) == (3, -smallest)
    assert type(stats.abs_max) is int
    check(recorder, torch.tensor([smallest], dtype=dtype), torch.tensor([smallest, 0], dtype=dtype))


def test_integers_beyond_what_a_double_holds_are_exact(recorder: Recorder) -> None:
    odd = 2**63 - 1
    stats = tensor_stats(torch.tensor([odd, -odd + 2]), recorder=recorder)
    assert (stats.abs_min, stats.abs_max) == (odd - 2, odd)
    largest = tensor_stats(torch.tensor([2**64 - 1, 2**63 + 1], dtype=torch.uint64), recorder=recorder)
    assert (largest.abs_min, largest.abs_max) == (2**63 + 1, 2**64 - 1)


def test_a_byte_that_is_not_0_is_true(recorder: Recorder) -> None:
    stats = tensor_stats(torch.tensor([0, 7, 255], dtype=torch.uint8).view(torch.bool), recorder=recorder)
    assert (stats.abs_min, stats.abs_max) == (0, 1)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.complex32], ids=str)
def test_complex_elements_count_by_their_modulus(recorder: Recorder, dtype: torch.dtype) -> None:
    real = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}[dtype]
    top = torch.finfo(real).max
    tiny = torch.finfo(real).smallest_normal * torch.finfo(real).eps  # the smallest subnormal
    parts = [3, top, tiny, 0, -1.5, math.inf, -math.inf, math.nan]
    every = torch.view_as_complex(torch.tensor([[re, im] for re in parts for im in parts], dtype=real))
    check(recorder, every, *pieces(every, 1), every[torch.isfinite(torch.view_as_real(every)).all(-1)])


def test_a_finite_complex_number_whose_modulus_overflows_is_no_infinity(recorder: Recorder) -> None:
    for dtype in (torch.float32, torch.float64):
        top = torch.finfo(dtype).max
        stats = tensor_stats(torch.complex(*torch.tensor([[top], [top]], dtype=dtype)), recorder=recorder)
        assert (stats.abs_max, stats.has_inf) == (top, False)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64], ids=str)
def test_moduli_of_random_parts_are_correctly_rounded(recorder: Recorder, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(4000, 2, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(
        -30, 30, (4000, 1), generator=generator
    )
    check_without_detail(recorder, *pieces(torch.view_as_complex(parts).to(dtype), 1))


def test_subnormals_are_read_as_what_they_are_where_torch_flushes_them_to_zero() -> None:
    tiny = [
        torch.tensor([1e-40]),
        torch.tensor([1e-310], dtype=torch.float64),
        torch.tensor([complex(1e-40, 1e-40)]),
        torch.tensor([complex(1e-310, 1e-320)], dtype=torch.complex128),
        torch.full((300_000,), complex(1e-40, 1e-40)),
    ]
    expected = [expected_row(x)["abs_max"] for x in tiny]
    assert torch.set_flush_denormal(True)
    try:
        found = [row.abs_max for row in tensor_stats(tiny, recorder="native")]
    finally:
        torch.set_flush_denormal(False)
    assert found == expected and all(found)


def test_an_infinite_part_and_a_nan_part_count_as_both(recorder: Recorder) -> None:
    stats = tensor_stats(torch.tensor([complex(math.inf, math.nan), 1j]), recorder=recorder)
    assert (stats.nan_count, stats.posinf_count, stats.abs_min, stats.abs_max) == (1, 1, 1.0, math.inf)
    assert stats.first_bad == (0,)


# shapes, strides, alignments


@property_test
@given(st.data(), st.sampled_from(DTYPES), st.integers(0, 300), st.integers(0, 15))
def test_any_bits_of_any_length_at_any_alignment(
    recorder: Recorder, data: st.DataObject, dtype: torch.dtype, length: int, offset: int
) -> None:
    size = length * dtype.itemsize
    check(recorder, from_bytes(data.draw(st.binary(min_size=size, max_size=size)), dtype, offset))


@property_test
@given(
    st.sampled_from(FLOATS),
    st.integers(1, 300),
    st.integers(1, 5),
    st.integers(0, 15),
    st.integers(0, 299),
    st.sampled_from(["first", "second"]),
)
def test_one_bad_element_is_found_wherever_it_is(
    recorder: Recorder, dtype: torch.dtype, length: int, step: int, start: int, position: int, order: str
) -> None:
    base = torch.full((start + length * step,), 1.0).to(dtype)
    x = base[start::step][:length]
    position %= length
    other = (position * 7) % length
    codes = x.view(UNSIGNED[dtype.itemsize])
    codes[position] = NOT_FINITE[dtype]
    if order == "second":
        codes[other] = NOT_FINITE[dtype]
    stats = tensor_stats(x, recorder=recorder)
    assert stats.first_bad == (min(position, other) if order == "second" else position,)
    assert_row(stats, x)


@property_test
@given(st.data(), st.sampled_from([torch.float16, torch.float32, torch.int64, torch.float8_e5m2, torch.complex64]))
def test_any_strides(recorder: Recorder, data: st.DataObject, dtype: torch.dtype) -> None:
    """Transposed, sliced, expanded and overlapping views; memory order is the expected row's own notion of it."""
    rank = data.draw(st.integers(0, 5))
    shape = data.draw(st.lists(st.integers(0, 5), min_size=rank, max_size=rank))
    strides = data.draw(st.lists(st.integers(0, 30), min_size=rank, max_size=rank))
    offset = data.draw(st.integers(0, 7))
    reach = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    data_seed = data.draw(st.integers(0, 2**32 - 1))
    raw = torch.randint(0, 256, (reach * dtype.itemsize,), generator=torch.Generator().manual_seed(data_seed))
    x = raw.to(torch.uint8).view(dtype).as_strided(shape, strides, offset)
    check(recorder, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32], ids=str)
def test_large_tensors_in_every_layout(recorder: Recorder, dtype: torch.dtype) -> None:
    """Larger than a block, a slice and a thread's piece of the work."""
    x = torch.linspace(-9, 9, 3 * 64 * 129 * 65).to(dtype).view(3, 64, 129, 65)
    if dtype.is_floating_point:
        codes = x.view(UNSIGNED[dtype.itemsize])
        codes[2, 3, 100, 64] = codes[1, 63, 128, 64] = codes[1, 63, 128, 63] = NOT_FINITE[dtype]
    views = [x, x.permute(0, 2, 3, 1), x.mT, x[:, ::2], x[..., :33], x[..., 1:], x[..., ::3], x.flatten(2)[:, :, ::7]]
    check(recorder, *views, x[:, :, None].expand(3, 64, 4, 129, 65), x.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)], ids=str)
def test_no_elements(recorder: Recorder, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    stats = tensor_stats(torch.empty(shape, dtype=dtype), recorder=recorder)
    assert math.isnan(stats.abs_min) and math.isnan(stats.abs_max) and math.isnan(stats.finite_abs_max)
    assert (stats.numel, stats.is_bad, stats.first_bad) == (0, False, None)


def test_a_scalar_is_bad_at_no_coordinates(recorder: Recorder) -> None:
    assert tensor_stats(torch.tensor(math.nan), recorder=recorder).first_bad == ()


def test_negated_and_conjugated_views_are_read_as_what_they_show(recorder: Recorder) -> None:
    x = torch.tensor([complex(1, math.inf), complex(2, -3), complex(math.nan, 0)])
    imaginary = x.conj().imag
    assert imaginary.is_neg() and x.conj().is_conj()
    stats = tensor_stats(imaginary, recorder=recorder)
    assert (stats.posinf_count, stats.neginf_count) == (0, 1)
    check(recorder, x.conj(), imaginary)


@torch_is_slow
def test_more_elements_than_an_int32_counts(recorder: Recorder) -> None:
    x = torch.zeros(2**31 + 77, dtype=torch.float8_e5m2)
    x.view(torch.uint8)[-3:] = torch.tensor([0x7B, 0x7C, 0xFE], dtype=torch.uint8)
    stats = tensor_stats(x, recorder=recorder)
    assert (stats.numel, stats.first_bad) == (2**31 + 77, (2**31 + 75,))
    assert (stats.abs_min, stats.finite_abs_max, stats.posinf_count, stats.nan_count) == (0.0, 57344.0, 1, 1)


def test_an_expanded_view_of_more_elements_than_memory_holds(recorder: Recorder) -> None:
    x = torch.tensor([[1.0], [-math.inf]]).expand(2, 2**40)
    stats = tensor_stats(x, recorder=recorder)
    assert (stats.numel, stats.neginf_count, stats.first_bad) == (2**41, 2**40, (1, 0))


# lists, threads, memory


def test_a_list_gives_a_row_each_in_order(recorder: Recorder) -> None:
    tensors = [torch.full((n,), float(n)).to(dtype) for n in (0, 1, 70000, 3) for dtype in DTYPES]
    check(recorder, *tensors)
    assert tensor_stats([], recorder=recorder) == []


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(recorder: Recorder, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.arange(3_000_000, dtype=torch.float32) % 1000
        x[1_234_567], x[2_999_999] = -math.inf, math.nan
        check(recorder, x, x[::3], x.half())
    finally:
        torch.set_num_threads(before)


def test_reading_changes_nothing_of_a_tensor(recorder: Recorder) -> None:
    x = torch.randn(100, requires_grad=True)
    y = x * 2
    version, state = y._version, torch.get_rng_state()
    tensor_stats([x, y, y.detach()], recorder=recorder)
    assert y._version == version and y.grad_fn is not None and torch.equal(torch.get_rng_state(), state)
    with torch.inference_mode():
        check(recorder, torch.ones(3))


# what is refused


@pytest.mark.parametrize(
    "x",
    [1.0, None, "tensor", b"1", {"a": torch.ones(1)}, [torch.ones(1), 2], iter(())],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_tensor_is_named(x: object) -> None:
    with pytest.raises(TypeError, match=r"^x(\[1\])? must be a tensor"):
        tensor_stats(x)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.ones(3, device="meta"), "meta"),
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "qint8"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1fn_x2"),
        (torch.nn.UninitializedParameter(), "uninitialized"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_without_elements_to_read_is_refused_by_what_it_is(recorder: Recorder, x: Tensor, reason: str) -> None:
    with pytest.raises(TypeError, match=f"x cannot be read, it is {reason}"):
        tensor_stats(x, recorder=recorder)


def test_freed_storage_is_refused_and_not_read() -> None:
    x = torch.ones(1000)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="storage has been freed"):
        tensor_stats(x, recorder="native")

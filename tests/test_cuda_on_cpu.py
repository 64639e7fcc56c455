"""The device code of csrc/cuda, run on the CPU by its own launcher, against rows computed by value."""

from __future__ import annotations

import ctypes
import math
import random

import numpy as np
import pytest
import torch
from device_on_cpu import DTYPES, FORMATS, Build, Detail, DeviceOnCpu, Placed, Row, compiler, place, same
from expected_rows import SMALLEST_NORMAL, ExpectedRow, detailed_row, expected_row, without_detail
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from special_tensors import NOT_FINITE, NUMBERS, code_type, from_codes, part, strided_views, with_bad

pytestmark = [
    pytest.mark.any_torch,
    pytest.mark.skipif(compiler() is None, reason="running the device code on the CPU needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


LANE_BITS = [32, 16]  # up to compute capability 8.9, and from 9.0 on


@pytest.fixture(scope="session", params=LANE_BITS, ids=lambda bits: f"lanes of {bits} bits")
def small_device(request: pytest.FixtureRequest) -> DeviceOnCpu:
    return DeviceOnCpu(Build(lane_bits=request.param).compile())


@pytest.fixture(scope="session", params=LANE_BITS, ids=lambda bits: f"lanes of {bits} bits")
def one_warp_device(request: pytest.FixtureRequest) -> DeviceOnCpu:
    """Blocks of one warp, which switch least: for tests of very many tensors."""
    return DeviceOnCpu(Build(threads=32, lane_bits=request.param).compile())


@pytest.fixture(scope="session")
def full_device() -> DeviceOnCpu:
    """Blocks and chunks as a CUDA build has them."""
    return DeviceOnCpu(Build(threads=256, chunk_bytes=65536).compile())


@pytest.fixture
def device(small_device: DeviceOnCpu) -> DeviceOnCpu:
    small_device.set_machine()
    return small_device


def check(device: DeviceOnCpu, tensors: list[torch.Tensor | Placed]) -> None:
    """Without detail and with it."""
    for tensor, row, detailed in zip(tensors, device.rows(tensors), device.detailed_rows(tensors), strict=True):
        plain = tensor.tensor if isinstance(tensor, Placed) else tensor
        expected = detailed_row(plain)
        where = f"{plain.dtype} {tuple(plain.shape)}" + (
            f" at {tensor.address % 64}" if isinstance(tensor, Placed) else ""
        )
        assert same(detailed, expected), f"{where}: {detailed} instead of {expected}"
        assert same(row, without_detail(expected)), f"{where}: {row} instead of {expected}"


def check_strided(device: DeviceOnCpu, tensor: torch.Tensor, address: int | None = None, where: object = "") -> None:
    expected = detailed_row(tensor)
    row, detailed = (device.strided_row(tensor, address, detail) for detail in (False, True))
    assert same(detailed, expected), f"{where}: {detailed} instead of {expected}"
    assert same(row, without_detail(expected)), f"{where}: {row} instead of {expected}"


# ---- every format


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_a_format_is_as_wide_as_its_dtype(device: DeviceOnCpu, dtype: torch.dtype) -> None:
    assert device.library.bytes_per_element(FORMATS[dtype]) == dtype.itemsize


NARROW = [dtype for dtype in DTYPES if dtype.itemsize <= 2 and dtype != torch.bool]


@pytest.mark.parametrize("background", [[], [2.0, 3.0]], ids=["alone", "among others"])
@pytest.mark.parametrize("dtype", NARROW, ids=name)
def test_every_code_of_the_narrow_formats(
    one_warp_device: DeviceOnCpu, dtype: torch.dtype, background: list[float]
) -> None:
    """One tensor for each code: the code alone, or as one of 16 to 24 elements, at every position in turn."""
    one_warp_device.set_machine(multiprocessors=3, workers=2)
    codes = 256**dtype.itemsize
    width = 8 * 3 // dtype.itemsize + 8 if background else 1
    others = torch.tensor(background or [0.0]).to(dtype).view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    table = others.numpy().view(code_type(dtype))[np.arange(codes * width) % len(others)].reshape(codes, width)
    table[np.arange(codes), np.arange(codes) % width] = np.arange(codes)
    tensor = from_codes(table.reshape(-1), dtype)
    step = width * dtype.itemsize
    rows = run_table(one_warp_device, tensor, codes, width, step)

    values = tensor.to(torch.float64).numpy().reshape(codes, width)
    magnitudes = np.abs(values)
    finite = np.isfinite(values)
    magnitude_of = np.vectorize(lambda key: one_warp_device.library.key_value(FORMATS[dtype], int(key)))
    has_magnitude, has_finite = (~np.isnan(values)).any(axis=1), finite.any(axis=1)
    abs_min = np.where(has_magnitude, np.where(np.isnan(values), np.inf, magnitudes).min(axis=1), np.nan)
    finite_abs_max = np.where(has_finite, np.where(finite, magnitudes, 0).max(axis=1), np.nan)
    np.testing.assert_array_equal(magnitude_of(rows["abs_min"]), abs_min)
    np.testing.assert_array_equal(magnitude_of(rows["finite_abs_max"])[has_finite], finite_abs_max[has_finite])
    np.testing.assert_array_equal(rows["nan_count"], np.isnan(values).sum(axis=1))
    np.testing.assert_array_equal(rows["posinf_count"], (values == np.inf).sum(axis=1))
    np.testing.assert_array_equal(rows["neginf_count"], (values == -np.inf).sum(axis=1))
    first_bad = np.where(finite.all(axis=1), 2**64 - 1, np.argmin(finite, axis=1).astype(np.uint64))
    np.testing.assert_array_equal(rows["first_bad"], first_bad)
    np.testing.assert_array_equal(rows["numel"], width)

    detailed, details = run_table_with_detail(one_warp_device, tensor, codes, width, step)
    for field, column in rows.items():
        np.testing.assert_array_equal(detailed[field], column)
    there = ~np.isnan(values) & (values != 0)
    below = (magnitudes < SMALLEST_NORMAL[dtype]) & there if dtype in SMALLEST_NORMAL else np.zeros_like(there)
    np.testing.assert_array_equal(details["zero_count"], (values == 0).sum(axis=1))
    np.testing.assert_array_equal(details["subnormal_count"], below.sum(axis=1))
    any_there = there.any(axis=1)
    smallest = np.where(there, magnitudes, np.inf).min(axis=1)[any_there]
    np.testing.assert_array_equal(magnitude_of(details["abs_min_nonzero"][any_there]), smallest)


def run_table_with_detail(
    device: DeviceOnCpu, tensor: torch.Tensor, count: int, width: int, step: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    details = (Detail * count)()
    rows = run_table(device, tensor, count, width, step, details)
    table = np.ctypeslib.as_array(ctypes.cast(details, ctypes.POINTER(ctypes.c_uint64)), (count, len(Detail._fields_)))
    return rows, {field[0]: table[:, i].copy() for i, field in enumerate(Detail._fields_)}


def run_table(
    device: DeviceOnCpu,
    tensor: torch.Tensor,
    count: int,
    width: int,
    step: int,
    details: ctypes.Array[Detail] | None = None,
) -> dict[str, np.ndarray]:
    """Rows of `count` tensors of `width` elements that lie one after the other: an array for each field."""
    data = np.arange(count, dtype=np.uint64) * step + tensor.data_ptr()
    formats = np.full(count, FORMATS[tensor.dtype], dtype=np.uint32)
    numels = np.full(count, width, dtype=np.uint64)
    rows = (Row * count)()
    arguments = [ctypes.c_void_p(array.ctypes.data) for array in (data, formats, numels)]
    assert device.library.run_dense(count, *arguments, rows, details) == 0
    table = np.ctypeslib.as_array(ctypes.cast(rows, ctypes.POINTER(ctypes.c_uint64)), (count, len(Row._fields_)))
    return {field[0]: table[:, i].copy() for i, field in enumerate(Row._fields_)}


WIDE = [dtype for dtype in DTYPES if dtype.itemsize > 2]


@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_special_values_of_the_wide_formats(device: DeviceOnCpu, dtype: torch.dtype) -> None:
    """Zeros, subnormals, extremes, infinities and NaN; for complex numbers every pair of them; alone and together."""
    real = part(dtype)
    bits = 8 * real.itemsize
    sign = 1 << (bits - 1)
    codes = [0, 1, 2, sign - 1, sign, sign + 1, 2**bits - 1]
    if dtype in NUMBERS:
        infinity = NOT_FINITE[real][0]
        one = int(torch.ones(1, dtype=real).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[real.itemsize]))
        codes += [*NOT_FINITE[real], infinity - 1, sign | (infinity - 1), one, sign | one]
    elements = [[code] for code in codes] if real == dtype else [[re, im] for re in codes for im in codes]
    alone = [from_codes(np.array(element, dtype=code_type(dtype)), dtype) for element in elements]
    together = torch.cat([tensor.view(torch.uint8) for tensor in alone]).view(dtype)
    check(device, [*alone, together])


def test_any_byte_that_is_not_zero_is_true(device: DeviceOnCpu) -> None:
    check(device, [torch.tensor(values, dtype=torch.uint8).view(torch.bool) for values in ([2], [0, 255], [7, 9], [0])])


def test_a_complex_modulus_beyond_its_format_is_the_largest_finite_number(device: DeviceOnCpu) -> None:
    for dtype, magnitude in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
        largest = torch.finfo(magnitude).max
        row = device.rows([torch.tensor([complex(largest, largest)], dtype=dtype)])[0]
        assert row["abs_max"] == row["finite_abs_max"] == row["abs_min"] == largest
        assert row["posinf_count"] == 0 and row["first_bad"] is None


# ---- every length, address and position


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_lists_of_tensors_of_any_length_at_any_address(device: DeviceOnCpu, data: st.DataObject) -> None:
    """Addresses that are no multiple of the element's size are among them, and lists of nothing."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    device.set_machine(data.draw(st.integers(1, 7)), data.draw(st.integers(0, 5)), data.draw(st.integers(1, 3)))
    tensors: list[torch.Tensor | Placed] = []
    for _ in range(data.draw(st.integers(0, 5), label="tensors")):
        dtype = data.draw(st.sampled_from(DTYPES))
        count = data.draw(st.one_of(st.integers(0, 70), st.integers(0, 300)), label="elements")
        positions = data.draw(st.lists(st.integers(0, 300), max_size=3), label="not finite")
        tensors.append(place(with_bad(dtype, count, positions, rng), data.draw(st.integers(0, 15), label="offset")))
    check(device, tensors)


@pytest.mark.parametrize("dtype", NUMBERS, ids=name)
def test_one_bad_element_at_every_position(device: DeviceOnCpu, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    cases = [(count, offset) for count in (1, 2, 17, 33, 70) for offset in {0, dtype.itemsize % 16, 8, 13}]
    check(
        device,
        [place(with_bad(dtype, count, [at], rng), offset) for count, offset in cases for at in range(count)],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("multiprocessors", [1, 4])
def test_sizes_around_the_edges_of_chunks(device: DeviceOnCpu, dtype: torch.dtype, multiprocessors: int) -> None:
    """Not finite are the elements at either side of an edge, so that one lost or met twice shows in the counts."""
    device.set_machine(multiprocessors)
    rng = np.random.default_rng(2)
    chunk = 1024 // dtype.itemsize
    tensors: list[torch.Tensor | Placed] = []
    for count in (chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 1, 9 * chunk - 1):
        edges = [edge + side for edge in range(0, count, chunk) for side in (-1, 0) if 0 <= edge + side < count]
        for offset in (0, dtype.itemsize % 16, 3):
            tensors.append(place(with_bad(dtype, count, [*edges, count - 1], rng), offset))
    check(device, tensors)


def test_blocks_and_chunks_as_a_cuda_build_has_them(full_device: DeviceOnCpu) -> None:
    rng = np.random.default_rng(3)
    tensors: list[torch.Tensor | Placed] = []
    for dtype in DTYPES:
        chunk = 65536 // dtype.itemsize
        for count in (3, chunk + 5, 2 * chunk):
            tensors.append(place(with_bad(dtype, count, [0, chunk - 1, chunk, count - 1], rng), dtype.itemsize % 16))
    for multiprocessors, lane_order in ((1, 0), (5, 1), (14, 7)):
        full_device.set_machine(multiprocessors, lane_order)
        check(full_device, tensors)


def test_all_elements_are_counted_where_all_are_bad(device: DeviceOnCpu) -> None:
    for dtype in NUMBERS:
        code = NOT_FINITE[part(dtype)][-1]  # a NaN in every format
        codes = np.full(5001 * dtype.itemsize // part(dtype).itemsize, code, dtype=code_type(dtype))
        row = device.rows([from_codes(codes, dtype)])[0]
        assert row["nan_count"] == row["numel"] == 5001, dtype
        assert row["first_bad"] == (0,) and math.isnan(row["abs_min"]) and math.isnan(row["abs_max"])


# ---- many tensors, many blocks


@pytest.mark.parametrize("seed", range(6))
def test_lists_with_empty_tensors_in_any_place(device: DeviceOnCpu, seed: int) -> None:
    rng = np.random.default_rng(seed)
    device.set_machine(multiprocessors=1 + seed, lane_order=seed)
    counts = [int(rng.choice([0, 0, 0, 1, 5, 300, 3000])) for _ in range(60)]
    counts = [0] * (seed % 3) + counts + [0] * (seed % 4)
    check(device, [with_bad(DTYPES[i % len(DTYPES)], count, [count // 2], rng) for i, count in enumerate(counts)])


@pytest.mark.parametrize("count", [0, 1, 40])
def test_lists_of_nothing_but_empty_tensors(device: DeviceOnCpu, count: int) -> None:
    check(device, [torch.empty(0, dtype=DTYPES[i % len(DTYPES)]) for i in range(count)])


@pytest.mark.parametrize("count", [31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 1500])
def test_long_lists(device: DeviceOnCpu, count: int) -> None:
    """32 tensors are one step of the search for a chunk's tensor, 1024 are two; 64 travel in the launch's arguments."""
    rng = random.Random(count)
    device.set_machine(multiprocessors=11)
    pool = torch.arange(1, 4000, dtype=torch.int32)
    starts = [(rng.randrange(3000), rng.choice([0, 1, 7, 400])) for _ in range(count)]
    check(device, [pool[start : start + length] for start, length in starts])


@pytest.mark.parametrize("lane_order", [0, 1, 2, 99], ids=["rising", "falling", "shuffled", "shuffled otherwise"])
def test_blocks_that_race_on_one_tensor(device: DeviceOnCpu, lane_order: int) -> None:
    """Counts are exact whichever block is first; the workspace is clean each time, or raw_rows raises."""
    rng = np.random.default_rng(4)
    tensor = with_bad(torch.float16, 40_001, [int(p) for p in rng.integers(0, 40_001, 500)], rng)
    expected = expected_row(tensor)
    assert expected["nan_count"] > 0 and expected["posinf_count"] > 0 and expected["neginf_count"] > 0
    device.set_machine(multiprocessors=16, lane_order=lane_order, workers=4)
    for _ in range(10):
        assert same(device.rows([tensor])[0], expected)


# ---- strided tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_strided_tensors_are_read_in_place(device: DeviceOnCpu, dtype: torch.dtype) -> None:
    device.set_machine(multiprocessors=5)
    for view, tensor in strided_views(dtype).items():
        check_strided(device, tensor, where=view)


def test_a_strided_tensor_may_lie_at_any_address(device: DeviceOnCpu) -> None:
    rng = np.random.default_rng(6)
    for dtype in DTYPES:
        base = with_bad(dtype, 200, [40, 41, 160], rng)
        view = base.view(10, 20)[:, ::2]
        for offset in (1, 4, 8, 15):
            placed = place(base, offset)
            check_strided(device, view, placed.address, (dtype, offset))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_strided_tensors_of_any_shape(device: DeviceOnCpu, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    device.set_machine(data.draw(st.integers(1, 6)), data.draw(st.integers(0, 4)))
    sizes = data.draw(st.lists(st.integers(0, 7), max_size=5), label="sizes")
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)), label="strides")
    extent = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size) + 1
    bad = data.draw(st.lists(st.integers(0, extent - 1), max_size=3), label="not finite")
    base = with_bad(data.draw(st.sampled_from(DTYPES)), extent, bad, rng)
    check_strided(device, base.as_strided(sizes, strides))


@pytest.mark.parametrize("sizes", [(3, 5, 7), (2**20, 3, 2**13), (2**33 + 5,), (2, 2**31 + 1, 2)])
def test_offsets_of_elements_in_tensors_of_any_size(device: DeviceOnCpu, sizes: tuple[int, ...]) -> None:
    """Computed in 32 bits up to 2**32 - 1 elements, in 64 beyond; strides leave gaps, so nothing is merged."""
    strides = [2]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size + 1)
    total = math.prod(sizes)
    c_sizes, c_strides = ((ctypes.c_int64 * len(sizes))(*values) for values in (sizes, strides))
    rng = random.Random(7)
    for index in [0, 1, total - 1, *(rng.randrange(total) for _ in range(200))]:
        position: list[int] = []
        rest = index
        for size in reversed(sizes):
            rest, coordinate = divmod(rest, size)
            position.insert(0, coordinate)
        expected = sum(coordinate * stride for coordinate, stride in zip(position, strides, strict=True))
        assert device.library.strided_offset(len(sizes), c_sizes, c_strides, index) == expected


# ---- the launcher


@pytest.mark.parametrize(
    ("dtype", "numel", "chunks"),
    [
        (torch.uint8, 2**40, 2**24),
        (torch.uint8, 2**40 + 1, 2**24 + 1),
        (torch.complex128, 2**36 - 1, 2**24),
        (torch.float32, 2**62, 2**48),
        (torch.float32, 1, 1),
        (torch.float32, 0, 0),
    ],
)
def test_chunks_of_huge_tensors(full_device: DeviceOnCpu, dtype: torch.dtype, numel: int, chunks: int) -> None:
    assert full_device.library.count_chunks(FORMATS[dtype], numel) == chunks


INVALID_VALUE = 1  # cudaErrorInvalidValue


def test_a_list_with_more_chunks_than_the_table_can_number_is_refused(device: DeviceOnCpu) -> None:
    numel = 2**32 * 1024  # bytes, in chunks of 1024
    arguments = (ctypes.c_uint64(0), ctypes.c_uint32(FORMATS[torch.uint8]), ctypes.c_uint64(numel), Row())
    error = device.library.run_dense(1, *(ctypes.byref(argument) for argument in arguments), None)
    assert error == INVALID_VALUE


def test_a_launch_has_at_most_the_blocks_that_run_at_once(device: DeviceOnCpu) -> None:
    device.set_machine(multiprocessors=9)
    for bytes_, blocks in ((0, 1), (1, 1), (1024, 1), (1025, 2), (9 * 1024, 9), (100 * 1024, 9)):
        device.rows([torch.zeros(bytes_, dtype=torch.uint8)])
        assert device.library.get_last_grid() == blocks


def test_a_device_is_asked_for_its_size_once(device: DeviceOnCpu) -> None:
    device.set_machine(multiprocessors=23)
    tensor = torch.ones(100)
    before = device.library.get_attribute_queries()
    for _ in range(5):
        check(device, [tensor])
    assert device.library.get_attribute_queries() == before + 2  # once for each kernel


def test_the_error_of_a_launch_is_returned_and_left_to_nobody_else(device: DeviceOnCpu) -> None:
    no_kernel_image = 209
    for run in (device.rows, lambda tensors: device.strided_row(tensors[0])):
        device.library.set_next_launch(no_kernel_image)
        with pytest.raises(AssertionError, match=str(no_kernel_image)):
            run([torch.ones(3)])
        assert device.library.get_last_error() == 0
        check(device, [torch.ones(3)])


def test_a_stream_is_done_or_not_ready_or_failed(device: DeviceOnCpu) -> None:
    """What a query finds is left to nobody else's next check, "not ready" included."""
    not_ready, device_assert = 600, 710
    assert device.library.not_ready() == not_ready
    for state in (0, not_ready, device_assert):
        device.library.set_stream_state(state)
        assert device.library.query_stream() == state
        assert device.library.get_last_error() == 0
    device.library.set_stream_state(0)


def test_a_row_of_nothing_says_so(device: DeviceOnCpu) -> None:
    row: ExpectedRow = device.rows([torch.empty(0)])[0]
    assert row["numel"] == 0 and row["first_bad"] is None
    assert all(math.isnan(row[field]) for field in ("abs_min", "abs_max", "finite_abs_max"))

"""What a graph reads of a tensor, against the numbers that are in it."""

import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code

from overflowstat.compiled import operation
from overflowstat.compiled.row import FIRST_SIZE, FIRST_TENSOR, MOST_SIZES, MOST_TENSORS, ROWS, empty_rows, is_bad
from overflowstat.compiled.sites import new_site, site
from overflowstat.recorder import RecorderName
from overflowstat.row import NOTHING, NonFinite
from overflowstat.stats import TensorStats

NAN, INF = math.nan, math.inf
is_native = True

EVERY = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]


@pytest.fixture(autouse=True)
def reads_on(recorder_name: RecorderName, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads: the extension's operations, or plain ones."""
    monkeypatch.setattr(sys.modules[__name__], "is_native", recorder_name == "native")


def site_of(*labels: str) -> int:
    """Of tensors of these labels, in a module of a type of its own."""
    return new_site(type("Module", (nn.Module,), {}), labels, [""] * len(labels))


def read_into(tensors: Sequence[Tensor], rows: Tensor, number: int) -> None:
    operation.read_into(tensors, rows, number, native=is_native)


def row_of(number: int, rows: Tensor) -> Tensor:
    [row] = rows[rows[:, 1] == number].unbind()
    return row


def read(*tensors: Tensor, times: int = 1) -> list[tuple[str, TensorStats | str]]:
    """(label, content) as the rows give it."""
    number, rows = site_of(*(f"t{i}" for i in range(len(tensors)))), empty_rows()
    for _ in range(times):
        read_into(tensors, rows, number)
    assert row_of(number, rows)[0] == times
    return lines(number, rows)


def lines(number: int, rows: Tensor) -> list[tuple[str, TensorStats | str]]:
    place, row = site(number), row_of(number, rows)
    found = [(label, content) for (label, _), content in zip(place.shown, place.contents(row.tolist()), strict=True)]
    any_is_bad = any(content.is_bad for _, content in found if isinstance(content, TensorStats))
    assert is_bad(row[None]).tolist() == [any_is_bad]
    return found


def stats(tensor: Tensor) -> TensorStats:
    [(_, found)] = read(tensor)
    assert isinstance(found, TensorStats)
    return found


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize(
    ("numbers", "abs_min", "abs_max"),
    [
        ([1.0, -2.0, 0.5], 0.5, 2.0),
        ([-8.0, -4.0], 4.0, 8.0),
        ([4.0], 4.0, 4.0),
        ([0.0, -0.0], 0.0, 0.0),
        ([0.0, 3.0, -3.0], 0.0, 3.0),
    ],
)
def test_of_finite_numbers_the_magnitudes_are_exact(
    dtype: torch.dtype, numbers: list[float], abs_min: float, abs_max: float
) -> None:
    found = stats(torch.tensor(numbers).to(dtype))
    assert (found.abs_min, found.abs_max, found.finite_abs_max) == (abs_min, abs_max, abs_max)
    assert (found.is_bad, found.first_bad, found.is_counted, found.dtype) == (False, None, True, dtype)
    assert (found.shape, found.numel) == ((len(numbers),), len(numbers))


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize(
    ("numbers", "kinds", "abs_min", "abs_max"),
    [
        ([1.0, INF, -2.0], NonFinite.POSINF, 1.0, INF),
        ([1.0, -INF], NonFinite.NEGINF, 1.0, INF),
        ([-INF, INF, 4.0], NonFinite.POSINF | NonFinite.NEGINF, 4.0, INF),
        ([INF, INF], NonFinite.POSINF, INF, INF),
        ([-INF], NonFinite.NEGINF, INF, INF),
        ([1.0, NAN], NonFinite.NAN, NAN, NAN),
        ([NAN, 1.0, 2.0], NonFinite.NAN, NAN, NAN),
        ([NAN, INF], NonFinite.NAN, NAN, NAN),  # of infinities nothing is known then
    ],
)
def test_the_kinds_of_bad_numbers_are_told_and_not_how_many(
    dtype: torch.dtype, numbers: list[float], kinds: NonFinite, abs_min: float, abs_max: float
) -> None:
    found = stats(torch.tensor(numbers).to(dtype))
    assert (found.non_finite, found.is_counted, found.first_bad) == (kinds, False, ())
    assert [found.abs_min, found.abs_max] == pytest.approx([abs_min, abs_max], nan_ok=True)
    assert math.isnan(found.finite_abs_max)


@pytest.mark.parametrize(
    ("tensor", "abs_min", "abs_max"),
    [
        (torch.tensor([3, -7], dtype=torch.int8), 3, 7),
        (torch.tensor([-5, 0], dtype=torch.int64), 0, 5),
        (torch.tensor([-128], dtype=torch.int8), 128, 128),
        (torch.tensor([-128, 3], dtype=torch.int8), 3, 128),
        (torch.tensor([-(2**15)], dtype=torch.int16), 2**15, 2**15),
        (torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32), 2**31 - 1, 2**31),
        (torch.tensor([-(2**63)]), 2**63, 2**63),
        (torch.tensor([2**53 + 1]), 2**53, 2**53),  # as float64 has it
        (torch.tensor([200, 255], dtype=torch.uint8), 200, 255),
        (torch.tensor([60000, 7], dtype=torch.uint16), 7, 60000),
        (torch.tensor([2**31, 9], dtype=torch.uint32), 9, 2**31),
        (torch.tensor([True, False]), 0, 1),
        (torch.tensor([True]), 1, 1),
    ],
)
def test_whole_numbers_are_whole(tensor: Tensor, abs_min: int, abs_max: int) -> None:
    found = stats(tensor)
    assert (found.abs_min, found.abs_max) == (abs_min, abs_max)
    assert type(found.abs_max) is int and found.non_finite is NOTHING


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("zeros", [[-0.0], [-0.0, -0.0], [0.0, -0.0], [0.0]])
def test_no_magnitude_is_a_negative_zero(zeros: list[float], backend: str) -> None:
    number, rows = site_of("output"), empty_rows()

    def run(x: Tensor) -> Tensor:
        read_into([x], rows, number)
        return x + 1

    torch.compile(run, backend=backend)(torch.tensor(zeros))
    found = row_stats(number, rows)
    assert [str(found.abs_min), str(found.abs_max), str(found.finite_abs_max)] == ["0.0"] * 3


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_row_can_be_written_outside_of_inference_mode(device: torch.device | str) -> None:
    with torch.inference_mode():
        rows = empty_rows(device)
    assert not rows.is_inference()
    number = site_of("output")
    read_into([torch.tensor([2.0])], rows, number)
    assert row_stats(number, rows).abs_max == 2.0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_count_by_their_modulus(dtype: torch.dtype) -> None:
    found = stats(torch.tensor([3 + 4j, -1j], dtype=dtype))
    assert (found.abs_min, found.abs_max) == (1.0, 5.0)
    assert stats(torch.tensor([complex(0, -INF), 1 + 0j], dtype=dtype)).non_finite is NonFinite.POSINF


def test_what_has_no_elements_is_shown_as_that() -> None:
    found = stats(torch.empty(0, 3))
    assert (found.numel, found.shape, found.is_bad) == (0, (0, 3), False)
    assert math.isnan(found.abs_max)


def test_what_cannot_be_read_is_a_word_and_moves_no_other() -> None:
    found = read(torch.tensor([1.0, 2.0]), torch.zeros(2, 2).to_sparse(), torch.tensor([4.0]))
    assert [label for label, _ in found] == ["t0", "t1", "t2"]
    assert found[1][1] == "sparse_coo"
    assert isinstance(found[2][1], TensorStats) and found[2][1].abs_max == 4.0


def test_calls_are_merged_with_their_extremes() -> None:
    number, rows = site_of("output"), empty_rows()
    for numbers in ([1.0, 8.0], [0.25, 2.0], [-3.0, 4.0]):
        read_into([torch.tensor(numbers)], rows, number)
    [(_, found)] = lines(number, rows)
    assert isinstance(found, TensorStats)
    assert (int(row_of(number, rows)[0]), found.abs_min, found.abs_max) == (3, 0.25, 8.0)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_bad_call_among_others_stays_bad(bad: float, at: int) -> None:
    number, rows = site_of("output"), empty_rows()
    for i in range(3):
        read_into([torch.tensor([1.0, bad if i == at else 2.0])], rows, number)
    [(_, found)] = lines(number, rows)
    assert isinstance(found, TensorStats) and found.is_bad


@pytest.mark.parametrize("more", [0, 1, 5])
def test_the_last_of_many_stands_for_those_that_are_left(more: int) -> None:
    count = MOST_TENSORS + more
    tensors = [torch.tensor([float(i + 1)]) for i in range(count)]
    found = read(*tensors)
    assert len(found) == MOST_TENSORS
    label, last = found[-1]
    assert label == (f"t{MOST_TENSORS - 1}, and {more} more" if more else f"t{MOST_TENSORS - 1}")
    assert isinstance(last, TensorStats) and (last.abs_min, last.abs_max) == (MOST_TENSORS, count)
    tensors[-1][0] = NAN
    last = read(*tensors)[-1][1]
    assert isinstance(last, TensorStats) and last.has_nan


def test_what_is_unreadable_among_many_is_not_counted_with_them() -> None:
    tensors = [torch.ones(1), torch.zeros(2, 2).to_sparse()] + [torch.ones(1)] * MOST_TENSORS
    assert read(*tensors)[-1][0] == f"t{MOST_TENSORS}, and 1 more"


def test_sizes_that_a_graph_does_not_fix_are_those_of_the_call() -> None:
    number, rows = site_of("a", "b"), empty_rows()

    @torch.compile(backend="aot_eager", dynamic=True, fullgraph=True)
    def run(a: Tensor, b: Tensor) -> Tensor:
        read_into([a, b], rows, number)
        return a.sum() + b.sum()

    for height, width in ((2, 3), (5, 7), (4, 9)):
        run(torch.ones(height, width), torch.ones(width, 4, height))
        shapes = [found.shape for _, found in lines(number, rows) if isinstance(found, TensorStats)]
        assert shapes == [(height, width), (width, 4, height)]


@pytest.mark.parametrize("view", ["transposed", "every other", "expanded", "negative", "conjugate"])
def test_a_view_is_read_as_it_is_seen(view: str) -> None:
    base = torch.tensor([[1.0, -2.0, 9.0], [4.0, 0.5, -9.0]])
    tensor, abs_min, abs_max = {
        "transposed": (base.t(), 0.5, 9.0),
        "every other": (base[:, :2][1:], 0.5, 4.0),
        "expanded": (base[:1, :1].expand(5, 7), 1.0, 1.0),
        "negative": (torch._neg_view(base[:, :2]), 0.5, 4.0),
        "conjugate": (torch.complex(base, base * 0).conj(), 0.5, 9.0),
    }[view]
    found = stats(tensor)
    assert (found.abs_min, found.abs_max, found.shape) == (abs_min, abs_max, tuple(tensor.shape))


def test_infinities_of_a_negative_view_have_the_sign_that_is_seen() -> None:
    assert stats(torch._neg_view(torch.tensor([INF, 1.0]))).non_finite is NonFinite.NEGINF


def test_what_has_no_elements_this_time_is_shown_as_that() -> None:
    if not is_native:
        pytest.skip("plain reductions are none of no elements")
    number, rows = site_of("a"), empty_rows()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(a: Tensor, some: Tensor) -> Tensor:
        read_into([a[some]], rows, number)
        return a.sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run(torch.tensor([1.0, INF]), torch.tensor([False, False]))
        assert math.isnan(row_stats(number, rows).abs_max) and not row_stats(number, rows).is_bad
        run(torch.tensor([1.0, INF]), torch.tensor([False, True]))
        assert row_stats(number, rows).non_finite is NonFinite.POSINF


def row_stats(number: int, rows: Tensor) -> TensorStats:
    [(_, found)] = lines(number, rows)
    assert isinstance(found, TensorStats)
    return found


def test_more_sizes_than_there_is_room_for_are_fixed_and_right() -> None:
    count = MOST_SIZES + 2
    number, rows = site_of(*map(str, range(count))), empty_rows()

    @torch.compile(backend="aot_eager", dynamic=True)
    def run(*tensors: Tensor) -> Tensor:
        read_into(tensors, rows, number)
        return tensors[0].sum()

    for first in (2, 30):
        run(*(torch.ones(first + i) for i in range(count)))
        shapes = [found.shape for _, found in lines(number, rows) if isinstance(found, TensorStats)]
        assert shapes == [(first + i,) for i in range(count)]


def test_a_row_has_a_place_for_each_thing() -> None:
    assert empty_rows().tolist() == [[0.0] + [-INF] * (FIRST_TENSOR - 1 + 3 * MOST_TENSORS)] * ROWS


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_operation_is_one_that_compilers_may_take_at_its_word(requires_grad: bool) -> None:
    a = torch.randn(3, 4, requires_grad=requires_grad)
    number = site_of("a", "b")
    tensors = [a, torch.ones(2, dtype=torch.int32)]
    operations: Any = torch.ops.overflowstat
    torch.library.opcheck(operations.read_v3.default, (tensors, empty_rows(), number, is_native))
    if is_native:
        found = [operations.extremes_v1(tensor) for tensor in tensors]
        torch.library.opcheck(operations.extremes_v1.default, (a.detach(),))
        kept = (empty_rows(), 1, number, [3], found, FIRST_SIZE, FIRST_TENSOR)
        torch.library.opcheck(operations.keep_v2.default, kept)
        # It tells the time, and so gives no two times the same, which is the other check.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(operations.kept_v2.default, kept, test_utils=checks)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("calls", "left"), [(1, ["keep_v2"]), (2, ["kept_v2", "kept_v2"])])
def test_a_row_that_is_written_once_is_written_in_place(calls: int, left: list[str]) -> None:
    if not is_native:
        pytest.skip("plain reductions write to their rows")
    number, rows = site_of(), empty_rows()

    def run(x: Tensor) -> Tensor:
        for _ in range(calls):
            read_into([x], rows, number)
            x = x * 2
        return x

    x = torch.tensor([1.0, -3.0])
    _, programs = run_and_get_code(torch.compile(run, fullgraph=True), x)
    assert re.findall(r"\boverflowstat\.(ke\w+)\.default\(", "".join(programs)) == left
    row = row_of(number, rows).tolist()
    assert row[0] == calls and row[FIRST_TENSOR : FIRST_TENSOR + 3] == [3.0 * calls, 3.0 * calls, -1.0]


def operations(function: Callable[..., Tensor], *given: Tensor) -> list[str]:
    """Names of those in the graph that is made of it."""
    found: list[str] = []

    def note(graph: torch.fx.GraphModule, examples: object) -> torch.fx.GraphModule:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(function, backend=aot_autograd(fw_compiler=note), fullgraph=True)(*given)
    return found


def reads_in(names: list[str]) -> int:
    return sum(name.startswith(("overflowstat.extremes_v1", "aten.amax")) for name in names)


@pytest.mark.usefixtures("nothing_compiled")
def test_what_one_module_gives_and_others_take_is_read_once() -> None:
    rows, number = [empty_rows() for _ in range(3)], site_of()

    def run(x: Tensor) -> Tensor:
        y = x * 2
        z = y + 1
        read_into([x, y], rows[0], number)
        read_into([y, z], rows[1], number)
        read_into([y, z, x], rows[2], number)
        return z

    with torch.no_grad():
        assert reads_in(operations(run, torch.tensor([1.0, -3.0]))) == 3
    maxima = [row_of(number, of_module)[FIRST_TENSOR : FIRST_TENSOR + 9].view(3, 3) for of_module in rows]
    abs_max = [[max(float(found[0]), float(found[1])) for found in of_row] for of_row in maxima]
    assert abs_max == [[3.0, 6.0, -INF], [6.0, 5.0, -INF], [6.0, 5.0, 3.0]]


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("write", ["in place", "by a view", "by the base", "to memory that it was made of"])
@pytest.mark.parametrize("is_input", [False, True])
def test_what_was_written_to_in_between_is_read_again(write: str, is_input: bool) -> None:
    rows, number = [empty_rows() for _ in range(3)], site_of()

    def run(x: Tensor) -> Tensor:
        y = x if is_input else x * 2
        part = y[:1]
        read_into([part if write == "by the base" else y], rows[0], number)
        if write == "in place":
            y.add_(INF)
        elif write == "by a view":
            part.mul_(INF)
        elif write == "by the base":
            y.fill_(INF)
        else:
            y.detach().view(2, 1)[0].fill_(INF)
        read_into([part if write == "by the base" else y], rows[1], number)
        read_into([part if write == "by the base" else y], rows[2], number)
        return y + 1

    with torch.no_grad():
        assert reads_in(operations(run, torch.tensor([1.0, 3.0]))) == 2
    assert is_bad(torch.stack(rows)).any(1).tolist() == [False, True, True]

"""What the gradients that a node got and made prove of the cause, and where a little more or less proves nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gradient_models import around

from overflowstat import Monitor, NonFiniteError, TensorStats, tensor_stats
from overflowstat.gradient_cause import AGAIN, SUM, advise_gradient, cause_of_one, only_operation
from overflowstat.recorder import RecorderName
from overflowstat.verdict import Kind

INF, NAN = float("inf"), float("nan")
HALF, WIDE = torch.float16, torch.float32


def stats(*numbers: float, dtype: torch.dtype = WIDE) -> TensorStats:
    found = tensor_stats(torch.tensor(numbers, dtype=dtype), recorder="torch")
    assert isinstance(found, TensorStats)
    return found


def kind_of(
    operations: set[str],
    got: TensorStats,
    made: TensorStats,
    is_input_finite: bool = False,
    is_output_finite: bool = False,
) -> Kind | None:
    found = cause_of_one(operations, got, made, is_input_finite, is_output_finite)
    return None if found is None else found.kind


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        # limit / (1 / (2 * sqrt(smallest subnormal))), and half of that for what is rounded on the way:
        (torch.float16, 15.99),  # 65504 * 2 * sqrt(2**-24) / 2
        (torch.float32, 1.27e16),  # 3.4e38 * 2 * sqrt(2**-149) / 2
        (torch.bfloat16, 3.2e18),  # 3.39e38 * 2 * sqrt(2**-133) / 2
        (torch.float64, 3.9e146),  # 1.798e308 * 2 * sqrt(2**-1074) / 2
    ],
)
def test_an_infinity_of_a_root_is_that_at_0_if_no_other_number_has_so_steep_a_one(
    dtype: torch.dtype, largest: float
) -> None:
    made = stats(INF, 1.0, dtype=dtype)
    assert kind_of({"SqrtBackward0"}, stats(0.99 * largest, dtype=dtype), made) == "division-by-zero"
    assert kind_of({"SqrtBackward0"}, stats(1.05 * largest, dtype=dtype), made) is None


def test_the_bound_of_the_root_holds_for_every_number_of_float16() -> None:
    x = torch.arange(1, 0x7C00, dtype=torch.int16).view(HALF).requires_grad_()  # all that are positive and finite
    x.sqrt().backward(torch.full_like(x, 15.99))  # type: ignore[no-untyped-call]
    assert x.grad is not None and bool(x.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", [torch.acos, torch.asin])
def test_the_bound_of_the_arcs_holds_for_every_number_below_1(dtype: torch.dtype, function: Any) -> None:
    one = torch.ones((), dtype=dtype).view(torch.int16).item()
    x = torch.arange(0, int(one), dtype=torch.int16).view(dtype).requires_grad_()
    largest = torch.finfo(dtype).max / (2 / torch.finfo(dtype).eps) ** 0.5 / 2
    got = torch.full_like(x, 0.99 * largest)
    function(x).backward(got)
    assert x.grad is not None and bool(x.grad.isfinite().all())
    name = f"{function.__name__.title()}Backward0"
    assert kind_of({name}, stats(0.98 * largest, dtype=dtype), stats(INF, dtype=dtype)) == "division-by-zero"
    assert kind_of({name}, stats(1.03 * largest, dtype=dtype), stats(INF, dtype=dtype)) is None


def test_two_of_a_pole_may_be_steeper_than_one(recorder_name: RecorderName) -> None:
    """The fourth root of the smallest number, whose gradient by a large one is beyond the limit, though none is 0."""
    model = around(lambda x: x.sqrt().sqrt())
    x = torch.tensor([[1e-42, 1.0]])
    with Monitor(model, gradients=True, recorder=recorder_name, sinks=[]), pytest.raises(NonFiniteError) as error:
        (model(x).sum() * 1e10).backward()
    verdict = error.value.verdict
    assert verdict is not None
    assert (verdict.module, verdict.operation, verdict.kind) == ("middle", "SqrtBackward0", "unknown")
    # As one it would be.
    assert kind_of({"SqrtBackward0"}, stats(1e10), stats(INF)) == "division-by-zero"
    assert kind_of({"SqrtBackward0", AGAIN}, stats(1e10), stats(INF)) is None


def test_what_was_broadcast_is_added_up_before_the_root() -> None:
    both = {"SqrtBackward0", "WhereBackward0"}
    # 3.4e38 * 2 * sqrt(2**-149) / 2 / 2**40 = 1.158e4
    assert kind_of(both, stats(1.15e4), stats(INF)) == "division-by-zero"
    assert kind_of(both, stats(1.17e4), stats(INF)) is None


def test_a_weights_gradient_may_have_been_added_to() -> None:
    assert cause_of_one({"SqrtBackward0"}, stats(1.0), stats(INF), True, True, is_weights=True) is None


def test_a_nan_of_a_root_is_0_by_0_only_if_the_root_itself_is_known_to_be_finite() -> None:
    got, made = stats(0.0, 1.0), stats(NAN, 1.0)
    assert kind_of({"SqrtBackward0"}, got, made, is_output_finite=True) == "division-by-zero"
    assert kind_of({"SqrtBackward0"}, got, made, is_input_finite=True) is None  # of a negative number, perhaps
    assert kind_of({"SqrtBackward0", "WhereBackward0"}, got, made, True, True) is None  # that is left out


@pytest.mark.parametrize(
    ("operation", "kind"), [("LogBackward0", "division-by-zero"), ("ExpBackward0", "zero-times-inf")]
)
def test_a_nan_of_log_and_exp_needs_a_finite_input(operation: str, kind: Kind) -> None:
    got, nan, inf = stats(0.0, 1.0), stats(NAN, 1.0), stats(INF, 1.0)
    for operations in ({operation}, {operation, "WhereBackward0"}, {operation, "WhereBackward0", "SumBackward1"}):
        assert kind_of(operations, got, nan, is_input_finite=True) == kind
        assert kind_of(operations, got, nan, is_output_finite=True) is None
        assert kind_of(operations, got, inf, is_input_finite=True) is None  # a small number would do
    assert kind_of({operation, "MulBackward0"}, got, nan, True, True) is None


def test_casts() -> None:
    got, made = stats(1e5, 1.0), stats(INF, 1.0, dtype=HALF)
    assert kind_of({"ToCopyBackward0"}, got, made) == "cast-overflow"
    assert kind_of({"ToCopyBackward0", "SumBackward0"}, got, made) == "cast-overflow"
    assert kind_of({"ToCopyBackward0"}, got, stats(NAN, INF, dtype=HALF)) is None
    assert kind_of({"ToCopyBackward0"}, stats(65504.0), made) is None
    assert kind_of({"ToCopyBackward0", "MulBackward0"}, got, made) is None


@pytest.mark.parametrize("operation", ["MmBackward0", "AddmmBackward0", "BmmBackward0", "ConvolutionBackward0"])
def test_products_need_a_finite_output(operation: str) -> None:
    got = stats(1e3, dtype=HALF)
    for made in (stats(INF, dtype=HALF), stats(NAN, INF, dtype=HALF)):
        assert kind_of({operation}, got, made, is_output_finite=True) == "accumulation-overflow"
        assert kind_of({operation}, got, made, is_input_finite=True) is None
        assert kind_of({operation, "SliceBackward0"}, got, made, True, True) is None  # of which a part was shown
        assert kind_of({operation, SUM}, got, made, True, True) is None


def test_under_autocast_the_conversion_to_the_wider_dtype_is_not_to_blame() -> None:
    both = {"ToCopyBackward0", "AddmmBackward0"}
    got, made = stats(1e3, dtype=HALF), stats(INF)
    assert kind_of(both, got, made, is_output_finite=True) == "accumulation-overflow"
    assert only_operation(both, got, made) == "AddmmBackward0"
    assert kind_of(both, stats(1e3), stats(INF), is_output_finite=True) is None  # it may be that on the way
    assert only_operation(both, stats(1e3), stats(INF)) is None


def test_sums() -> None:
    got, made = stats(3e38), stats(INF)
    assert kind_of({SUM}, got, made) == "arithmetic-overflow"
    assert kind_of({"EmbeddingBackward0"}, got, made) == "accumulation-overflow"
    assert kind_of({SUM, "MulBackward0"}, got, made) is None
    assert only_operation({SUM}, got, made) is None


def test_what_was_bad_before_proves_nothing_nor_what_cannot_be_told_of() -> None:
    made = stats(INF)
    assert kind_of({"SqrtBackward0"}, stats(INF, 1.0), made, True, True) is None
    assert kind_of({"SinBackward0"}, stats(1.0), made, True, True) is None
    assert kind_of(set(), stats(1.0), made, True, True) is None
    assert kind_of({"SqrtBackward0"}, replace(stats(1.0), dtype=torch.complex64), made, True, True) is None


def test_advice() -> None:
    assert "eps" in str(advise_gradient("division-by-zero", is_half=False))
    assert "GradScaler" in str(advise_gradient("accumulation-overflow", is_half=True))
    assert advise_gradient("accumulation-overflow", is_half=False) is None
    assert advise_gradient("unknown", is_half=True) is None

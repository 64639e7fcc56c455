"""Which operation an element comes from, told for memory: views, parts, and what is written over."""

import pytest
import torch
from torch import Tensor

from overflowstat.provenance import UNMET, Provenance, not_finite

INF, NAN = float("inf"), float("nan")


def bad(*shape: int) -> Tensor:
    return torch.full(shape, NAN)


def test_a_view_has_what_was_put_for_all_of_it() -> None:
    provenance, x = Provenance(), bad(2, 3)
    provenance.put(x, 7)
    assert provenance.numbers(x.T[1:], None) == {7}
    assert provenance.numbers(bad(2, 3), None) == {UNMET}


def test_parts_of_one_memory_have_numbers_of_their_own() -> None:
    provenance, x = Provenance(), bad(4, 3)
    provenance.put(x[0], 1)
    provenance.put(x[:, 2], 2)
    assert provenance.numbers(x[0], None) == {1, 2}
    assert provenance.numbers(x[0, :2], None) == {1}
    assert provenance.numbers(x[:, 2], None) == {2}
    assert provenance.numbers(x[1:, :2], None) == {UNMET}
    which = torch.zeros(4, 3, dtype=torch.bool)
    which[0, 1] = which[3, 2] = True
    assert provenance.numbers(x, which) == {1, 2}


def test_numbers_of_each_element_are_kept() -> None:
    provenance, x = Provenance(), bad(2, 2)
    provenance.put(x, torch.tensor([[1, 2], [3, 1]], dtype=torch.int32))
    assert provenance.numbers(x[1], None) == {1, 3}
    provenance.put(x, 5)
    assert provenance.numbers(x, None) == {5}


def test_what_was_there_is_met_where_nothing_has_written() -> None:
    provenance, x = Provenance(), bad(4)
    provenance.put(x[1:2], 1)
    provenance.meet(x, 9)
    assert provenance.numbers(x[:1], None) == {9} and provenance.numbers(x[1:2], None) == {1}
    provenance.meet(x, 10)
    assert provenance.numbers(x, None) == {1, 9}
    provenance.forget(x)
    assert provenance.numbers(x, None) == {UNMET}


def test_memory_seen_as_another_dtype_has_the_earliest() -> None:
    provenance, x = Provenance(), bad(4)
    provenance.put(x[:2], 3)
    provenance.put(x[2:], 2)
    assert provenance.numbers(x.view(torch.float16), None) == {2}


def test_what_overlaps_itself_or_has_no_strides_is_told_of_as_one() -> None:
    provenance = Provenance()
    row = bad(1, 3)
    provenance.put(row.expand(4, 3), torch.full((4, 3), 6, dtype=torch.int32))
    assert provenance.numbers(row, None) == {6}
    sparse = torch.eye(2).to_sparse()
    provenance.put(sparse, 4)
    assert provenance.numbers(sparse, None) == {4}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_which_elements_are_not_finite(dtype: torch.dtype) -> None:
    found = not_finite(torch.tensor([1.0, INF, NAN, -INF]).to(dtype))
    assert found is not None and found.tolist() == [False, True, True, True]


def test_integers_are_all_finite() -> None:
    assert not_finite(torch.ones(2, dtype=torch.int64)) is None

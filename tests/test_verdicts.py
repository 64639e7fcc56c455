"""The corpus of tests/verdicts: small models that go bad for a reason that was written down before they were run."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from verdicts import division, domains, given, gradients, masks, mixed, overflow, real_models, wrapped
from verdicts.case import Case

from overflowstat import Monitor, NonFiniteError
from overflowstat.recorder import RecorderName
from overflowstat.verdict import KINDS, Verdict

FILES = (overflow, masks, division, domains, given, gradients, mixed, wrapped, real_models)
CASES: list[Case] = [case for each in FILES for case in each.CASES]


@contextmanager
def memory_that_is_not_initialised_is_nan() -> Iterator[None]:
    """As it often is, by luck: torch.empty gives NaN in its deterministic mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@cache
def verdict_of(name: str, recorder_name: RecorderName) -> Verdict:
    """Run once, for all tests that ask for it."""
    (case,) = (case for case in CASES if case.name == name)
    torch.manual_seed(0)
    model, run = case.build()
    monitor = Monitor(model, recorder=recorder_name, sinks=[], **case.options)
    with memory_that_is_not_initialised_is_nan(), pytest.raises(NonFiniteError) as raised:
        run()
    monitor.disable()
    assert raised.value.verdict is not None
    return raised.value.verdict


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cause_is_the_one_that_was_written_down(case: Case, recorder_name: RecorderName) -> None:
    verdict = verdict_of(case.name, recorder_name)
    found = verdict.module, verdict.label, verdict.produced, verdict.operation, verdict.source, verdict.kind
    expected = case.module, case.label, case.produced, case.operation, case.expected_source(), case.kind
    assert found == expected, verdict.text


def test_every_kind_has_a_case() -> None:
    assert {case.kind for case in CASES} == set(KINDS)
    assert len({case.name for case in CASES}) == len(CASES) >= 80


def test_the_tally(recorder_name: RecorderName, in_summary: Callable[[str], None]) -> None:
    """How many are named exactly, in each of the four, and how often the kind is not known."""
    tally: Counter[str] = Counter()
    for case in CASES:
        verdict = verdict_of(case.name, recorder_name)
        tally["module"] += verdict.module == case.module
        tally["operation"] += verdict.operation == case.operation
        tally["line"] += verdict.source == case.expected_source()
        tally["kind"] += verdict.kind == case.kind
        tally["unknown"] += verdict.kind == "unknown"
    counted = ", ".join(f"{what} {number}" for what, number in tally.items())
    in_summary(f"of {len(CASES)} verdicts on the {recorder_name} recorder are exact: {counted}")
    unknown = sum(case.kind == "unknown" for case in CASES)
    exactly = dict.fromkeys(("module", "operation", "line", "kind"), len(CASES))
    assert tally == {**exactly, "unknown": unknown}

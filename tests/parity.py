"""Run a scenario under the reference, `transformers.debug_utils`, and under ours, and compare what a user sees."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers.debug_utils as reference_module
from models import Subject
from torch import nn

import overflowstat
from overflowstat.recorder import RecorderName

Reference: Any = reference_module.DebugUnderflowOverflow
Drive = Callable[[Subject, Any], None]

COMPARED_LINES = "compared lines"  # property of a test: subject, recorder, number


@dataclass(frozen=True)
class Outcome:
    """What a user can see of a run: what was printed, what was raised, what the debugger's attributes say after it."""

    stdout: str
    error: Exception | None
    frames: list[str]
    batch_number: int
    total_calls: int
    detected_overflow: bool
    names: list[str]

    @property
    def lines(self) -> int:
        return self.stdout.count("\n") + sum(frame.count("\n") + 1 for frame in self.frames)


def forward_batches(count: int, *, grad: bool = False) -> Drive:
    def drive(subject: Subject, debugger: Any) -> None:
        with torch.set_grad_enabled(grad):
            for number in range(count):
                subject.model(**subject.batch(number))

    return drive


def train_batches(count: int) -> Drive:
    """Training steps with dropout, backward and an optimizer that changes every weight between two batches."""

    def drive(subject: Subject, debugger: Any) -> None:
        subject.model.train()
        optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-2)
        for number in range(count):
            optimizer.zero_grad()
            subject.model(**subject.batch(number)).logits.square().mean().backward()
            optimizer.step()

    return drive


def observe(make_debugger: Callable[[nn.Module], Any], subject: Subject, drive: Drive, seed: int = 1) -> Outcome:
    """Attach a debugger to the subject's model, drive it, and keep all that it showed up to the first exception."""
    printed, error = io.StringIO(), None
    debugger = make_debugger(subject.model)
    torch.manual_seed(seed)
    with contextlib.redirect_stdout(printed):
        try:
            drive(subject, debugger)
        except Exception as raised:
            error = raised
    return Outcome(
        printed.getvalue(),
        error,
        list(debugger.frames),
        debugger.batch_number,
        debugger.total_calls,
        debugger.detected_overflow,
        list(debugger.module_names.values()),
    )


def run_reference(subject: Subject, drive: Drive, **options: Any) -> Outcome:
    return observe(lambda model: Reference(model, **options), subject, drive)


def run_ours(recorder: RecorderName, subject: Subject, drive: Drive, **options: Any) -> Outcome:
    return observe(
        lambda model: overflowstat.DebugUnderflowOverflow(model, recorder=recorder, **options), subject, drive
    )


def assert_same(ours: Outcome, reference: Outcome) -> None:
    assert ours.stdout == reference.stdout
    if reference.error is None or ours.error is None:
        assert ours.error is reference.error
    else:
        assert isinstance(ours.error, type(reference.error))
        assert str(ours.error) == str(reference.error)
    assert ours.frames == reference.frames
    if isinstance(ours.error, overflowstat.NonFiniteError):
        assert ours.error.batch_number == reference.batch_number
        assert ours.batch_number == reference.batch_number + 1, "fault row: a batch whose forward raised counts"
    else:
        assert ours.batch_number == reference.batch_number
    assert ours.total_calls == reference.total_calls
    assert ours.detected_overflow == reference.detected_overflow
    assert ours.names == reference.names


class Parity:
    """Called, it runs a scenario on two equal models, asserts that a user sees the same, and counts the lines."""

    def __init__(self, recorder: RecorderName, counts: Counter[tuple[str, str]]) -> None:
        self.recorder = recorder
        self.counts = counts

    def __call__(self, make_subject: Callable[[], Subject], drive: Drive, **options: Any) -> Outcome:
        subject = make_subject()
        reference = run_reference(subject, drive, **options)
        # Two runs that fail alike for another reason would compare nothing.
        assert reference.error is None or str(reference.error).startswith("DebugUnderflowOverflow: "), reference.error
        ours = run_ours(self.recorder, make_subject(), drive, **options)
        assert_same(ours, reference)
        self.count(subject.name, reference.lines)
        return ours

    def count(self, name: str, lines: int) -> None:
        self.counts[name, self.recorder] += lines


@pytest.fixture
def parity(recorder_name: RecorderName, request: pytest.FixtureRequest) -> Iterator[Parity]:
    counts: Counter[tuple[str, str]] = Counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these models are too small for two, which only wait for each other on a busy machine
    yield Parity(recorder_name, counts)
    torch.set_num_threads(threads)
    # Part of the report of its teardown, which reaches the summary from whatever process ran the test.
    request.node.user_properties += [(COMPARED_LINES, [*key, number]) for key, number in counts.items()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "teardown":
                found: list[tuple[str, Any]] = report.user_properties
                for name, value in found:
                    if name == COMPARED_LINES:
                        subject, recorder, number = value
                        counts[subject, recorder] += number
    if not counts:
        return
    terminalreporter.section("lines equal to the reference's, byte for byte")
    for name, recorder in sorted(counts):
        terminalreporter.line(f"{counts[name, recorder]:>8} {name}, {recorder} recorder")

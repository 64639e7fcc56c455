"""Random models under watch: nothing raises but a verdict, which is that of brute force, and the model is undisturbed.

Each case comes from its seed, which is in the message of a failure: OVERFLOWSTAT_FUZZ_SEED=1234 runs just that one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from brute_force import BruteForce, Detection, Frame, Line, all_bits, walk
from random_models import Boom, Case, Counting
from torch import Tensor

from overflowstat import Monitor, NonFiniteError, Policy, frames, investigation
from overflowstat.drill import Drilled, drill
from overflowstat.recorder import RecorderName
from overflowstat.report import Report

SEED = os.environ.get("OVERFLOWSTAT_FUZZ_SEED")
AT_ONCE = 100
CASES, MORE_CASES = 1000, 3000


class Sink:
    def __init__(self, every_frame: bool) -> None:
        self.every_frame = every_frame
        self.frames: list[Frame] = []

    def frame(self, frame: frames.Frame, traced: bool) -> None:
        if self.every_frame:
            self.frames.append(as_told(frame))

    def report(self, report: Report) -> None:
        pass


def as_told(frame: frames.Frame) -> Frame:
    """A monitor's frame in the words of brute force."""
    lines = tuple(line_as_told(line) for line in frame.lines)
    return Frame(frame.batch_number, frame.module, frame.class_name, lines)


def line_as_told(line: frames.Line) -> Line:
    stats = line.content
    if isinstance(stats, str):
        return Line(line.label, stats, "", line.is_judged)
    names = ("abs_min", "abs_max", "finite_abs_max", "nan_count", "posinf_count", "neginf_count", "first_bad", "numel")
    content = f"{stats.shape} {stats.dtype} {sorted((name, getattr(stats, name)) for name in names)}"
    counts = {"nan": stats.nan_count, "inf": stats.posinf_count, "-inf": stats.neginf_count}
    return Line(line.label, content, f"{counts} {stats.first_bad}" if line.is_bad else "", line.is_judged)


class Run:
    """All that a model has done, up to where it raised."""

    def __init__(self, case: Case, watch: Any = None) -> None:
        self.bits: list[Any] = []
        self.error: NonFiniteError | None = None
        self.batches = 0
        Counting.calls = 0
        runs = case.run()
        while True:
            try:
                number = next(runs, None)
                if number is None:
                    break
                if isinstance(watch, BruteForce):
                    watch.batch = number
                output = next(runs)
            except NonFiniteError as error:
                self.error = error
                break
            self.batches += 1
            self.bits.append([Boom] if isinstance(output, Boom) else self.backward(case, output))
        self.bits += [torch.random.get_rng_state().tolist(), case.maker.random.getstate(), Counting.calls]

    def backward(self, case: Case, output: Any) -> Any:
        """The bits of an output, and those of the gradients after a backward from all of it that has one."""
        before = all_bits([output])
        ends = [x for x in tensors_in(output) if x.requires_grad and x.grad_fn is not None and x.numel()]
        said = None
        try:
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(x) for x in ends])
        except RuntimeError as error:  # written to in place
            said = str(error)
        leaves = [*case.model.parameters(), *case.maker.leaves]
        return [before, said, all_bits(leaf.grad for leaf in leaves), all_bits(case.model.state_dict().values())]


def tensors_in(value: Any) -> list[Tensor]:
    return [x for _, x in walk("", value) if type(x) is Tensor]


def check_case(seed: int, recorder_name: RecorderName) -> None:
    plain = Case(seed)
    truth = BruteForce(plain)
    expected = Run(plain, truth)

    case = Case(seed)
    reports: list[Report] = []
    sink = Sink(case.tells_all)
    policy = None
    if case.has_policy:
        allow: dict[Any, Any] = {}
        for selector, kinds in case.allow:
            allow[selector.text] = [*allow.get(selector.text, []), *kinds]
        policy = Policy(
            include=None if case.include is None else [selector.text for selector in case.include],
            exclude=[selector.text for selector in case.exclude],
            allow=allow,
        )
    on_detect: Any = "raise" if case.raises else reports.append
    options = {**case.options, "policy": policy, "on_detect": on_detect, "sinks": [sink], "recorder": recorder_name}
    before = torch.random.get_rng_state()
    monitor = Monitor(case.model, **options)
    assert torch.equal(torch.random.get_rng_state(), before)
    with patch("overflowstat.investigation.drill", kept_by(case)):
        found = Run(case)

    for verdict in [report.verdict for report in reports] + [found.error.verdict if found.error else None]:
        assert verdict is None or investigation.FAILED not in verdict.text, verdict.text
    detections = truth.detections()
    if case.raises and detections:
        first = detections[0]
        assert found.error is not None, f"nothing was raised: {first.frame}"
        assert found.error.batch_number == first.frame.batch
        assert [(f.batch_number, f.module) for f in found.error.frames] == first.before
        if found.error.frames:
            assert as_told(found.error.frames[-1]).bad_lines == first.frame.bad_lines
        assert monitor.batch_number == first.frame.batch + 1
        until = truth.frames.index(first.frame) + 1
        assert found.bits[: found.batches] == expected.bits[: found.batches]
    else:
        assert found.error is None, found.error
        assert_same_reports(reports, monitor, detections)
        assert monitor.batch_number == case.batches
        assert monitor.total_calls == len(truth.frames)
        until = len(truth.frames)
        assert found.bits == expected.bits
    if case.tells_all:
        assert_same_frames(sink.frames, truth.frames[:until])
    monitor.remove()


def kept_by(case: Case) -> Callable[..., Drilled]:
    """A module that is run again draws from what is no part of torch, which a monitor does not put back."""

    def kept(*args: Any) -> Drilled:
        with case.maker.kept():
            return drill(*args)

    return kept


def assert_same_frames(found: list[Frame], expected: list[Frame]) -> None:
    for one, other in zip(found, expected, strict=False):
        assert one[:3] == other[:3]
        for line, other_line in zip(one.lines, other.lines, strict=False):
            assert line == other_line, f"in batch {one.batch}, {one.module} ({one.class_name})"
    assert found == expected


def assert_same_reports(reports: list[Report], monitor: Monitor, detections: list[Detection]) -> None:
    """Each place is reported once, and counted as often as it was the first of a batch."""
    places: dict[tuple[str, str], list[Detection]] = {}
    for detection in detections:
        places.setdefault((detection.frame.module, detection.frame.bad_lines[0].label), []).append(detection)
    for report, (first, *_) in zip(reports, places.values(), strict=True):
        assert report.batch_number == first.frame.batch
        assert as_told(report.bad) == first.frame
        assert [(frame.batch_number, frame.module) for frame in report.frames] == first.before
    counted = [(detection.batches, detection.last_batch) for detection in monitor.detections]
    assert counted == [(len(found), found[-1].frame.batch) for found in places.values()]


def check_cases(seeds: range, recorder_name: RecorderName) -> None:
    for seed in seeds if SEED is None else [int(SEED)]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of nested and sparse tensors, and of tensors that cannot be read
                check_case(seed, recorder_name)
        except (Exception, pytest.fail.Exception) as error:
            raise AssertionError(f"case {seed} fails: OVERFLOWSTAT_FUZZ_SEED={seed} runs just this one") from error


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_random_models(recorder_name: RecorderName, first: int) -> None:
    check_cases(range(first, first + AT_ONCE), recorder_name)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(CASES, MORE_CASES, 10 * AT_ONCE))
def test_many_more_random_models(recorder_name: RecorderName, first: int) -> None:
    check_cases(range(first, first + 10 * AT_ONCE), recorder_name)

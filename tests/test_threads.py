"""Threads that share a watched model: each is told of its own numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError
from overflowstat.recorder import RecorderName
from overflowstat.report import Report

GOOD, BAD = torch.ones(2, 4), torch.full((2, 4), -1.0)
LONG = 30.0  # seconds, after which a test has hung


class Roots(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Identity(), Roots(), nn.Identity())


class Caller(threading.Thread):
    """A thread that calls something, and what came of it."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self._function = function
        self.start()

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self.error = error

    def ended(self) -> Caller:
        self.join(LONG)
        assert not self.is_alive()
        return self


@contextmanager
def between_reading_and_judging(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> Iterator[None]:
    """What a hook has read is there, and then() runs once, on the same thread, before it is judged."""
    judge = Monitor._after_module
    at_first = threading.Lock()

    def after_module(self: Monitor) -> None:
        if at_first.acquire(blocking=False):
            then()
        judge(self)

    with monkeypatch.context() as patch:
        patch.setattr(Monitor, "_after_module", after_module)
        yield


def test_numbers_that_another_thread_has_judged_are_raised_where_they_are_from(
    recorder_name: RecorderName, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Caller] = []

    def another() -> None:
        others.append(Caller(lambda: model(GOOD)).ended())

    with between_reading_and_judging(monkeypatch, another):
        model = make_model()
        monitor = Monitor(model, recorder=recorder_name, sinks=[])
        with pytest.raises(NonFiniteError) as raised:
            model(BAD)
    assert [other.error for other in others] == [None]
    verdict = raised.value.verdict
    assert verdict is not None and (verdict.module, verdict.label, verdict.produced) == ("1", "output", True)
    assert monitor.batch_number == 2 and [frame.module for frame in raised.value.frames] == ["0", "1"]
    model(GOOD)


@pytest.mark.parametrize("on_detect", ["warn", "call"])
def test_what_is_not_raised_is_told_on_the_thread_where_it_is_from(
    recorder_name: RecorderName, monkeypatch: pytest.MonkeyPatch, on_detect: str
) -> None:
    told: list[tuple[int, str]] = []

    def tell(report: Report) -> None:
        told.append((threading.get_ident(), report.bad.module))

    others: list[Caller] = []
    with between_reading_and_judging(monkeypatch, lambda: others.append(Caller(lambda: model(GOOD)).ended())):
        model = make_model()
        handler: Any = "warn" if on_detect == "warn" else tell
        monitor = Monitor(model, recorder=recorder_name, sinks=[], on_detect=handler)
        if on_detect == "warn":
            with pytest.warns(UserWarning, match="1 .*Roots"):
                model(BAD)
        else:
            model(BAD)
            assert told == [(threading.get_ident(), "1")]
    assert [other.error for other in others] == [None] and len(monitor.detections) == 1


def test_what_a_thread_has_left_without_looking_is_told_by_check(
    recorder_name: RecorderName, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Left(BaseException):
        """As a thread that an interpreter ends: the hooks after it do not run."""

    def leave() -> None:
        assert Caller(lambda: model(GOOD)).ended().error is None
        raise Left

    with between_reading_and_judging(monkeypatch, leave):
        model = make_model()
        monitor = Monitor(model, recorder=recorder_name, sinks=[])
        gone = Caller(lambda: model(BAD)).ended()
        assert isinstance(gone.error, Left)
    if getattr(gone.error, "non_finite", None) is None:
        with pytest.raises(NonFiniteError):
            monitor.check()
    monitor.check()


def test_of_many_threads_only_the_one_with_bad_numbers_fails(recorder_name: RecorderName) -> None:
    model = make_model()
    monitor = Monitor(model, recorder=recorder_name, sinks=[], drill=False)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            model(GOOD)

    servers = [Caller(serve) for _ in range(3)]
    try:
        for _ in range(30):
            assert isinstance(Caller(lambda: model(BAD)).ended().error, NonFiniteError)
    finally:
        stop.set()
    assert [server.ended().error for server in servers] == [None] * 3
    assert monitor.detections[0].batches == 30

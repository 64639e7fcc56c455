"""Whether a model has written to what it was given, and which of the calls of several threads a verdict is of."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overflowstat import Monitor, NonFiniteError
from overflowstat.recorder import RecorderName
from overflowstat.root_call import RootCall


@pytest.mark.parametrize(
    "put",
    [lambda x: x, lambda x: [x], lambda x: (1, {"a": [x]}), lambda x: {"deep": ({"er": x},)}],
    ids=["itself", "list", "dict in tuple", "tuple in dict"],
)
def test_a_write_to_an_input_shows_wherever_it_was(put: Callable[[Tensor], Any]) -> None:
    x = torch.ones(2, 2)
    for args, kwargs in (((put(x),), {}), ((), {"x": put(x)})):
        call = RootCall.begins(0, args, kwargs)
        assert call.is_as_it_was(x) and not call.has_changed(args, kwargs)
        x[0].mul_(2)
        assert not call.is_as_it_was(x) and call.has_changed(args, kwargs)


def test_what_is_put_into_a_container_shows() -> None:
    xs, named = [torch.ones(2)], {"x": torch.ones(2)}
    call = RootCall.begins(0, (xs,), {"named": named})
    assert not call.has_changed((xs,), {"named": named})
    xs.append(torch.zeros(2))
    assert call.has_changed((xs,), {"named": named}) and not call.is_as_it_was(xs[1])
    xs.pop()
    named["x"] = torch.ones(2)
    assert call.has_changed((xs,), {"named": named})


def test_what_shows_no_write_is_told_as_such() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
        call = RootCall.begins(0, (x,), {})
        x.mul_(2)
    assert not call.is_as_it_was(x) and not call.is_as_it_was(torch.ones(2))


class Divides(nn.Module):
    def __init__(self, threads: int) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.all_are_in = threading.Barrier(threads)
        self.been_in: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        if threading.get_ident() not in self.been_in:  # and not when it is run again
            self.been_in.add(threading.get_ident())
            self.all_are_in.wait(timeout=30)
        y: Tensor = self.inner(x / x.sum())
        return y


def run(model: nn.Module, x: Tensor, errors: list[BaseException]) -> None:
    try:
        model(x)
    except BaseException as error:
        errors.append(error)


def test_what_one_thread_gave_the_model_is_not_blamed_for_the_numbers_of_another(recorder_name: RecorderName) -> None:
    """All are in the model when the first numbers are judged, of which only those that are 0 make any bad."""
    for _ in range(10):
        model = Divides(3)
        errors: list[BaseException] = []
        with Monitor(model, recorder=recorder_name, sinks=[]):
            given = [torch.ones(2), torch.full((2,), 2.0), torch.zeros(2)]
            threads = [threading.Thread(target=run, args=(model, x, errors)) for x in given]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        (error,) = errors
        assert isinstance(error, NonFiniteError) and error.verdict is not None
        verdict = error.verdict
        assert (verdict.label, verdict.produced) in (("input[0]", True), ("input[0]", False))
        if verdict.operation is not None:
            assert (verdict.module, verdict.operation, verdict.kind) == ("", "aten.div", "division-by-zero")
        else:
            assert verdict.kind == "unknown"

"""The example with accelerate runs as it says, in one process and in two."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from hooks_of import ours_on_optimizers

from overflowstat import NonFiniteError

pytestmark = pytest.mark.usefixtures("no_optimizer_hooks")
EXAMPLE = Path(__file__).parent.parent / "examples" / "accelerate_loop.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example as a module, on the CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)
    spec = importlib.util.spec_from_file_location("accelerate_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_example_trains_and_is_watched(example: Any, mixed_precision: str, accumulation: int) -> None:
    monitor = example.train(mixed_precision=mixed_precision, accumulation=accumulation, batches=6)
    assert monitor.batch_number == 6 and monitor.total_calls == 6 * 4
    assert monitor.detections == [] and not monitor.detected_overflow
    assert ours_on_optimizers() == 0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_example_tells_where_numbers_go_bad(
    example: Any, accumulation: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are beyond all measure after the first step, and the next forward meets them."""
    with pytest.raises(NonFiniteError) as caught:
        example.train(learning_rate=1e30, accumulation=accumulation)
    assert caught.value.batch_number == accumulation and caught.value.verdict is not None
    assert caught.value.verdict.module == "2" and caught.value.verdict.kind == "accumulation-overflow"
    assert "first in 2 (Linear), output" in capsys.readouterr().out
    assert ours_on_optimizers() == 0


def test_a_loss_beyond_the_model_is_judged(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example.nn.functional, "mse_loss", lambda y, target: (y - target).mean() * float("nan"))
    with pytest.raises(NonFiniteError, match=r"nan in batch 0, first in loss \(Tensor\), value: 1 of 1 is nan"):
        example.train()
    assert ours_on_optimizers() == 0


@pytest.mark.slow
def test_the_example_runs_in_two_processes(two_processes: Callable[[str], str]) -> None:
    """Each sees half of the 16 batches, of the model inside of DistributedDataParallel."""
    printed = two_processes(f"""
import runpy
from overflowstat import NonFiniteError
example = runpy.run_path({str(EXAMPLE)!r})
try:
    example["train"](learning_rate=1e30)
except NonFiniteError as error:
    say("bad in", error.batch_number, error.verdict.module)
monitor = example["train"]()  # which ends the group in the end
say(monitor.batch_number, "batches", monitor.total_calls, "calls")
""")
    assert printed.count("8 batches 32 calls\n") == 2
    assert printed.count("bad in 2 2\n") == 2

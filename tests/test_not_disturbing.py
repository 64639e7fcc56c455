"""A model under watch computes what it computes without, and nothing else in the process is touched."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import models
import numpy as np
import pytest
import torch
from brute_force import all_bits
from models import Subject
from torch import Tensor, nn

from overflowstat import DebugUnderflowOverflow, Monitor, NonFiniteError
from overflowstat.recorder import RecorderName

EVERY_MODEL: list[Callable[[], Subject]] = [*models.SMALL_MODELS, models.t5_whose_dropout_overflows, models.minilm]
Watch = Callable[[nn.Module], Any]
pytestmark = pytest.mark.usefixtures("one_thread")
every_model = pytest.mark.parametrize("make", EVERY_MODEL, ids=lambda make: make.__name__)


def watches(recorder_name: RecorderName) -> Watch:
    """All that a monitor can look at, and no detection that would end a forward."""
    return lambda model: Monitor(
        model, recorder=recorder_name, nested=True, buffers=True, on_detect=lambda report: None, sinks=[]
    )


def tensors_of(output: Any) -> list[Tensor]:
    return [value for value in output.values() if isinstance(value, Tensor)]


def training(make: Callable[[], Subject], watch: Watch) -> list[list[Any]]:
    """For each of two steps the bits of outputs, gradients, weights and buffers, and the state of the dropout."""
    subject = make()
    model = subject.model.train()
    watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    found = []
    for number in range(2):
        optimizer.zero_grad()
        output = model(**subject.batch(number))
        outputs = all_bits(tensors_of(output))
        loss = next(x for x in tensors_of(output) if x.requires_grad).float().square().mean()
        torch.autograd.backward([loss])
        gradients = all_bits(weight.grad for weight in model.parameters())
        optimizer.step()
        found.append([outputs, gradients, all_bits(model.state_dict().values()), torch.get_rng_state().tolist()])
    return found


def assert_same(watched: list[list[Any]], plain: list[list[Any]]) -> None:
    for number, (ours, theirs) in enumerate(zip(watched, plain, strict=True)):
        parts = zip(("outputs", "gradients", "weights and buffers", "random state"), ours, theirs, strict=True)
        assert [name for name, one, other in parts if one != other] == [], f"step {number}"


@every_model
def test_training_is_that_of_the_unwatched_model_bit_for_bit(
    recorder_name: RecorderName, make: Callable[[], Subject]
) -> None:
    assert_same(training(make, watches(recorder_name)), training(make, lambda model: None))


@every_model
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_outputs_are_those_of_the_unwatched_model_bit_for_bit(
    recorder_name: RecorderName, make: Callable[[], Subject], mode: Callable[[], Any]
) -> None:
    subject = make()
    subject.model.eval()

    def outputs() -> list[Any]:
        with mode():
            return [all_bits(tensors_of(subject.model(**subject.batch(number)))) for number in range(2)]

    plain = outputs()
    monitor = watches(recorder_name)(subject.model)
    assert outputs() == plain
    assert monitor.batch_number == 2 and monitor.total_calls > 20
    monitor.remove()
    assert outputs() == plain


@every_model
def test_the_drop_in_changes_no_bit_either(recorder_name: RecorderName, make: Callable[[], Subject]) -> None:
    def watch(model: nn.Module) -> Any:
        # Also printing, which goes to nobody.
        return DebugUnderflowOverflow(model, recorder=recorder_name, trace_batch_nums=[0, 1])

    assert_same(training(make, watch), training(make, lambda model: None))


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]


def test_no_random_number_is_drawn_by_attaching_nor_by_hooks_nor_by_a_report(
    recorder_name: RecorderName, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())
    before = random_states()
    monitor = Monitor(model, recorder=recorder_name, buffers=True)
    assert random_states() == before
    model(torch.ones(2, 3))
    assert random_states() == before
    with pytest.raises(NonFiniteError):
        model(torch.full((2, 3), float("nan")))
    assert "overflowstat: nan in batch 1" in capsys.readouterr().out
    assert random_states() == before
    monitor.remove()
    assert random_states() == before


# Prints what differs after the import, and after a model was watched and left. No model is built before the first look.
FRESH = """
import json, random, signal, sys, warnings
import numpy, torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

def state():
    tiny = torch.tensor([1e-40], dtype=torch.float32)
    here = {name: len(hooks) for name, hooks in vars(modules).items() if name.startswith("_global_") and hooks}
    here |= {name: len(hooks) for name, hooks in vars(optimizers).items() if name.startswith("_global_") and hooks}
    return here | {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "subnormals": [(tiny * 1).tolist(), (tiny * torch.ones(64)).tolist(), 5e-324 * 1],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        ],
        "precision": [torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32],
        "warnings": [str(each) for each in warnings.filters],
        "random": [torch.get_rng_state().tolist(), str(random.getstate()), str(numpy.random.get_state())],
        "modes": [
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_anomaly_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.overrides._len_torch_function_stack(),
            torch.utils._python_dispatch._len_torch_dispatch_stack(),
        ],
        "CUDA": torch.cuda.is_initialized(),
        "hooks of the interpreter": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "heavy modules": [name for name in sys.modules if name in ("torch._dynamo", "transformers", "triton")],
        "functions": [str(f) for f in (torch.nn.Module.__call__, torch.Tensor.__add__, torch.save, print)],
    }

def tell(before, when):
    after = state()
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            print(f"{when}: {key} was {before.get(key)}, is {after.get(key)}")

before = state()
import overflowstat
tell(before, "import")
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters())
before = state()
monitor = overflowstat.Monitor(model, recorder=sys.argv[1], sinks=[])
model(torch.full((1, 2), 0.5)).sum().backward()
optimizer.step()
try:
    model(torch.full((1, 2), float("inf")))
except overflowstat.NonFiniteError:
    pass
else:
    print("nothing was detected")
monitor.remove()
tell(before, "use")
print("done")
"""


def test_neither_import_nor_use_changes_anything_global(recorder_name: RecorderName) -> None:
    done = subprocess.run([sys.executable, "-c", FRESH, recorder_name], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stdout + done.stderr


class Encoder:
    """nn.TransformerEncoderLayer where torch may run it as one operation, and how often it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        self.x = torch.randn(2, 5, 16)
        self.fused = 0
        whole = torch._transformer_encoder_layer_fwd

        def count(*args: Any) -> Tensor:
            self.fused += 1
            return whole(*args)

        monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", count)

    def run(self) -> tuple[Tensor, bool]:
        """The output, and whether it was made by the one operation."""
        before = self.fused
        with torch.no_grad():
            output: Tensor = self.layer(self.x)
        return output, self.fused > before


@pytest.mark.parametrize("where", ["", "self_attn", "dropout2"])
def test_a_transformer_layer_leaves_its_fast_path_for_any_hook(
    recorder_name: RecorderName, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    encoder = Encoder(monkeypatch)
    fast, is_fused = encoder.run()
    assert is_fused
    handle = encoder.layer.get_submodule(where).register_forward_hook(lambda *_: None)
    hooked, is_fused = encoder.run()
    assert not is_fused
    handle.remove()

    monitor = watches(recorder_name)(encoder.layer)
    watched, is_fused = encoder.run()
    assert not is_fused
    assert torch.equal(watched, hooked)
    torch.testing.assert_close(watched, fast)
    monitor.remove()
    again, is_fused = encoder.run()
    assert is_fused and torch.equal(again, fast)

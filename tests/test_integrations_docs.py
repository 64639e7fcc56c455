"""What README.md and docs/integrations.md show of integrations runs as it stands there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from documents import code
from hooks_of import ours, ours_on_optimizers
from test_lightning import data as lightning_data
from test_lightning import net, trainer
from test_trainer import MODES, ORIGINAL_TRAIN, Spoil, as_found, tiny, train
from torch import nn

from overflowstat import Monitor, NonFiniteError
from overflowstat.integrations import lightning as our_lightning
from overflowstat.integrations import transformers as our_transformers

pytestmark = [
    pytest.mark.usefixtures("light_collections", "no_optimizer_hooks", "as_found"),
    pytest.mark.filterwarnings("ignore"),
]
__all__ = ["as_found"]


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the blocks take for granted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    examples = [{name: torch.arange(8) for name in ("input_ids", "labels")}] * 4

    def arguments(folder: str = "out", **options: Any) -> Any:
        return transformers.TrainingArguments(folder, use_cpu=True, max_steps=2, report_to=[], **options)

    return {
        "torch": torch,
        "nn": nn,
        "Monitor": Monitor,
        "data": examples,
        "Trainer": transformers.Trainer,
        "TrainingArguments": arguments,
        "args": arguments(),
    }


def run(file: str, heading: str, number: int, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code(file, "python", heading)[number], f"{file}, {heading}, {number}", "exec"), names)
    return names


def nothing_is_left(model: nn.Module) -> bool:
    return ours(model) == ours_on_optimizers() == 0


def test_no_block_is_left_out() -> None:
    sections = {"transformers": 2, "Lightning": 1, "accelerate": 1, "A loop of your own": 2}
    assert {heading: len(code("docs/integrations.md", "python", heading)) for heading in sections} == sections
    assert len(code("docs/integrations.md", "python")) == sum(sections.values())
    assert len(code("README.md", "python", "Where you train")) == 3


def test_the_trainers_own_debug(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    model = names["model"] = tiny()
    run("docs/integrations.md", "transformers", 0, names)
    assert names["trainer"].state.global_step == 2 and nothing_is_left(model)
    assert transformers.Trainer.train is ORIGINAL_TRAIN
    bad = names["model"] = tiny()
    with torch.no_grad():
        bad.get_parameter("lm_head.weight")[0, 0] = float("nan")
    with pytest.raises(NonFiniteError):
        run("docs/integrations.md", "transformers", 0, names)
    assert "Detected inf/nan during batch_number=0" in capsys.readouterr().out and nothing_is_left(bad)


def test_the_callback_of_the_trainer(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    model = names["model"] = tiny()
    run("docs/integrations.md", "transformers", 1, names)
    assert isinstance(names["callback"], our_transformers.OverflowStatCallback) and nothing_is_left(model)
    assert "None []" in capsys.readouterr().out


def test_the_report_that_is_shown(tmp_path: Path) -> None:
    (shown,) = code("docs/integrations.md", "")
    accumulation = next(mode for mode in MODES if mode.name == "accumulation")
    with pytest.raises(NonFiniteError) as caught:
        train(accumulation, tmp_path, tiny(), our_transformers.OverflowStatCallback(sinks=[]), Spoil(2))
    first, *others = str(caught.value).split("\n")
    begin, *expected = shown.rstrip("\n").split("\n")
    assert first.startswith(begin.removesuffix(", ...")) and begin.endswith(", ...") and others == expected


def test_the_callback_of_lightning(names: dict[str, Any]) -> None:
    names.update(Trainer=trainer, module=net(), loader=lightning_data())
    names["Trainer"] = lambda callbacks: trainer(*callbacks)
    run("docs/integrations.md", "Lightning", 0, names)
    assert isinstance(names["callback"], our_lightning.OverflowStatCallback) and nothing_is_left(names["module"])
    assert names["trainer"].global_step == 4


def test_accelerate(names: dict[str, Any]) -> None:
    model = nn.Linear(4, 4)
    x = torch.randn(8, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x), batch_size=2)
    names.update(
        accelerator=Accelerator(),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loader=loader,
        loss_function=nn.functional.mse_loss,
    )
    run("docs/integrations.md", "accelerate", 0, names)
    assert names["monitor"].batch_number == 4 and nothing_is_left(model)


def test_a_loop_of_ones_own(names: dict[str, Any]) -> None:
    model = names["model"] = nn.Linear(4, 4)
    names["train"] = lambda model: [model(torch.ones(1, 4)) for _ in range(3)]
    run("docs/integrations.md", "A loop of your own", 0, names)
    assert names["monitor"].batch_number == 3 and nothing_is_left(model)


def test_a_loop_whose_step_calls_the_model_several_times(names: dict[str, Any]) -> None:
    gan = names["gan"] = nn.ModuleDict({"generator": nn.Linear(4, 4), "critic": nn.Linear(4, 1)})
    gan.generator, gan.critic = gan["generator"], gan["critic"]
    names["loader"] = [torch.ones(2, 4)] * 3
    run("docs/integrations.md", "A loop of your own", 1, names)
    assert names["monitor"].batch_number == 3 and names["monitor"].total_calls == 9 and nothing_is_left(gan)


def test_the_readme(names: dict[str, Any]) -> None:
    model: nn.Module = nn.Linear(4, 4)
    names.update(model=model, loader=[torch.ones(1, 4)] * 3, training_step=model)
    run("README.md", "Where you train", 0, names)
    assert names["monitor"].batch_number == 3 and nothing_is_left(model)

    model = names["model"] = tiny()
    run("README.md", "Where you train", 1, names)
    assert names["install"] is our_transformers.install and nothing_is_left(model)

    module, run_by = net(), trainer()

    def make(callbacks: list[Any]) -> Any:
        run_by.callbacks += callbacks
        return run_by

    names.update(module=module, loader=lightning_data(), Trainer=make)
    run("README.md", "Where you train", 2, names)
    assert run_by.global_step == 4 and nothing_is_left(module)
    assert any(isinstance(callback, our_lightning.OverflowStatCallback) for callback in run_by.callbacks)

"""Lightning's own Trainer, of both of its packages, with the callback."""

from __future__ import annotations

import gc
import importlib
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hooks_of import ours, ours_on_optimizers
from keeps import Keeps
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import overflowstat
from overflowstat import BatchLimitReached, Monitor, NonFiniteError
from overflowstat.dynamo import has_compiled
from overflowstat.errors import MonitorWarning
from overflowstat.frames import Frame
from overflowstat.integrations.lightning import OverflowStatCallback
from overflowstat.recorder import RecorderName
from overflowstat.report import Report

pytestmark = [
    pytest.mark.usefixtures("light_collections", "no_optimizer_hooks", "one_thread"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore:.*num_workers",
        "ignore:.*LeafSpec",
        "ignore:.*validation_step",
    ),
]

INF, NAN = float("inf"), float("nan")
STEPS = 4


class Net(LightningModule):
    """A training step as people write them: the forward, a module for the loss, and one for a metric."""

    def __init__(self, bad_after: int | None = None, loss_factor_at: tuple[int, float] = (-1, 1.0)) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.loss = nn.MSELoss()
        self.metric = nn.L1Loss()
        self.bad_after = bad_after
        self.loss_factor_at = loss_factor_at

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        y = self(batch[0])
        self.metric(y, batch[0])
        at, factor = self.loss_factor_at
        loss = self.compute_loss(y, batch[0])
        return loss * factor if index == at else loss

    def compute_loss(self, y: Tensor, x: Tensor) -> Tensor:
        loss: Tensor = self.loss(y, x)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.loss(self(batch[0]), batch[0])

    test_step = validation_step

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        y: Tensor = self(batch[0])
        return y

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *_: object) -> None:
        if self.bad_after is not None and self.global_step == self.bad_after:
            with torch.no_grad():
                self.get_parameter("net.2.weight")[1, 2] = INF


class OnlyChildren(Net):
    """Its own forward is never called."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.loss(self.net(batch[0]), batch[0])
        return loss


class ByHand(Net):
    """Two optimizers that it steps itself, as a GAN does: two steps a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[index].parameters(), lr=0.1) for index in (0, 2)]

    def training_step(self, batch: list[Tensor], index: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.compute_loss(self(batch[0]), batch[0]))
            optimizer.step()


class Numbers:
    """A sink: the modules of each batch, and whether they are traced."""

    every_frame = True

    def __init__(self) -> None:
        self.batches: dict[int, list[str]] = {}
        self.traced: set[int] = set()

    def frame(self, frame: Frame, traced: bool) -> None:
        self.batches.setdefault(frame.batch_number, []).append(frame.module)
        if traced:
            self.traced.add(frame.batch_number)

    def report(self, report: Report) -> None:
        pass


class Sees(Callback):
    """The monitors there were, kept by nobody, and the batches of the last one; before the callback that has them."""

    def __init__(self, callback: OverflowStatCallback) -> None:
        self.callback = callback
        self.monitors: list[weakref.ref[Monitor]] = []
        self.hooks: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *args: object, **kwargs: object) -> None:
        monitor = self.callback.monitor
        assert monitor is not None
        if not any(seen() is monitor for seen in self.monitors):
            self.monitors.append(weakref.ref(monitor))
        self.hooks.append(ours(pl_module))

    def alive(self) -> list[Monitor]:
        gc.collect()
        return [monitor for seen in self.monitors if (monitor := seen()) is not None]


def trainer(*callbacks: Any, package: Any = None, **options: Any) -> Any:
    return (Trainer if package is None else package.Trainer)(
        **{
            "max_steps": STEPS,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "callbacks": list(callbacks),
            **options,
        }
    )


def data(batches: int = 2 * STEPS) -> Any:
    x = torch.randn(2 * batches, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=2)


def net(kind: Any = Net, **options: Any) -> Any:
    seed_everything(0, verbose=False)
    return kind(**options)


def nothing_is_left(model: nn.Module) -> bool:
    return ours(model) == ours_on_optimizers() == 0


EACH_MODE = pytest.mark.parametrize(
    ("options", "batches", "bad_in"),
    [
        ({}, STEPS, ("3, training", 2)),
        ({"precision": "bf16-mixed"}, STEPS, ("3, training", 2)),
        ({"accumulate_grad_batches": 2, "limit_val_batches": 0}, 2 * STEPS, ("3, training", 4)),
        # One batch of validation for each two of training, and one before all.
        (
            {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1},
            STEPS + 3,
            ("validation after step 2", 3),
        ),
    ],
    ids=["float32", "bf16", "accumulation", "validation"],
)


@EACH_MODE
def test_a_fit_is_watched_to_its_end_not_disturbed_and_left_as_it_was(
    options: dict[str, Any], batches: int, bad_in: object, recorder_name: RecorderName
) -> None:
    plain, watched, sink = net(), net(), Numbers()
    trainer(**options).fit(plain, data(), data())
    callback = OverflowStatCallback(recorder=recorder_name, sinks=[sink])
    sees = Sees(callback)
    trainer(sees, callback, **options).fit(watched, data(), data())
    assert list(sink.batches) == list(range(batches))
    assert set(sees.hooks) == {sum(1 for _ in watched.modules()) + 1}, "one each, and one more for the root"
    assert nothing_is_left(watched) and callback.monitor is None and sees.alive() == []
    assert callback.detections == [] and callback.first_bad_loss is None
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, watched.state_dict()[name]), name


@EACH_MODE
def test_what_goes_bad_is_told_with_its_step_and_nothing_is_left(
    options: dict[str, Any],
    batches: int,
    bad_in: tuple[str, int],
    recorder_name: RecorderName,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, callback = net(bad_after=2), OverflowStatCallback(recorder=recorder_name)
    sees = Sees(callback)
    step, batch = bad_in
    with pytest.raises(NonFiniteError) as caught:
        trainer(callback, sees, **options).fit(model, data(), data())
    assert str(caught.value).startswith(
        f"overflowstat: inf in batch {batch}, first in net.2 (Linear), weight: 1 of 16 is +inf, first at [1, 2]"
    )
    assert str(caught.value).endswith(f"\n  step        {step}")
    assert capsys.readouterr().out.rstrip().endswith(f"\n  step        {step}")
    assert nothing_is_left(model) and callback.monitor is None and len(callback.detections) == 1
    del caught
    assert sees.alive() == []


def test_a_batch_is_one_of_the_loader_whatever_the_step_calls(recorder_name: RecorderName) -> None:
    """The loss last, which the callback judges before its backward."""
    for kind, each in [
        (Net, ["net.0", "net.1", "net.2", "net", "", "metric", "loss", "loss"]),
        (OnlyChildren, ["net.0", "net.1", "net.2", "net", "loss", "loss"]),
        (ByHand, ["net.0", "net.1", "net.2", "net", "", "loss", "loss"] * 2),
    ]:
        sink = Numbers()
        callback = OverflowStatCallback(recorder=recorder_name, sinks=[sink])
        with warnings.catch_warnings():
            warnings.simplefilter("error", MonitorWarning)
            trainer(callback).fit(net(kind), data())
        assert list(sink.batches.values()) == [each] * (STEPS // (2 if kind is ByHand else 1))


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("kind", [Net, OnlyChildren, ByHand])
@pytest.mark.parametrize("options", [{}, {"evaluation": False, "trace_steps": [2]}], ids=["", "traced"])
def test_a_run_says_nothing_of_calls_before_it_where_something_else_was_compiled(
    kind: Any, options: dict[str, Any]
) -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert has_compiled()
    sink = Numbers()
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        run = trainer(OverflowStatCallback(sinks=[sink], **options), limit_val_batches=1, num_sanity_val_steps=1)
        run.fit(net(kind), data(), data())
    assert any("net.0" in modules for modules in sink.batches.values())


def test_a_batch_is_a_forward_of_the_model_where_that_is_asked_for(recorder_name: RecorderName) -> None:
    sink = Numbers()
    callback = OverflowStatCallback(recorder=recorder_name, batch_ends="forward", check_loss=False, sinks=[sink])
    trainer(callback, max_steps=2).fit(net(), data())
    assert list(sink.batches.values()) == [
        ["net.0", "net.1", "net.2", "net", ""],
        ["metric", "loss", "net.0", "net.1", "net.2", "net", ""],
        ["metric", "loss"],
    ]


def test_steps_are_traced_with_all_of_their_batches(recorder_name: RecorderName) -> None:
    """0 1 | 2 3 v | 5 6 | 7 8 v, where v is a validation."""
    sink = Numbers()
    callback = OverflowStatCallback(recorder=recorder_name, trace_steps=[1, 2, 4], sinks=[sink])
    validation = {"val_check_interval": 4, "limit_val_batches": 1}
    trainer(callback, accumulate_grad_batches=2, **validation).fit(net(), data(), data())
    assert sink.traced == {0, 1, 2, 3, 7, 8} and set(sink.batches) == set(range(10))


def test_a_traced_step_of_children_alone_is_traced_from_its_first_module(recorder_name: RecorderName) -> None:
    """Where only one batch in so many is watched, that one, too."""
    sink = Numbers()
    callback = OverflowStatCallback(
        recorder=recorder_name, trace_steps=[2], every_n=100, check_loss=False, sinks=[sink]
    )
    trainer(callback).fit(net(OnlyChildren), data())
    assert sink.traced == {1} and {batch: len(modules) for batch, modules in sink.batches.items()} == {0: 5, 1: 5}


def test_a_training_stops_at_a_step() -> None:
    run = trainer(OverflowStatCallback(stop_at_step=2, sinks=[]))
    run.fit(net(), data())
    assert run.global_step == 2


def test_a_training_ends_by_an_exception_at_a_batch_as_without_a_trainer() -> None:
    model = net()
    with pytest.raises(BatchLimitReached, match="stopped after 2 batches"):
        trainer(OverflowStatCallback(abort_after_batch_num=1, sinks=[])).fit(model, data())
    assert nothing_is_left(model)


def test_evaluations_are_left_out_where_they_are_not_asked_for(recorder_name: RecorderName) -> None:
    sink = Numbers()
    callback = OverflowStatCallback(recorder=recorder_name, evaluation=False, sinks=[sink])
    run = trainer(callback, val_check_interval=1, limit_val_batches=2, num_sanity_val_steps=2)
    run.fit(net(), data(), data())
    assert list(sink.batches) == list(range(STEPS)) and all("metric" in modules for modules in sink.batches.values())
    run.validate(net(), data(), verbose=False)
    assert list(sink.batches) == list(range(STEPS))


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_an_evaluation_by_itself_is_watched(what: str, recorder_name: RecorderName) -> None:
    sink, model = Numbers(), net()
    callback = OverflowStatCallback(recorder=recorder_name, sinks=[sink])
    run = trainer(callback, limit_val_batches=2, limit_test_batches=2, limit_predict_batches=2)
    options = {} if what == "predict" else {"verbose": False}
    getattr(run, what)(model, data(), **options)
    each = ["net.0", "net.1", "net.2", "net", ""] + ["loss"] * (what != "predict")
    assert list(sink.batches.values()) == [each] * 2
    assert nothing_is_left(model) and callback.monitor is None
    with torch.no_grad():
        model.net[0].weight[0, 0] = NAN
    name = {"validate": "validation", "test": "test", "predict": "prediction"}[what]
    with pytest.raises(NonFiniteError, match=rf"nan in batch 0, (.|\n)*step +{name} before step 1$"):
        getattr(run, what)(model, data(), **options)
    assert nothing_is_left(model)


@pytest.mark.parametrize("kind", [Net, ByHand])
def test_a_bad_loss_stops_the_training_before_the_weights_take_it(kind: Any, recorder_name: RecorderName) -> None:
    class Bad(kind):
        calls = 0

        def compute_loss(self, y: Tensor, x: Tensor) -> Tensor:
            """By no module."""
            self.calls += 1
            return (y - x).square().mean() * (NAN if self.calls == 3 else 1.0)

    model, callback = net(Bad), OverflowStatCallback(recorder=recorder_name, sinks=[])
    batch = 2 if kind is Net else 1
    with pytest.raises(NonFiniteError) as caught:
        trainer(callback).fit(model, data())
    assert str(caught.value) == (
        f"overflowstat: nan in batch {batch}, first in loss (Tensor), value: 1 of 1 is nan; float32, shape []\n"
        "  step        3, training"
    )
    assert callback.first_bad_loss is not None and callback.first_bad_loss.step == 3
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert nothing_is_left(model)


def test_a_bad_loss_is_told_and_the_training_goes_on(recorder_name: RecorderName) -> None:
    callback = OverflowStatCallback(recorder=recorder_name, on_detect="warn", verdict=False, sinks=[])
    run = trainer(callback, accumulate_grad_batches=2)
    with pytest.warns(
        MonitorWarning, match=r"inf in batch 3, first in loss \(Tensor\), value(.|\n)*step +2, training$"
    ):
        run.fit(net(loss_factor_at=(3, INF)), data())
    assert run.global_step == STEPS
    assert callback.first_bad_loss is not None and callback.first_bad_loss.step == 2


@pytest.mark.parametrize("scale", [2.0**16, 2.0**127])
def test_a_loss_that_only_its_scale_makes_inf_is_not_bad(scale: float) -> None:
    """As the plugin for float16 does it, whose scaler then leaves out the step."""
    from lightning.pytorch.plugins import MixedPrecision

    class Plugin(MixedPrecision):
        def __init__(self) -> None:
            super().__init__("bf16-mixed", "cpu")
            self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    sink = Numbers()
    callback = OverflowStatCallback(sinks=[sink])
    trainer(callback, plugins=[Plugin()], max_epochs=1, max_steps=-1).fit(net(loss_factor_at=(2, 1e3)), data(STEPS))
    assert callback.first_bad_loss is None and callback.detections == []
    assert [modules.count("loss") for modules in sink.batches.values()] == [2] * STEPS, "the module, and what it gave"
    told = OverflowStatCallback(on_detect="warn", verdict=False, sinks=[])
    with pytest.warns(MonitorWarning, match=r"nan in batch 2, first in loss \(Tensor\), value"):
        trainer(told, plugins=[Plugin()], max_epochs=1, max_steps=-1).fit(net(loss_factor_at=(2, NAN)), data(STEPS))


class Raises(Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, trainer: Any, *args: object, **kwargs: object) -> None:
        if trainer.global_step == 2:
            raise self.error


@pytest.mark.parametrize(("error", "raised"), [(RuntimeError("mine"), RuntimeError), (KeyboardInterrupt(), SystemExit)])
def test_an_exception_of_anything_else_leaves_nothing_and_is_kept(
    error: BaseException, raised: type[BaseException]
) -> None:
    model, callback = net(), OverflowStatCallback(sinks=[])
    sees = Sees(callback)
    with pytest.raises(raised) as caught:
        trainer(sees, callback, Raises(error)).fit(model, data())
    assert caught.value is error or isinstance(error, KeyboardInterrupt)
    assert nothing_is_left(model) and callback.monitor is None
    error.__traceback__ = None
    del caught
    assert sees.alive() == []


def test_each_run_has_a_monitor_of_its_own() -> None:
    model, callback = net(), OverflowStatCallback(sinks=[])
    sees = Sees(callback)
    for _ in range(2):
        trainer(sees, callback).fit(model, data())
    assert len(sees.monitors) == 2 and sees.alive() == [] and nothing_is_left(model)


def test_modules_that_come_in_setup_are_watched_from_the_first_batch(recorder_name: RecorderName) -> None:
    class Late(Net):
        def configure_model(self) -> None:
            self.net = nn.Sequential(nn.Linear(4, 4))

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if not hasattr(self, "last"):
                self.last = nn.Identity()
            loss: Tensor = self.loss(self.last(self.net(batch[0])), batch[0])
            return loss

    sink = Numbers()
    trainer(OverflowStatCallback(recorder=recorder_name, check_loss=False, sinks=[sink])).fit(net(Late), data())
    assert sink.batches[0] == ["net.0", "net", "loss"] and sink.batches[1] == ["net.0", "net", "last", "loss"]


def test_gradients_are_watched_as_without_a_trainer() -> None:
    model = net(loss_factor_at=(2, INF))
    callback = OverflowStatCallback(gradients=True, check_loss=False, sinks=[])
    with pytest.raises(NonFiniteError, match=r"in batch 2, first in loss \(MSELoss\), grad output(.|\n)*step +3, tr"):
        trainer(callback).fit(model, data())
    assert nothing_is_left(model)


def test_the_sinks_are_the_users() -> None:
    sink = Keeps()
    with pytest.raises(NonFiniteError):
        trainer(OverflowStatCallback(sinks=[sink])).fit(net(bad_after=1), data())
    assert len(sink.reports) == 1 and sink.reports[0].bad.module == "net.2"


@pytest.mark.parametrize(
    "options",
    [{"trace_step": [1]}, {"trace_steps": 1}, {"evaluation": None}, {"stop_at_step": 0}, {"check": "never"}],
)
def test_an_argument_that_makes_no_sense_is_told_at_once(options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        OverflowStatCallback(**options)


def test_the_callback_can_go_to_other_processes() -> None:
    callback = pickle.loads(pickle.dumps(OverflowStatCallback(trace_steps=[2], sinks=[])))
    model = net()
    trainer(callback).fit(model, data())
    assert nothing_is_left(model)


def test_the_other_package_takes_it_too() -> None:
    package = importlib.import_module("pytorch_lightning")

    class Other(package.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 4)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss: Tensor = self.net(batch[0]).square().mean() * (NAN if index == 2 else 1.0)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Other()
    with pytest.raises(NonFiniteError, match=r"nan in batch 2, first in loss(.|\n)*step +3, training$"):
        trainer(OverflowStatCallback(sinks=[]), package=package).fit(model, data())
    assert nothing_is_left(model)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_the_callback_is_of_the_package_that_was_imported(package: str) -> None:
    script = f"""
import importlib, sys
package = importlib.import_module({package!r})
from overflowstat.integrations.lightning import OverflowStatCallback
assert issubclass(OverflowStatCallback, package.Callback)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(overflowstat.__file__).parent.parent)


@pytest.mark.parametrize(("name", "text"), [("lightning", "pip install lightning"), ("transformers", "pip install tr")])
def test_without_the_library_it_is_told_what_is_needed(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"overflowstat.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=text) as caught:
        importlib.import_module(f"overflowstat.integrations.{name}")
    assert caught.value.name == name


@pytest.mark.slow
def test_each_process_watches_its_own_model(two_processes: Callable[[str], str]) -> None:
    """Lightning has the model's own forward call the training step then, in one more frame of a batch."""
    printed = two_processes("""
from test_lightning import NonFiniteError, Numbers, OverflowStatCallback, data, net, nothing_is_left, trainer
model, sink = net(), Numbers()
trainer(OverflowStatCallback(sinks=[sink]), strategy="ddp", devices=2).fit(model, data(16))
say({number: " ".join(modules) for number, modules in sink.batches.items()}, nothing_is_left(model))
try:
    bad = net(bad_after=2)
    trainer(OverflowStatCallback(sinks=[]), strategy="ddp", devices=2).fit(bad, data(16))
except NonFiniteError as error:
    say("bad in", error.batch_number, str(error).splitlines()[-1].strip(), nothing_is_left(bad))
""")
    each = dict.fromkeys(range(STEPS), "net.0 net.1 net.2 net  metric loss  loss")
    assert printed.count(f"{each} True\n") == 2
    assert printed.count("bad in 2 step        3, training True\n") == 2

"""transformers' own Trainer on a tiny Llama: watched by the callback, or by the drop-in behind its `debug=`."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.debug_utils
import transformers.trainer
from accelerate.state import AcceleratorState
from hooks_of import ours, ours_on_optimizers
from keeps import Keeps
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback, TrainingArguments

import overflowstat
from overflowstat import BatchLimitReached, DebugUnderflowOverflow, Monitor, NonFiniteError
from overflowstat.dynamo import has_compiled
from overflowstat.errors import MonitorWarning, TraceError
from overflowstat.frames import Frame
from overflowstat.integrations import transformers as integration
from overflowstat.integrations.transformers import OverflowStatCallback, install, uninstall
from overflowstat.recorder import RecorderName
from overflowstat.report import Report

pytestmark = [
    pytest.mark.usefixtures("light_collections", "no_optimizer_hooks"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

INF, NAN = float("inf"), float("nan")
STEPS = 5
debug_utils: Any = transformers.debug_utils
trainer_module: Any = transformers.trainer
Trainer: Any = trainer_module.Trainer
ORIGINAL_TRAIN = Trainer.train
ORIGINAL_DEBUGGER = debug_utils.DebugUnderflowOverflow


@pytest.fixture(autouse=True)
def as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """TrainingArguments write into the environment, and accelerate keeps what it reads there for the process."""
    for name in os.environ:
        if name.startswith("ACCELERATE_"):
            monkeypatch.delenv(name)
    before, threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    uninstall()
    assert trainer_module.DebugUnderflowOverflow is ORIGINAL_DEBUGGER is not integration._Debugger
    for name in set(os.environ) - set(before):
        del os.environ[name]
    torch.set_num_threads(threads)
    AcceleratorState._reset_state(reset_partial_state=True)


def tiny(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


class Spoil(TrainerCallback):
    """Writes inf into a weight of the last layer after a step."""

    def __init__(self, after_step: int) -> None:
        self.after_step = after_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.after_step:
            with torch.no_grad():
                kwargs["model"].model.layers[-1].mlp.down_proj.weight[3, 5] = INF


class Raises(TrainerCallback):
    def __init__(self, error: BaseException, after_step: int = 2) -> None:
        self.error = error
        self.after_step = after_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.after_step:
            raise self.error


class Sees(TrainerCallback):
    """What is there in each step: as a weak reference, for it is not to be kept alive."""

    def __init__(self, callback: OverflowStatCallback) -> None:
        self.callback = callback
        self.monitors: list[weakref.ref[Monitor]] = []
        self.hooks: list[int] = []
        self.batches = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        monitor = self.callback.monitor
        assert monitor is not None
        if not any(seen() is monitor for seen in self.monitors):
            self.monitors.append(weakref.ref(monitor))
        self.hooks.append(ours(kwargs["model"]))

    on_substep_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.batches = 0 if self.callback.monitor is None else self.callback.monitor.batch_number


class Numbers:
    """A sink: of each frame its batch and whether it is traced."""

    every_frame = True

    def __init__(self) -> None:
        self.traced: dict[int, set[bool]] = {}
        self.modules: list[str] = []

    def frame(self, frame: Frame, traced: bool) -> None:
        self.traced.setdefault(frame.batch_number, set()).add(traced)
        self.modules.append(frame.module)

    def report(self, report: Report) -> None:
        pass


def make(
    folder: Path,
    model: nn.Module,
    *callbacks: TrainerCallback,
    kind: Callable[..., Any] = Trainer,
    compute_loss_func: Any = None,
    **arguments: Any,
) -> Any:
    examples = torch.Generator().manual_seed(1)
    data = [
        {name: torch.randint(32, (8,), generator=examples) for name in ("input_ids", "labels")}
        for _ in range(2 * STEPS * 4)
    ]
    arguments = {"max_steps": STEPS, "save_strategy": "no", "logging_strategy": "no", **arguments}
    trainer = kind(
        model=model,
        args=TrainingArguments(
            str(folder),
            use_cpu=True,
            per_device_train_batch_size=2,
            report_to=[],
            disable_tqdm=True,
            seed=0,
            learning_rate=0.01,
            **arguments,
        ),
        train_dataset=data,
        eval_dataset=data[:2],
        callbacks=list(callbacks),
        compute_loss_func=compute_loss_func,
    )
    trainer.remove_callback(PrinterCallback)  # tells of the time it took
    return trainer


@dataclass(frozen=True)
class Mode:
    """A way to train, with what is counted in it by hand."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    resume: bool = False
    """From a checkpoint after step 2."""
    forwards: int = STEPS
    """Of the model, in the whole of the training."""
    bad_in: tuple[str, int] = ("3, training", 2)
    """Where a weight is met that went bad after step 2, or when resumed, after step 3: the step, and the batch."""


CHECKPOINTING = {"gradient_checkpointing": True}
EVALUATION = {"eval_strategy": "steps"}
MODES = [
    Mode("float32"),
    Mode("bf16 autocast", {"bf16": True}),
    Mode("accumulation", {"gradient_accumulation_steps": 2}, forwards=2 * STEPS, bad_in=("3, training", 4)),
    Mode("checkpointing", CHECKPOINTING),
    Mode("reentrant checkpointing", {**CHECKPOINTING, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    Mode("evaluation", {**EVALUATION, "eval_steps": 1}, forwards=2 * STEPS, bad_in=("evaluation after step 2", 3)),
    Mode(  # and after step 3, and at the end
        "evaluation first",
        {**EVALUATION, "eval_steps": 3, "eval_on_start": True},
        forwards=STEPS + 3,
        bad_in=("3, training", 3),
    ),
    Mode("resumed", resume=True, forwards=STEPS - 2, bad_in=("4, training", 1)),
]
EACH_MODE = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


def train(mode: Mode, folder: Path, model: nn.Module, *callbacks: TrainerCallback, **arguments: Any) -> Any:
    if mode.resume:
        make(folder, copy.deepcopy(model), save_strategy="steps", save_steps=2, max_steps=2).train()
    trainer = make(folder, model, *callbacks, **{**mode.arguments, **arguments})
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if mode.resume else None)
    return trainer


def nothing_is_left(model: nn.Module, trainer: Any = None) -> bool:
    return ours(model) == ours_on_optimizers() == 0 and (trainer is None or "training_step" not in vars(trainer))


@EACH_MODE
def test_a_training_is_watched_to_its_end_not_disturbed_and_left_as_it_was(
    mode: Mode, recorder_name: RecorderName, tmp_path: Path
) -> None:
    plain, watched = tiny(), tiny()
    train(mode, tmp_path / "plain", plain)
    callback = OverflowStatCallback(recorder=recorder_name, sinks=[])
    sees = Sees(callback)
    trainer = train(mode, tmp_path / "watched", watched, sees, callback)
    assert sees.batches == mode.forwards
    assert len(sees.hooks) >= STEPS - 2 and set(sees.hooks) == {sees.hooks[0]}
    assert sees.hooks[0] > sum(1 for _ in watched.modules())
    assert nothing_is_left(watched, trainer) and callback.monitor is None
    gc.collect()
    assert [seen() for seen in sees.monitors] == [None]
    assert callback.detections == [] and callback.first_bad_loss is None
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, watched.state_dict()[name]), name


@EACH_MODE
def test_what_goes_bad_is_told_with_its_step_and_nothing_is_left(
    mode: Mode, recorder_name: RecorderName, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, callback = tiny(), OverflowStatCallback(recorder=recorder_name)
    sees = Sees(callback)
    step, batch = mode.bad_in
    with pytest.raises(NonFiniteError) as caught:
        train(mode, tmp_path, model, callback, sees, Spoil(3 if mode.resume else 2))
    first = r"overflowstat: inf in batch {}, first in model.layers.1.mlp.down_proj (Linear), weight: 1 of 512 is +inf"
    assert str(caught.value).startswith(first.format(batch))
    assert str(caught.value).endswith(f"\n  step        {step}")
    assert capsys.readouterr().out.rstrip().endswith(f"\n  step        {step}")
    assert caught.value.batch_number == batch
    assert [found.batches for found in callback.detections] == [1]
    assert nothing_is_left(model) and callback.monitor is None
    del caught
    gc.collect()
    assert [seen() for seen in sees.monitors] == [None]


def test_evaluations_are_left_out_where_they_are_not_asked_for(recorder_name: RecorderName, tmp_path: Path) -> None:
    mode = next(mode for mode in MODES if mode.name == "evaluation first")
    model = tiny()
    callback = OverflowStatCallback(recorder=recorder_name, evaluation=False, sinks=[])
    sees = Sees(callback)
    train(mode, tmp_path, model, sees, callback, eval_steps=1)
    assert sees.batches == STEPS
    assert nothing_is_left(model)
    spoiled = tiny()
    with pytest.raises(NonFiniteError, match=r"inf in batch 2, (.|\n)*step +3, training$"):
        train(mode, tmp_path, spoiled, callback, Spoil(2), eval_steps=1)


def test_steps_are_traced_with_all_of_their_batches_and_nothing_of_an_evaluation(
    recorder_name: RecorderName, tmp_path: Path
) -> None:
    """Two batches a step and one of an evaluation: 0 1 e, 3 4 e, 6 7 e, 9 10 e, 12 13 e."""
    sink = Numbers()
    callback = OverflowStatCallback(recorder=recorder_name, trace_steps=[2, 4, 5], trace_batch_nums=[0], sinks=[sink])
    mode = Mode("", {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1})
    train(mode, tmp_path, tiny(), callback)
    assert {number for number, traced in sink.traced.items() if traced == {True}} == {0, 3, 4, 9, 10, 12, 13}
    assert {number for number, traced in sink.traced.items() if traced == {False}} == {1, 2, 5, 6, 7, 8, 11, 14}


def test_a_traced_step_is_printed_and_not_judged(
    recorder_name: RecorderName, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step after it is; and the loss, which no frame of that shows, is told of."""
    callback = OverflowStatCallback(recorder=recorder_name, trace_steps=[3])
    with (
        pytest.warns(MonitorWarning, match=r"the loss is (nan|inf), for the first time, in step 3$"),
        pytest.raises(NonFiniteError, match=r"in batch 3, (.|\n)*step +4, training$"),
    ):
        train(MODES[0], tmp_path, tiny(), callback, Spoil(2))
    printed = capsys.readouterr().out
    assert printed.count("*** Starting batch number=2 ***") == 1 and "number=1 ***" not in printed
    assert "loss Tensor\n     nan      nan value" in printed or "loss Tensor\n     inf      inf value" in printed


@pytest.mark.parametrize("step", [1, 3])
def test_a_training_stops_at_a_step(step: int, tmp_path: Path) -> None:
    callback = OverflowStatCallback(stop_at_step=step, sinks=[])
    sees = Sees(callback)
    trainer = train(MODES[2], tmp_path, tiny(), sees, callback)
    assert trainer.state.global_step == step and sees.batches == 2 * step


def test_a_training_ends_by_an_exception_at_a_batch_as_without_a_trainer(tmp_path: Path) -> None:
    model = tiny()
    with pytest.raises(BatchLimitReached, match="stopped after 3 batches"):
        train(MODES[0], tmp_path, model, OverflowStatCallback(abort_after_batch_num=2, sinks=[]))
    assert nothing_is_left(model)


class Loss:
    """Cross entropy, computed outside of the model; in one call something else."""

    def __init__(self, bad_call: int, value: float = NAN) -> None:
        self.calls = 0
        self.bad_call = bad_call
        self.value = value

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: object) -> Tensor:
        self.calls += 1
        loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return loss * self.value if self.calls == self.bad_call else loss


def test_a_loss_that_the_log_filter_hides_stops_the_training_before_the_weights_take_it(
    recorder_name: RecorderName, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, callback = tiny(), OverflowStatCallback(recorder=recorder_name)
    with pytest.raises(NonFiniteError) as caught:
        train(MODES[2], tmp_path, model, callback, compute_loss_func=Loss(bad_call=6))
    assert str(caught.value) == (
        "overflowstat: nan in batch 5, first in loss (Tensor), value: 1 of 1 is nan; float32, shape []\n"
        "  step        3, training"
    )
    assert [frame.module for frame in caught.value.frames[-3:]] == ["lm_head", "", "loss"]
    assert len(caught.value.frames) == 21
    assert callback.first_bad_loss is not None and callback.first_bad_loss.step == 3
    assert "loss Tensor\n     nan      nan value\n" in capsys.readouterr().out
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert nothing_is_left(model)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_loss_that_the_log_filter_hides_is_told_and_the_training_goes_on(
    value: float, recorder_name: RecorderName, tmp_path: Path
) -> None:
    """Its gradient is not kept from the weights, which are met bad in the next step."""
    callback = OverflowStatCallback(recorder=recorder_name, on_detect="warn", verdict=False, sinks=[])
    with pytest.warns(MonitorWarning) as told:
        trainer = train(
            MODES[0],
            tmp_path,
            tiny(),
            callback,
            compute_loss_func=Loss(bad_call=3, value=value),
            logging_strategy="steps",
            logging_steps=1,
        )
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == STEPS and all(map(torch.isfinite, map(torch.tensor, logged))), "the filter hides it"
    kind = "nan" if value != value else "inf"
    assert str(told[0].message).startswith(
        f"overflowstat: {kind} in batch 2, first in loss (Tensor), value: 1 of 1 is "
    )
    assert str(told[0].message).endswith("\n  step        3, training")
    assert not any("for the first time" in str(warning.message) for warning in told)
    found = callback.first_bad_loss
    assert found is not None and found.step == 3 and str(found.value) == str(value)
    assert callback.detections[0].report.bad.module == "loss"


def test_a_loss_is_left_alone_where_that_is_asked_for(tmp_path: Path) -> None:
    model, sink = tiny(), Numbers()
    callback = OverflowStatCallback(check_loss=False, sinks=[sink], stop_at_step=3)
    trainer = make(tmp_path, model, callback, compute_loss_func=Loss(bad_call=3))
    trainer.train()
    assert callback.first_bad_loss is None and "loss" not in sink.modules


def test_a_loss_of_a_batch_that_is_bad_anyway_is_told_beside_that(tmp_path: Path) -> None:
    callback = OverflowStatCallback(on_detect="warn", verdict=False, sinks=[])
    with pytest.warns(MonitorWarning) as told:
        train(MODES[0], tmp_path, tiny(), callback, Spoil(2))
    texts = [str(warning.message) for warning in told]
    assert texts[0].startswith("overflowstat: inf in batch 2, first in model.layers.1.mlp.down_proj (Linear), weight")
    assert sum(text.endswith("for the first time, in step 3") for text in texts) == 1


def test_a_loss_goes_to_sinks_and_a_callable_as_any_frame(recorder_name: RecorderName, tmp_path: Path) -> None:
    sink, reports = Numbers(), list[Report]()
    callback = OverflowStatCallback(recorder=recorder_name, on_detect=reports.append, sinks=[sink], stop_at_step=3)
    train(MODES[0], tmp_path, tiny(), callback, compute_loss_func=Loss(bad_call=2))
    assert sink.modules.count("loss") == 3
    assert reports[0].bad.module == "loss" and reports[0].batch_number == 1


def test_a_subclass_with_a_training_step_of_its_own_is_seen_and_left_as_it_was(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            return loss * NAN if self.state.global_step == 1 else loss

    model, callback = tiny(), OverflowStatCallback(on_detect="warn", sinks=[])
    trainer = make(tmp_path, model, callback, kind=Own)
    mine = trainer.training_step = trainer.training_step  # as some libraries put one on the object
    with pytest.warns(MonitorWarning, match="first in loss"):
        trainer.train()
    assert callback.first_bad_loss is not None and callback.first_bad_loss.step == 2
    assert vars(trainer)["training_step"] is mine and ours(model) == 0


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_exception_of_anything_else_leaves_nothing_and_is_kept(error: BaseException, tmp_path: Path) -> None:
    model, callback = tiny(), OverflowStatCallback(sinks=[])
    sees = Sees(callback)
    trainer = make(tmp_path, model, sees, callback, Raises(error))
    with pytest.raises(type(error)) as caught:
        trainer.train()
    assert caught.value is error and nothing_is_left(model, trainer) and callback.monitor is None
    caught.value.__traceback__ = error.__traceback__ = None
    del caught
    gc.collect()
    assert [seen() for seen in sees.monitors] == [None]


def test_each_training_has_a_monitor_of_its_own(tmp_path: Path) -> None:
    model, callback = tiny(), OverflowStatCallback(sinks=[])
    sees = Sees(callback)
    trainer = make(tmp_path, model, sees, callback)
    trainer.train()
    trainer.train()
    gc.collect()
    assert [seen() for seen in sees.monitors] == [None, None] and sees.batches == STEPS
    assert nothing_is_left(model, trainer)


def test_after_a_training_that_failed_the_next_one_is_watched_anew(tmp_path: Path) -> None:
    model, callback = tiny(), OverflowStatCallback(on_detect="warn", sinks=[])
    broken = make(tmp_path, model, callback, Raises(RuntimeError("mine")), compute_loss_func=Loss(bad_call=1))
    with pytest.warns(MonitorWarning), pytest.raises(RuntimeError, match="mine"):
        broken.train()
    assert callback.first_bad_loss is not None
    fresh = tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        make(tmp_path, fresh, callback).train()
    assert callback.first_bad_loss is None and callback.detections == [] and nothing_is_left(fresh)


def test_a_training_that_begins_again_with_smaller_batches_has_one_monitor(tmp_path: Path) -> None:
    class Small(Trainer):
        """Has no memory for its first batch of two."""

        def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> Tensor:
            if len(inputs["input_ids"]) == 2:
                raise RuntimeError("CUDA out of memory.")
            loss: Tensor = super().training_step(model, inputs, *args)
            return loss

    model, callback = tiny(), OverflowStatCallback(sinks=[])
    sees = Sees(callback)
    trainer = make(tmp_path, model, sees, callback, kind=Small, auto_find_batch_size=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        trainer.train()
    assert trainer.state.train_batch_size == 1 and len(sees.monitors) == 1 and nothing_is_left(model, trainer)


def test_gradients_are_watched_as_without_a_trainer(tmp_path: Path) -> None:
    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grad: Tensor) -> Tensor:
            return grad[0] * NAN

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: object) -> Tensor:
        result: Tensor = Spoils.apply(outputs.logits).square().mean()  # type: ignore[no-untyped-call,unused-ignore]
        return result

    model = tiny()
    with pytest.raises(NonFiniteError, match=r"in batch 0, first in lm_head \(Linear\), grad output(.|\n)*step +1"):
        train(MODES[0], tmp_path, model, OverflowStatCallback(gradients=True, sinks=[]), compute_loss_func=loss)
    assert nothing_is_left(model)


def test_the_style_and_the_sinks_are_the_users(tmp_path: Path) -> None:
    from overflowstat.report import ReferenceStyle

    class Keep(Keeps):
        every_frame = False

    sink = Keep()
    callback = OverflowStatCallback(style=ReferenceStyle(), sinks=[sink])
    with pytest.raises(NonFiniteError, match=r"^DebugUnderflowOverflow: inf/nan detected(.|\n)*step +3, training$"):
        train(MODES[0], tmp_path, tiny(), callback, Spoil(2))
    assert len(sink.reports) == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"trace_step": [1]}, TypeError, r"^OverflowStatCallback\(\) got an unexpected keyword argument 'trace_step'$"),
        ({"trace_steps": 3}, TypeError, "trace_steps=3: must be a list of steps"),
        ({"trace_steps": [0]}, ValueError, "trace_steps: step=0: must be 1 or more"),
        ({"stop_at_step": 0}, ValueError, "stop_at_step=0: must be 1 or more"),
        ({"stop_at_step": "3"}, TypeError, "stop_at_step='3': must be a whole number"),
        ({"evaluation": 1}, TypeError, "evaluation=1: must be True or False"),
        ({"check_loss": None}, TypeError, "check_loss=None: must be True or False"),
        ({"style": "short"}, TypeError, "style"),
        ({"model": 1}, TypeError, r"^OverflowStatCallback\(\) got an unexpected keyword argument 'model'$"),
        ({"check": "never"}, ValueError, "check='never': must be one of"),
        ({"on_detect": "stop"}, ValueError, "on_detect='stop': must be one of"),
        ({"every_n": 0}, ValueError, "every_n=0: must be 1 or more"),
        ({"sinks": [print]}, TypeError, "sinks"),
        ({"trace_batch_nums": [-1]}, ValueError, "trace_batch_nums: batch number=-1"),
        ({"warn_at": 2.0}, ValueError, "warn_at=2.0"),
    ],
)
def test_an_argument_that_makes_no_sense_is_told_at_once(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        OverflowStatCallback(**options)


def test_a_trace_that_cannot_be_written_is_told_before_the_first_step(tmp_path: Path) -> None:
    model = tiny()
    trainer = make(tmp_path, model, OverflowStatCallback(trace_file=tmp_path / "nowhere" / "t.jsonl"))
    with pytest.raises(TraceError, match="cannot be written: there is no folder"):
        trainer.train()
    assert trainer.state.global_step == 0 and nothing_is_left(model, trainer)


def test_that_a_callback_is_made_neither_makes_a_file_nor_ends_a_sink(tmp_path: Path) -> None:
    class Ends(Keeps):
        def close(self) -> None:
            raise AssertionError

    OverflowStatCallback(trace_file=tmp_path / "t.jsonl", sinks=[Ends()])
    assert list(tmp_path.iterdir()) == []


def test_data_parallel_is_refused(tmp_path: Path) -> None:
    model = tiny()
    trainer = make(tmp_path, model, OverflowStatCallback())
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match=r"nn\.DataParallel on 2 GPUs, .* torchrun"):
        trainer.train()
    assert nothing_is_left(model, trainer)


def test_the_train_of_the_trainer_is_wrapped_as_long_as_there_is_a_callback() -> None:
    gc.collect()
    assert Trainer.train is ORIGINAL_TRAIN
    one, other = OverflowStatCallback(), OverflowStatCallback()
    wrapped = Trainer.train
    assert wrapped is not ORIGINAL_TRAIN and wrapped.__wrapped__ is ORIGINAL_TRAIN
    del one
    gc.collect()
    assert Trainer.train is wrapped
    copies = [copy.deepcopy(other), pickle.loads(pickle.dumps(other))]
    del other
    gc.collect()
    assert Trainer.train is wrapped
    install()
    del copies
    gc.collect()
    assert Trainer.train is wrapped
    uninstall()
    assert Trainer.train is ORIGINAL_TRAIN


def test_a_training_that_is_not_the_trainers_own_is_told(tmp_path: Path) -> None:
    class Own(Trainer):
        def train(self) -> Any:
            return self._inner_training_loop(batch_size=2, args=self.args)

    model, callback = tiny(), OverflowStatCallback(sinks=[])
    trainer = make(tmp_path, model, callback, kind=Own)
    with pytest.warns(MonitorWarning, match=r"this train\(\) is not that of transformers\.Trainer"):
        trainer.train()
    assert nothing_is_left(model, trainer) and callback.monitor is None


# torch.compile


@pytest.fixture
def compiler() -> Iterator[dict[str, Any]]:
    torch.compiler.reset()
    counters.clear()
    yield {"torch_compile": True, "torch_compile_backend": "eager"}
    torch.compiler.reset()
    counters.clear()


@pytest.mark.slow
def test_a_model_that_the_trainer_compiles_is_watched(compiler: dict[str, Any], tmp_path: Path) -> None:
    model, callback = tiny(layers=1), OverflowStatCallback(recorder="native", sinks=[])
    sees = Sees(callback)
    with pytest.raises(NonFiniteError, match=r"inf in batch 2, first in model.layers.0.mlp.down_proj(.|\n)*step +3"):
        train(Mode("", compiler), tmp_path, model, sees, callback, Spoil(2))
    assert nothing_is_left(model)
    gc.collect()


def test_a_model_that_was_compiled_before_is_watched_when_it_trains_on(
    compiler: dict[str, Any], tmp_path: Path
) -> None:
    model, callback = tiny(layers=1), OverflowStatCallback(sinks=[])
    sees = Sees(callback)
    trainer = make(tmp_path, model, max_steps=2, **compiler)
    trainer.train()
    trainer.add_callback(sees)
    trainer.add_callback(callback)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        trainer.train()
    assert trainer.state.global_step == 2 and nothing_is_left(model, trainer)
    assert sees.batches == 2


@pytest.mark.usefixtures("compiler")
def test_a_run_says_nothing_of_calls_before_it_where_something_else_was_compiled(tmp_path: Path) -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert has_compiled()
    model, callback = tiny(layers=1), OverflowStatCallback(sinks=[])
    sees = Sees(callback)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitorWarning)
        train(Mode("", {}), tmp_path, model, sees, callback)
    assert sees.batches == STEPS


@pytest.mark.slow
def test_a_model_that_the_trainer_compiles_with_inductor_trains_as_without(tmp_path: Path) -> None:
    torch.compiler.reset()
    model, callback = tiny(), OverflowStatCallback(sinks=[])
    sees = Sees(callback)
    trainer = train(Mode("", {"torch_compile": True}), tmp_path, model, sees, callback)
    assert sees.batches == STEPS and nothing_is_left(model, trainer)
    torch.compiler.reset()


# debug="underflow_overflow"


def observed(mode: Mode, folder: Path, spoil_after: int | None) -> tuple[str, BaseException | None, nn.Module]:
    """What a user sees of a training with `debug="underflow_overflow"`: what is printed, and how it ends."""
    model, printed, error = tiny(), io.StringIO(), None
    callbacks = [] if spoil_after is None else [Spoil(spoil_after + mode.resume)]
    with contextlib.redirect_stdout(printed):
        try:
            train(mode, folder, model, *callbacks, debug="underflow_overflow")
        except ValueError as raised:
            error = raised
    return printed.getvalue(), error, model


@pytest.mark.parametrize("spoil_after", [None, 2])
@EACH_MODE
def test_the_trainers_debug_prints_and_raises_the_same_and_is_gone_after_it(
    mode: Mode, spoil_after: int | None, tmp_path: Path
) -> None:
    expected, error, left = observed(mode, tmp_path / "original", spoil_after)
    assert ours(left, package="transformers") >= sum(1 for _ in left.modules()), "the original stays"
    install()
    got, found, model = observed(mode, tmp_path / "ours", spoil_after)
    assert got == expected and ("Detected inf/nan" in got) == (spoil_after is not None)
    assert nothing_is_left(model) and ours(model, package="transformers") == 0
    assert (str(found), isinstance(found, NonFiniteError)) == (str(error), error is not None)


def test_the_installed_drop_in_takes_options_the_last_of_which_hold(tmp_path: Path) -> None:
    install(max_frames_to_save=2)
    install(verdict=True, max_frames_to_save=1)
    printed, error, model = observed(MODES[0], tmp_path, spoil_after=2)
    assert "Last 1 forward frames:" in printed and "weight was bad before it was used" in printed
    assert isinstance(error, NonFiniteError) and nothing_is_left(model)


def test_an_option_that_the_drop_in_does_not_have_is_told_and_nothing_replaced() -> None:
    for options in ({"max_frames": 3}, {"verdict": True, "model": None}):
        with pytest.raises(TypeError, match=rf"^install\(\) got an unexpected keyword argument '{[*options][-1]}'$"):
            install(**options)
    assert Trainer.train is ORIGINAL_TRAIN and trainer_module.DebugUnderflowOverflow is ORIGINAL_DEBUGGER


def test_installing_is_done_once_and_taken_back_exactly() -> None:
    before = dict(vars(trainer_module)), dict(vars(debug_utils)), dict(vars(Trainer))
    uninstall()
    install()
    train, debugger = Trainer.train, trainer_module.DebugUnderflowOverflow
    install()
    assert Trainer.train is train and trainer_module.DebugUnderflowOverflow is debugger
    assert debug_utils.DebugUnderflowOverflow is debugger and issubclass(debugger, DebugUnderflowOverflow)
    uninstall()
    uninstall()
    assert (dict(vars(trainer_module)), dict(vars(debug_utils)), dict(vars(Trainer))) == before


def test_what_someone_else_has_put_on_top_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ours, which it calls, does nothing more."""
    install()
    train = Trainer.train

    def other(trainer: Any) -> Any:
        return train(trainer)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "train", other)
        patched.setattr(trainer_module, "DebugUnderflowOverflow", "someone else's")
        uninstall()
        assert Trainer.train is other and trainer_module.DebugUnderflowOverflow == "someone else's"
        assert debug_utils.DebugUnderflowOverflow is ORIGINAL_DEBUGGER
    Trainer.train = ORIGINAL_TRAIN  # to which the context could not know to go back
    trainer_module.DebugUnderflowOverflow = ORIGINAL_DEBUGGER


def test_a_drop_in_that_is_made_outside_of_a_training_stays() -> None:
    install()
    model = tiny()
    debugger = debug_utils.DebugUnderflowOverflow(model)
    assert isinstance(debugger, DebugUnderflowOverflow) and ours(model) > 0
    uninstall()
    assert ours(model) > 0
    debugger.remove()
    assert nothing_is_left(model)


def test_trainings_of_two_threads_end_each_with_its_own_drop_in() -> None:
    install()
    both_watch, first_is_over = threading.Barrier(2), threading.Event()
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    left: list[tuple[int, int]] = []

    class Runs:
        """What `Trainer.train` is to this test: as its subclass would be."""

        def __init__(self, number: int) -> None:
            self.number = number

        def train(self) -> None:
            trainer_module.DebugUnderflowOverflow(models[self.number])
            both_watch.wait(30)
            if self.number == 1:
                assert first_is_over.wait(30)
                left.append((ours(models[0]), ours(models[1])))

    def run(number: int) -> None:
        integration._scoped(Runs.train)(Runs(number))
        first_is_over.set()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == [(0, 2)] and nothing_is_left(models[1])


def fail_in(debugger: DebugUnderflowOverflow, error: Exception) -> None:
    with debugger:
        raise error


def test_leaving_the_drop_in_by_an_exception_keeps_that() -> None:
    model = nn.Linear(2, 2)
    debugger = DebugUnderflowOverflow(model)
    with pytest.raises(KeyError, match="mine"):
        fail_in(debugger, KeyError("mine"))
    assert nothing_is_left(model)


IMPORTS = {
    "nothing": "",
    "debug_utils": "import transformers.debug_utils",
    "trainer": "from transformers import Trainer",
}


@pytest.mark.slow
@pytest.mark.parametrize("before", IMPORTS.values(), ids=IMPORTS)
def test_it_does_not_matter_what_was_imported_before(before: str) -> None:
    script = f"""
{before}
from overflowstat.integrations.transformers import install, uninstall
install()
import overflowstat, transformers.debug_utils, transformers.trainer
from transformers import Trainer
for module in (transformers.debug_utils, transformers.trainer):
    assert issubclass(module.DebugUnderflowOverflow, overflowstat.DebugUnderflowOverflow)
assert Trainer.train.__wrapped__
uninstall()
for module in (transformers.debug_utils, transformers.trainer):
    assert module.DebugUnderflowOverflow.__module__ == "transformers.debug_utils"
assert not hasattr(Trainer.train, "__wrapped__")
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(overflowstat.__file__).parent.parent)


@pytest.mark.slow
def test_nothing_of_transformers_is_imported_by_the_package_itself() -> None:
    script = "import overflowstat, overflowstat.integrations, sys; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(overflowstat.__file__).parent.parent)


@pytest.mark.slow
def test_each_process_watches_its_own_model(two_processes: Callable[[str], str]) -> None:
    """In DistributedDataParallel."""
    printed = two_processes("""
import tempfile
from pathlib import Path
from test_trainer import MODES, NonFiniteError, OverflowStatCallback, Sees, Spoil, nothing_is_left, tiny, train
model = tiny()
sees = Sees(callback := OverflowStatCallback(sinks=[]))
trainer = train(MODES[0], Path(tempfile.mkdtemp()), model, sees, callback)
say(type(trainer.model_wrapped).__name__, sees.batches, nothing_is_left(model, trainer))
try:
    train(MODES[0], Path(tempfile.mkdtemp()), model, callback, Spoil(2))
except NonFiniteError as error:
    say("bad in", error.batch_number, str(error).splitlines()[-1].strip(), nothing_is_left(model))
""")
    assert printed.count("DistributedDataParallel 5 True\n") == 2
    assert printed.count("bad in 2 step        3, training True\n") == 2

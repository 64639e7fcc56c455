"""The Trainer of transformers: its `debug="underflow_overflow"` done by this package, and a callback for all else."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from functools import wraps
from typing import Any

try:
    import transformers.debug_utils
    import transformers.trainer
    from transformers.trainer_callback import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"overflowstat.integrations.transformers needs transformers with its Trainer ({error}): "
        "pip install transformers[torch]",
        name="transformers",
    ) from error

from torch import nn

from ..debug_utils import DebugUnderflowOverflow
from ..errors import warn_user
from .watched_run import WatchedRun, WatchesRuns, check_options

__all__ = ["OverflowStatCallback", "install", "uninstall"]


def install(**options: Any) -> None:
    """Have the Trainer's `debug="underflow_overflow"` and `transformers.debug_utils` use this package's drop-in.

    It is detached when `train()` ends, by an exception too, while the original stays on the model. Copies of the name
    that other modules have imported before are theirs. Calling this again changes the options, and nothing else.

    Args:
        options: keyword arguments for each `DebugUnderflowOverflow` that does not name them itself.

    Raises:
        TypeError: it has no such option.
    """
    check_options("install", DebugUnderflowOverflow, options)
    with _lock:
        _Debugger.options = options
        for replacement in (*_debuggers, _train):
            replacement.apply()


def uninstall() -> None:
    """Restore what `install()` replaced, but for what someone else has replaced since. Does nothing without it."""
    with _lock:
        _Debugger.options = {}
        for replacement in _debuggers:
            replacement.restore()
        _restore_train_if_unused()


class OverflowStatCallback(WatchesRuns, TrainerCallback):
    """Watches the model of each `train()`, and nothing of it is left when that ends, by an exception too.

        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[OverflowStatCallback(on_detect="warn")])

    A batch is one forward of the model, so that gradient accumulation has several in a step, and forwards of an
    evaluation are some, too. Reports and exceptions name the step. `evaluate()` and `predict()` outside of `train()`
    are not watched.

    The Trainer tells no callback of an exception, nor of the loss: while there is such a callback, `Trainer.train` is
    wrapped for that, and in `train()` the trainer's `training_step`.

    Args:
        trace_steps: optimizer steps whose batches are printed instead of being judged. The first step is 1: they are
            counted as in the Trainer's logs and in the names of its checkpoints, also where it resumes from one.
        stop_at_step: end the training after this step, as transformers' own callbacks do.
        evaluation: whether forwards of an evaluation are watched. If not, hooks are attached for each step anew.
        check_loss: whether to judge the loss that `training_step` returns, which is what the Trainer's log filter
            (`logging_nan_inf_filter`) hides if it is not finite; before the optimizer's step. On CUDA a wait, as the
            filter's own.
        options: all those of `Monitor`. With `batch_ends="step"` a batch is what the Trainer calls a micro-batch.

    Attributes:
        monitor: that of the `train()` in progress, or None.
        detections: those of the last `train()`, or the one in progress; see `Monitor`.
        first_bad_loss: in it, `step` and `value` of the first loss that was not finite, or None.

    Raises:
        TypeError, ValueError: an argument is not as told here and in `Monitor`; what needs the model to be known, in
            `train()`. Also there, for the Trainer's `nn.DataParallel`, which cannot be watched.
        NonFiniteError, BatchLimitReached, TraceError: in `train()`, see `Monitor`.
    """

    def __new__(cls, *args: object, **kwargs: object) -> OverflowStatCallback:
        callback: OverflowStatCallback = super().__new__(cls)  # also for copies, deep or pickled
        with _lock:
            _callbacks.add(callback)
            _train.apply()
        weakref.finalize(callback, _restore_train_if_unused).atexit = False
        return callback

    _training: _Training | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model: nn.Module = kwargs["model"]
        training = _training.get()
        if self._run is not None:
            if training is not None and training is self._training and self._run.monitor.model is model:
                return  # it begins again, with smaller batches (`auto_find_batch_size`)
            self._end_run()
        if args.n_gpu > 1:
            raise ValueError(
                f"the Trainer is about to use nn.DataParallel on {args.n_gpu} GPUs, whose replicas cannot be watched: "
                "start one process for each GPU, with torchrun"
            )
        self._run = WatchedRun(model, self._options, "forward")
        self._run.begin_evaluation("evaluation", state.global_step)
        if training is None:
            warn_user(
                "this train() is not that of transformers.Trainer: the loss is not seen, and after an exception the "
                "callback's monitor.remove() is yours to call"
            )
        elif training is not self._training:
            self._training = training
            training.push(self._leave)
            if self._options.check_loss:
                training.call_with_loss(self._see_loss)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is not None:
            self._run.begin_step(state.global_step + 1)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is not None:
            self._run.end_batch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is not None:
            self._run.begin_evaluation("evaluation", state.global_step)
            if self._options.is_over(state.global_step):
                control.should_training_stop = True

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is not None:
            self._run.end_batch()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_run()

    def _see_loss(self, loss: object) -> None:
        if self._run is not None:
            self._run.see_loss(loss)

    def _leave(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self._training = None
        self._end_run(error)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_training": None}


class _Training(ExitStack):
    """A `train()` that runs: what is to be undone when it ends."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer

    def call_with_loss(self, see: Callable[[object], None]) -> None:
        """With what each `training_step` returns: the loss, after its backward and before the optimizer's step."""
        own = vars(self._trainer)
        before = own.get("training_step", self)  # a subclass may have put one there
        training_step = self._trainer.training_step

        @wraps(training_step)
        def seen(*args: Any, **kwargs: Any) -> Any:
            loss = training_step(*args, **kwargs)
            see(loss)
            return loss

        def restore() -> None:
            if before is self:
                own.pop("training_step", None)
            else:
                own["training_step"] = before

        own["training_step"] = seen
        self.callback(restore)


_training: ContextVar[_Training | None] = ContextVar("_training", default=None)


class _Debugger(DebugUnderflowOverflow):
    """What the Trainer makes and does not keep: gone when its `train()` has ended, if it was made in one."""

    options: dict[str, Any] = {}

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **{**self.options, **kwargs})
        if (training := _training.get()) is not None:
            training.push(self)


def _scoped(train: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(train)
    def scoped(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with _Training(trainer) as training:
            token = _training.set(training)
            training.callback(_training.reset, token)
            return train(trainer, *args, **kwargs)

    return scoped


class _Replacement:
    """An attribute of a module or class in place of the one that is there.

    Args:
        owner, name: of the attribute.
        make: what is there -> what is to be there.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._owner = owner
        self._name = name
        self._make = make
        self._original: Any = None
        self._ours: Any = None

    @property
    def is_applied(self) -> bool:
        return self._ours is not None

    def apply(self) -> None:
        """Does nothing if it is there."""
        found = vars(self._owner)[self._name]
        if self._ours is None or found is not self._ours:
            self._original, self._ours = found, self._make(found)
            setattr(self._owner, self._name, self._ours)

    def restore(self) -> None:
        """Leaves what someone else has put there since; if that calls ours, ours does nothing more."""
        if self._ours is not None and vars(self._owner)[self._name] is self._ours:
            setattr(self._owner, self._name, self._original)
        self._original = self._ours = None


_lock = threading.RLock()
_callbacks: weakref.WeakSet[OverflowStatCallback] = weakref.WeakSet()
_train = _Replacement(transformers.trainer.Trainer, "train", _scoped)
_debuggers = [
    _Replacement(module, "DebugUnderflowOverflow", lambda original: _Debugger)
    for module in (transformers.debug_utils, transformers.trainer)
]


def _restore_train_if_unused() -> None:
    with _lock:
        if not list(_callbacks) and not any(debugger.is_applied for debugger in _debuggers):
            _train.restore()

"""A callback for the Trainer of Lightning, of `lightning` or of `pytorch_lightning`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .watched_run import WatchedRun, WatchesRuns

__all__ = ["OverflowStatCallback"]

if TYPE_CHECKING:
    Callback = object
else:
    # What the user has imported, or else the first that is there: the two know nothing of each other.
    names = sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules)
    for name in names:
        try:
            Callback = importlib.import_module(name).Callback
            break
        except ImportError as error:
            problem = error
    else:
        raise ImportError(
            f"overflowstat.integrations.lightning needs Lightning ({problem}): pip install lightning", name="lightning"
        ) from problem


class OverflowStatCallback(WatchesRuns, Callback):
    """Watches the LightningModule in each `fit`, `validate`, `test` and `predict`, and nothing of it is left when that
    ends, by an exception too.

        >>> trainer = Trainer(callbacks=[OverflowStatCallback(on_detect="warn")])

    A batch is one of the data loader's, whatever its `training_step` or `validation_step` calls. Reports and exceptions
    name the step.

    Args:
        trace_steps: optimizer steps whose batches are printed instead of being judged. The first step is 1: they are
            counted as by the trainer's `global_step` after them, and in the names of its checkpoints.
        stop_at_step: end the training after this step, as the trainer's `should_stop` does.
        evaluation: whether batches of validation, test and prediction are watched.
        check_loss: whether to judge the loss: before its backward, or where the precision plugin scales it for float16,
            after the optimizer's step. On CUDA a wait.
        options: all those of `Monitor`. With `batch_ends="forward"` a batch is one forward of the LightningModule.

    Attributes:
        monitor: that of the run in progress, or None.
        detections: those of the last run, or the one in progress; see `Monitor`.
        first_bad_loss: in it, `step` and `value` of the first loss that was not finite, or None.

    Raises:
        TypeError, ValueError: an argument is not as told here and in `Monitor`; what needs the model to be known, where
            a run starts.
        NonFiniteError, BatchLimitReached, TraceError: in a run, see `Monitor`.
    """

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self._begin_run(pl_module)
        self._begin_evaluation(trainer, pl_module, "validation")

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: object, batch_idx: int) -> None:
        if self._run is not None:
            self._run.begin_step(trainer.global_step + 1)

    def on_before_backward(self, trainer: Any, pl_module: nn.Module, loss: Tensor) -> None:
        if self._run is not None and not _scales_loss(trainer):
            self._run.see_loss(loss)

    def on_train_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._run is None:
            return
        if _scales_loss(trainer):
            self._run.see_loss(outputs.get("loss") if isinstance(outputs, Mapping) else outputs)
        self._run.end_batch()
        if self._options.is_over(trainer.global_step):
            trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self._begin_evaluation(trainer, pl_module, "validation")

    def on_test_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self._begin_evaluation(trainer, pl_module, "test")

    def on_predict_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self._begin_evaluation(trainer, pl_module, "prediction")

    def on_validation_batch_end(self, *args: object, **kwargs: object) -> None:
        if self._run is not None:
            self._run.end_batch()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self._end_run(exception)

    def teardown(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        self._end_run()

    def _begin_run(self, model: nn.Module) -> None:
        self._end_run()  # of a trainer that told of no end
        self._run = WatchedRun(model, self._options, "step")

    def _begin_evaluation(self, trainer: Any, model: nn.Module, what: str) -> None:
        if self._run is None and self._options.evaluation:
            self._begin_run(model)
        if self._run is not None:
            self._run.begin_evaluation(what, trainer.global_step)


def _scales_loss(trainer: Any) -> bool:
    """Then what is given to the backward may be inf though the loss is not."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None

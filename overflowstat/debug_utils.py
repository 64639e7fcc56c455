"""A drop-in for transformers.debug_utils: change the import line, keep the rest.

Prints and raises what the original does, byte for byte where that works as documented; the README lists where we
differ on purpose.
"""

from collections import deque
from collections.abc import Collection, Sequence
from enum import Enum

from torch import Tensor, nn

from .monitor import CheckName, Monitor
from .names import named_modules
from .policy import Policy
from .recorder import RecorderName
from .report import ReferenceStyle, notices, stats_line
from .stats import tensor_stats
from .torch_recorder import count_at_least
from .validation import check_batch_numbers, check_optional_count, check_tensor

__all__ = ["DebugOption", "DebugUnderflowOverflow", "detect_overflow", "get_abs_min_max"]


class DebugUnderflowOverflow:
    """Detects where a model's weights, inputs or outputs first hold a NaN or an infinity; or traces chosen batches.

    Detection prints the last frames and raises `NonFiniteError`, which is a ValueError:

        >>> debug_overflow = DebugUnderflowOverflow(model)

    Tracing prints every frame of these batches, counted from 0, and judges none of them:

        >>> debug_overflow = DebugUnderflowOverflow(model, trace_batch_nums=[1, 3], abort_after_batch_num=3)

    It need not be kept: it stays attached to the model until `remove()`, or to the end of a `with` block.

    Args:
        model: the model to watch.
        max_frames_to_save: how many frames a report shows at most; None for all.
        trace_batch_nums: batches to trace.
        abort_after_batch_num: raise a ValueError when this batch has finished.
        recorder: "native", "torch", or "auto" for the first of the two that is usable.
        check: when numbers on a GPU are judged: "module", "batch" or "step", see `Monitor`.
        reuse_unchanged: whether a tensor that is met again in a batch is shown as it was read, see `Monitor`.
        nested: also see keyword inputs and what is inside of structures, which the original does not.
        policy: what is watched, and where numbers that are not finite are meant; the original has none.
        verdict: say below the frames which module made the numbers, and why, see `Monitor`; for that, its forward is
            run once more.

    Attributes:
        frames: texts of the frames kept for the next report.
        batch_number: forwards of `model` that have ended.
        total_calls: module calls seen.
        detected_overflow: whether anything bad was ever seen, in a traced batch too.
        module_names: qualified name of each module.

    Raises:
        TypeError, ValueError: see `Monitor`, which does the work and tells the cost.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int | None = 21,
        trace_batch_nums: Collection[int] | None = None,
        abort_after_batch_num: int | None = None,
        *,
        recorder: RecorderName = "auto",
        check: CheckName = "batch",
        reuse_unchanged: bool | None = None,
        nested: bool = False,
        policy: Policy | None = None,
        verdict: bool = False,
    ) -> None:
        self._style = ReferenceStyle()
        self._monitor = Monitor(
            model,
            max_frames_to_save=max_frames_to_save,
            trace_batch_nums=[] if trace_batch_nums is None else trace_batch_nums,
            abort_after_batch_num=abort_after_batch_num,
            recorder=recorder,
            check=check,
            reuse_unchanged=reuse_unchanged,
            nested=nested,
            policy=policy,
            verdict=verdict,
            style=self._style,
        )

    @property
    def model(self) -> nn.Module:
        return self._monitor.model

    @property
    def frames(self) -> deque[str]:
        frames = self._monitor.frames
        return deque(map(self._style.frame, frames), frames.maxlen)

    @property
    def batch_number(self) -> int:
        return self._monitor.batch_number

    @property
    def total_calls(self) -> int:
        return self._monitor.total_calls

    @property
    def detected_overflow(self) -> bool:
        return self._monitor.detected_overflow

    @property
    def module_names(self) -> dict[nn.Module, str]:
        return {module: name for name, module in named_modules(self.model)}

    @property
    def trace_batch_nums(self) -> Collection[int]:
        return self._monitor.trace_batch_nums

    @trace_batch_nums.setter
    def trace_batch_nums(self, value: Collection[int]) -> None:
        self._monitor.trace_batch_nums = check_batch_numbers("trace_batch_nums", value)

    @property
    def abort_after_batch_num(self) -> int | None:
        return self._monitor.abort_after_batch_num

    @abort_after_batch_num.setter
    def abort_after_batch_num(self, value: int | None) -> None:
        self._monitor.abort_after_batch_num = check_optional_count("abort_after_batch_num", value)

    def remove(self) -> None:
        """Detach from the model; calling it again does nothing."""
        self._monitor.remove()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """As that of a `Monitor`."""
        return type(None), ()

    def __enter__(self) -> "DebugUnderflowOverflow":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._monitor.__exit__(kind, error, traceback)


def get_abs_min_max(var: Tensor, ctx: str) -> str:
    """The line of a report for a tensor: smallest magnitude, largest magnitude, `ctx`.

    Cost and errors are those of `tensor_stats`.
    """
    return stats_line(tensor_stats(check_tensor("var", var)), ctx)


def detect_overflow(var: Tensor, ctx: str, *, thresholds: Sequence[float] = ()) -> bool:
    """Whether a tensor holds a NaN or an infinity; prints `<ctx> has nans`, `<ctx> has infs` if so.

    Args:
        var: the tensor.
        ctx: what to call it.
        thresholds: for each of these, prints how many elements are at least that large in magnitude, if any.

    Cost and errors are those of `tensor_stats`; thresholds take one pass more.
    """
    stats = tensor_stats(check_tensor("var", var))
    for notice in notices(stats, ctx):
        print(notice)
    for threshold, count in zip(thresholds, count_at_least(var, thresholds), strict=True):
        if count:
            print(f"{ctx}: {f'n{threshold}':>5}={count}")
    return stats.is_bad


class DebugOption(str, Enum):
    """What `--debug` of a transformers Trainer takes."""

    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"

    @classmethod
    def _missing_(cls, value: object) -> "DebugOption":
        raise ValueError(f"{value} is not a valid {cls.__name__}, please select one of {[o.value for o in cls]}")

"""The statistics of tensors, for people. What hooks use is in measurement.py."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .capture import is_wrapper
from .layout import coordinates
from .recorder import Recorder, RecorderName, make_recorder
from .row import NonFinite, Row
from .validation import check_bool
from .wording import short_name

__all__ = ["READABLE_DTYPES", "TensorStats", "apart_from_the_run", "shape_of", "tensor_stats", "why_unreadable"]

READABLE_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
        *(torch.complex128, torch.complex64, torch.complex32),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        torch.bool,
    }
)


@dataclass(frozen=True, slots=True)
class TensorStats:
    """What one pass over a tensor tells.

    Magnitudes are exact: Python ints for integer and bool tensors (True is 1), floats for all others. A complex element
    counts by its modulus, rounded to float32 (complex128: float64) and saturating there, so that a finite element is
    never an infinity.

    Attributes:
        abs_min: smallest magnitude over the elements that are not NaN, where an infinity counts as one; nan if there
            is no such element (`numel` and the counts tell why).
        abs_max: largest magnitude over the same elements.
        finite_abs_max: largest magnitude over the finite elements; nan if there is none.
        nan_count: elements that are NaN (complex: in either part).
        posinf_count: elements that are +inf (complex: infinite in either part, which also wins over a NaN part).
        neginf_count: elements that are -inf; 0 for complex ones.
        first_bad: coordinates of the first element, in memory order, that is not finite; None if all are.
        numel: elements of the tensor; those of an expanded view count as often as they are seen.
        dtype: the tensor's.
        shape: the tensor's, in elements.
        zero_count: elements that are 0 (or False). This and what follows is None where `detail` was not asked for.
        subnormal_count: elements that are not 0 and smaller than the smallest normal number of the tensor's dtype, so
            that they have fewer bits than it promises; of complex ones by the modulus, and the dtype of their parts. 0
            for dtypes without such numbers: integers, bool, float8_e8m0fnu.
        abs_min_nonzero: smallest magnitude over the elements that are neither 0 nor NaN; nan if there is none.
        is_counted: False for what compiled code has read and is bad: it tells that there are elements of a kind, whose
            count is then 1, and neither how many nor where: `first_bad` is (); `finite_abs_max` is nan, and where one
            is NaN, so are `abs_min` and `abs_max`, and nothing is known of infinities.
    """

    abs_min: float | int
    abs_max: float | int
    finite_abs_max: float | int
    nan_count: int
    posinf_count: int
    neginf_count: int
    first_bad: tuple[int, ...] | None
    numel: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    zero_count: int | None = None
    subnormal_count: int | None = None
    abs_min_nonzero: float | int | None = None
    is_counted: bool = True

    @classmethod
    def of(cls, row: Row, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> "TensorStats":
        first_bad = None if row.first_bad is None else coordinates(row.first_bad, shape, stride)
        return cls(*row[:6], first_bad, math.prod(shape), dtype, shape, *row[7:])

    @property
    def inf_count(self) -> int:
        return self.posinf_count + self.neginf_count

    @property
    def has_nan(self) -> bool:
        return self.nan_count > 0

    @property
    def has_inf(self) -> bool:
        return self.inf_count > 0

    @property
    def non_finite(self) -> NonFinite:
        return NonFinite.of(self.nan_count, self.posinf_count, self.neginf_count)

    @property
    def bad_counts(self) -> list[tuple[str, str]]:
        """How many there are of each kind, in words: ("512", "nan"), or if not counted ("some", "nan")."""
        counts = [(self.nan_count, "nan"), (self.posinf_count, "+inf"), (self.neginf_count, "-inf")]
        return [(str(count) if self.is_counted else "some", kind) for count, kind in counts if count]

    @property
    def is_bad(self) -> bool:
        """Whether any element is NaN or infinite."""
        return self.has_nan or self.has_inf


@overload
def tensor_stats(x: Tensor, *, detail: bool = False, recorder: RecorderName | Recorder = "auto") -> TensorStats: ...
@overload
def tensor_stats(
    x: Sequence[Tensor], *, detail: bool = False, recorder: RecorderName | Recorder = "auto"
) -> list[TensorStats]: ...
def tensor_stats(
    x: Tensor | Sequence[Tensor], *, detail: bool = False, recorder: RecorderName | Recorder = "auto"
) -> TensorStats | list[TensorStats]:
    """Statistics of a tensor, or of each of a list of tensors.

    Args:
        x: tensors of any shape, dtype of `READABLE_DTYPES`, strides and device, mixed as they come.
        detail: also count zeros and subnormals, and find the smallest magnitude that is not 0, in the same pass.
        recorder: what reads them: "native", "torch", or "auto" for the first of the two that is usable; or one of your
            own.

    Cost: one pass over the memory of each tensor, nothing copied; for a list one launch (more for tensors that are not
    dense in memory) and one host sync a CUDA device.

    Raises:
        TypeError: `x` is no tensor or holds something that is none, or a tensor has no elements to read: another
            dtype, a sparse or nested layout, the meta device. Nothing has been read then.
        ValueError: a tensor's storage has been freed, or there is no such recorder.
        RuntimeError: a device failed or refused the launch.
    """
    tensors = [x] if isinstance(x, Tensor) else x
    if not isinstance(tensors, Sequence) or isinstance(tensors, (str, bytes)):
        raise TypeError(f"x must be a tensor or a sequence of tensors, not {type(x).__name__}")
    for i, tensor in enumerate(tensors):
        name = "x" if isinstance(x, Tensor) else f"x[{i}]"
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if reason := why_unreadable(tensor):
            raise TypeError(f"{name} cannot be read, it is {reason}")
    reader = make_recorder(recorder, check_bool("detail", detail))
    with apart_from_the_run():
        rows = reader.record(tensors).rows()
    for row in rows:
        if isinstance(row, str):
            raise RuntimeError(f"overflowstat could not read a tensor: {row}")
    stats = [TensorStats.of(row, *shape_of(t)) for t, row in zip(tensors, rows, strict=True) if isinstance(row, Row)]
    return stats[0] if isinstance(x, Tensor) else stats


@contextmanager
def apart_from_the_run() -> Iterator[None]:
    """Reading is no part of what the model does: not for a tensor subclass's own functions, not for torch.jit.trace,
    nor for modes in which somebody counts, keeps or changes what is computed (FlopCounterMode, selective checkpointing,
    FakeTensorMode)."""
    trace = torch._C._get_tracing_state()
    if trace is not None:
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            yield
    finally:
        if trace is not None:
            torch._C._set_tracing_state(trace)  # type: ignore[attr-defined]


def why_unreadable(tensor: Tensor) -> str:
    """What a tensor is that has no elements to read, in a word or two; empty for one that can be read."""
    if is_lazy(tensor):
        return "uninitialized"
    if is_wrapper(tensor):
        return type(tensor).__name__
    with torch._C.DisableTorchFunction():
        if tensor.is_nested:
            return "nested"
        if tensor.layout != torch.strided:
            return short_name(tensor.layout)
        if tensor.device.type == "meta":
            return "meta"
        if tensor.dtype not in READABLE_DTYPES:
            return short_name(tensor.dtype)
    return ""


def is_on_meta(tensor: Tensor) -> bool:
    """Not of wrappers, which may answer in Python, or refuse to."""
    with torch._C.DisableTorchFunction():
        return not is_wrapper(tensor) and tensor.is_meta


def shape_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """(shape, strides, dtype): what a row needs of its tensor to become a TensorStats, without the tensor."""
    with torch._C.DisableTorchFunction():
        return tuple(tensor.shape), tensor.stride(), tensor.dtype

"""The recorder in plain torch operations, for any device torch knows."""

import math
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .layout import memory_order
from .row import Row

__all__ = ["TorchRecorder", "count_at_least", "is_in_its_storage"]

# Bounds the extra memory: a few temporaries of this many elements. On a CPU small enough for L2, so that the passes
# after the first do not go to memory, and no more than torch leaves to one thread (at::internal::GRAIN_SIZE), since
# handing such a slice to two costs more than it brings; elsewhere a launch costs more than a pass, so larger ones.
SLICE_ON_CPU = 1 << 15
SLICE_ELSEWHERE = 1 << 20

_UNSIGNED_WIDENED = {torch.uint16: torch.int32, torch.uint32: torch.int64}
_INT64_MIN = -(1 << 63)


class TorchRecorder:
    """Gives the same rows as the native recorder, but for what torch.set_flush_denormal(True) makes of subnormals.

    Cost: on a CPU two passes over slices in cache (eight where a slice holds something that is not finite, six more
    where `detail` finds something below the normal numbers), elsewhere about fourteen launches a slice (with detail
    twice as many), and one host sync a device for all that was recorded since the last one; extra memory of at most a
    few slices, never a copy of a large tensor.
    """

    name = "torch"

    def __init__(self, detail: bool = False) -> None:
        self.detail = detail
        self._lock = threading.RLock()
        self._unfetched: list[_Part] = []
        self._streams: dict[torch.device, set[torch.cuda.Stream]] = {}  # on which these were launched

    def detailed(self) -> "TorchRecorder":
        return TorchRecorder(detail=True)

    def capture(self) -> None:
        return None

    def record(self, tensors: Sequence[Tensor]) -> "_Reading":
        if any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("plain torch operations cannot read tensors while a CUDA graph is captured")
        # Of neither mode: not every operation here has a forward-mode derivative in every version of torch.
        with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
            parts = [_read(tensor, self.detail) for tensor in tensors]
        with self._lock:
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
                self._streams.setdefault(device, set()).add(torch.cuda.current_stream(device))
            self._unfetched += [part for of_tensor in parts for part in of_tensor if isinstance(part.found, Tensor)]
        return _Reading(self, [(_repeat(tensor), of_tensor) for tensor, of_tensor in zip(tensors, parts, strict=True)])

    def fetch(self) -> None:
        """Bring all that was recorded to the host, or the reason why it never comes; one sync a device."""
        with self._lock:
            unfetched, self._unfetched = self._unfetched, []
            streams, self._streams = self._streams, {}
            by_device: dict[torch.device, list[tuple[_Part, Tensor]]] = {}
            for part in unfetched:
                if isinstance(part.found, Tensor):
                    by_device.setdefault(part.found.device, []).append((part, part.found))
            for device, of_device in by_device.items():
                try:
                    for stream in streams.get(device, ()):
                        torch.cuda.current_stream(device).wait_stream(stream)
                    values = torch.stack([found for _, found in of_device]).tolist()
                except Exception as error:  # the device has failed
                    for part, _ in of_device:
                        part.found = f"{type(error).__name__}: {error}".split("\n")[0]
                else:
                    for (part, _), value in zip(of_device, values, strict=True):
                        part.found = _row(part.dtype, value)


class _Reading:
    def __init__(self, recorder: TorchRecorder, tensors: list[tuple[int, list["_Part"]]]) -> None:
        self._recorder = recorder
        self._tensors = tensors

    def ready(self) -> bool:
        """Whether all is at the host. A device's results come only when they are fetched."""
        return not any(isinstance(part.found, Tensor) for _, parts in self._tensors for part in parts)

    def rows(self) -> list[Row | str]:
        if not self.ready():
            self._recorder.fetch()
        return [_merge(repeat, parts, self._recorder.detail) for repeat, parts in self._tensors]

    def replays(self) -> None:
        return None


def count_at_least(tensor: Tensor, thresholds: Sequence[float]) -> list[int]:
    """For each of some thresholds the elements whose magnitude is that or more, infinities among them.

    Magnitudes are compared in float32, but in float64 where the tensor is of that or of integers: so are thresholds.

    Cost: a few passes over slices in cache, one host sync.
    """
    if not thresholds or not tensor.numel():
        return [0] * len(thresholds)
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
        magnitudes = (_any_magnitude(piece) for _, piece in _slices(tensor))
        counts = [torch.stack([torch.count_nonzero(m >= threshold) for threshold in thresholds]) for m in magnitudes]
        return [_repeat(tensor) * count for count in torch.stack(counts).sum(0).tolist()]


def _any_magnitude(x: Tensor) -> Tensor:
    """Also of integers, where float64 is near enough for a threshold."""
    return _magnitude(x) if x.is_floating_point() or x.is_complex() else x.to(torch.float64).abs()


@dataclass(slots=True)
class _Part:
    """A slice of a tensor."""

    start: int  # memory-order index of its first element, repeats apart
    dtype: torch.dtype
    found: Tensor | Row | str  # a tensor, as _measure gives it, until it is fetched; or why that failed


def _read(tensor: Tensor, detail: bool) -> list[_Part]:
    is_small = _results_are_at_hand(tensor.device) and 0 < tensor.numel() <= SLICE_ON_CPU and is_in_its_storage(tensor)
    if is_small and (not detail or _repeat(tensor) == 1):
        row = _measure(tensor, detail)
        if isinstance(row, Row) and row.first_bad is None:  # then it does not matter in which order it was read
            return [_Part(0, tensor.dtype, row)]
    return [_Part(start, tensor.dtype, _measure(elements, detail)) for start, elements in _slices(tensor)]


def is_in_its_storage(tensor: Tensor) -> bool:
    """Whether its memory is there, as that of a sharded or offloaded weight is not. Slicing asks that itself; reading
    does not, and ends the process."""
    if not torch._C._has_storage(tensor):
        return True  # it is somebody else's
    extent = tensor.numel()
    if not tensor.is_contiguous():
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + extent) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def _repeat(tensor: Tensor) -> int:
    """How often an expanded view meets each of its elements."""
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride == 0 and size)


def _slices(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(start, elements) in memory order, a bounded number at a time; those that an expanded view repeats only once."""
    if tensor.numel() == 0:
        return
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    order = memory_order(tensor.shape, tensor.stride())
    ordered = tensor.permute(order + [d for d in range(tensor.dim()) if d not in order])
    limit = SLICE_ON_CPU if tensor.device.type == "cpu" else SLICE_ELSEWHERE
    yield from _split(ordered, 0, limit)


def _split(tensor: Tensor, start: int, limit: int) -> Iterator[tuple[int, Tensor]]:
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        for begin in range(0, flat.numel(), limit):
            yield start + begin, flat[begin : begin + limit]
    elif tensor.numel() <= limit:
        yield start, tensor.reshape(-1)
    else:
        inner = tensor[0].numel()
        step = max(1, limit // inner)
        for begin in range(0, tensor.shape[0], step):
            part = tensor[begin : begin + step]
            yield from _split(part[0] if inner > limit else part, start + begin * inner, limit)


def _measure(x: Tensor, detail: bool) -> Tensor | Row:
    """What there is in some elements: a row where that is at hand, else what _row makes one of."""
    at_hand = _results_are_at_hand(x.device)
    if not (x.is_floating_point() or x.is_complex()):
        integers = _integer_measure(x, detail)
        return _row(x.dtype, integers.tolist()) if at_hand else integers
    magnitude = _magnitude(x)
    if not at_hand:
        return _counted(x, magnitude, detail)
    smallest, largest = torch.aminmax(magnitude)
    high = largest.item()
    if not math.isfinite(high):
        return _row(x.dtype, _counted(x, magnitude, detail).tolist())
    low = smallest.item()
    row = Row(low, high, high, 0, 0, 0, None)  # of which nothing needs to be counted
    if not detail:
        return row
    if low >= _smallest_normal(x.dtype):
        return row._replace(zero_count=0, subnormal_count=0, abs_min_nonzero=low)
    return Row(*row[:7], *_detail(x.dtype, _small(x.dtype, magnitude).tolist()))


def _row(dtype: torch.dtype, measure: Sequence[int]) -> Row:
    """Of [smallest, largest finite, NaNs, +infs, -infs, index of the first bad element], and perhaps what _detail has.

    The first two are the bits of a float, or an int that orders as the magnitude falls (see _integer_measure); the
    largest finite one is that of -1.0 where nothing is finite, the index is -1 where all is.
    """
    smallest, largest, nans, posinfs, neginfs, first = measure[:6]
    detail = _detail(dtype, measure[6:]) if len(measure) > 6 else ()
    if not (dtype.is_floating_point or dtype.is_complex):
        low, high = (_integer_magnitude(extreme, dtype) for extreme in (smallest, largest))
        return Row(low, high, high, 0, 0, 0, None, *detail)
    finite_abs_max = _float(largest, dtype)
    has_inf = posinfs + neginfs > 0
    if finite_abs_max < 0:
        finite_abs_max, abs_min = math.nan, math.inf if has_inf else math.nan
    else:
        abs_min = _float(smallest, dtype)
    abs_max = math.inf if has_inf else finite_abs_max
    return Row(abs_min, abs_max, finite_abs_max, nans, posinfs, neginfs, None if first < 0 else first, *detail)


def _detail(dtype: torch.dtype, measure: Sequence[int]) -> tuple[int, int, float | int]:
    """Of [zeros, subnormals, smallest that is not 0, whether there is any]; the third is as in _row."""
    zeros, subnormals, smallest, there = measure
    if not there:
        return zeros, subnormals, math.nan
    is_float = dtype.is_floating_point or dtype.is_complex
    return zeros, subnormals, _float(smallest, dtype) if is_float else _integer_magnitude(smallest, dtype)


def _small(dtype: torch.dtype, magnitude: Tensor) -> Tensor:
    """For _detail, of elements of this dtype."""
    zero, nonzero = magnitude == 0, magnitude > 0
    subnormal = nonzero & (magnitude < _smallest_normal(dtype))
    smallest = torch.where(nonzero, magnitude, math.inf).amin()
    return torch.stack([zero.sum(), subnormal.sum(), _bits(smallest), nonzero.any().to(torch.int64)])


def _smallest_normal(dtype: torch.dtype) -> float:
    return 0.0 if dtype == torch.float8_e8m0fnu else torch.finfo(dtype).smallest_normal  # of a complex one its parts'


def _counted(x: Tensor, magnitude: Tensor, detail: bool) -> Tensor:
    nan, posinf, neginf = _specials(x)
    finite = magnitude < math.inf
    smallest = torch.where(finite, magnitude, math.inf).amin()
    largest = torch.where(finite, magnitude, -1.0).amax()
    bad = ~finite | nan
    first = torch.where(bad.any(), bad.to(torch.uint8).argmax(), -1)
    counts = torch.stack([nan.sum(), posinf.sum(), neginf.sum(), first])
    found = [_bits(torch.stack([smallest, largest])), counts]
    return torch.cat([*found, _small(x.dtype, magnitude)] if detail else found)


def _results_are_at_hand(device: torch.device) -> bool:
    """Whether fetching a result waits for nothing. Then it is fetched at once, since small results that stay where
    large temporaries were would keep the C library from using that memory for the next."""
    return device.type == "cpu"


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int64) if x.dtype == torch.float64 else x.view(torch.int32).to(torch.int64)


def _float(bits: int, dtype: torch.dtype) -> float:
    integer, real = ("<q", "<d") if dtype in (torch.float64, torch.complex128) else ("<i", "<f")
    return float(struct.unpack(real, struct.pack(integer, bits))[0])


def _integer_measure(x: Tensor, detail: bool) -> Tensor:
    """For _row. Magnitudes are kept negated, since -|x| fits where |x| does not; uint64 ones offset by 2**63."""
    if x.dtype == torch.uint64:
        negated = x.view(torch.int64).bitwise_xor(_INT64_MIN).bitwise_not()
    elif x.dtype == torch.bool:
        # A byte that is not 0 is true, whatever wrote it.
        negated = -(x.view(torch.uint8) != 0).to(torch.int8)
    else:
        signed = x.to(_UNSIGNED_WIDENED.get(x.dtype, torch.int16 if x.dtype == torch.uint8 else x.dtype))
        negated = torch.where(signed > 0, -signed, signed)
    largest, smallest = torch.aminmax(negated)
    none = torch.zeros(4, dtype=torch.int64, device=x.device)
    none[3] = -1
    found = [torch.stack([smallest, largest]).to(torch.int64), none]
    if detail:
        nonzero = negated != _negated_zero(x.dtype)
        closest = torch.where(nonzero, negated, torch.iinfo(negated.dtype).min).amax().to(torch.int64)
        found.append(torch.stack([(~nonzero).sum(), none[0], closest, nonzero.any().to(torch.int64)]))
    return torch.cat(found)


def _magnitude(x: Tensor) -> Tensor:
    """In float64 for float64 and complex128, else in float32, which holds every narrower format exactly."""
    if not x.is_complex():
        return (x if x.dtype in (torch.float64, torch.float32) else x.to(torch.float32)).abs()
    parts = _parts(x)
    modulus = _modulus(parts)
    if x.dtype != torch.complex128:
        modulus = modulus.to(torch.float32)
    # A finite number whose modulus is beyond the format is not an infinity.
    modulus = modulus.clamp(max=torch.finfo(modulus.dtype).max)
    nan, inf, _ = _specials(x)
    return torch.where(inf, math.inf, torch.where(nan, math.nan, modulus))


def _specials(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which elements are NaN, +inf, -inf."""
    if not x.is_complex():
        wide = x if x.dtype in (torch.float64, torch.float32) else x.to(torch.float32)
        return wide.isnan(), wide == math.inf, wide == -math.inf
    parts = _parts(x)
    inf = parts.isinf().any(-1)
    return parts.isnan().any(-1), inf, torch.zeros_like(inf)


def _parts(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj().resolve_neg()).to(torch.float64)


def _modulus(parts: Tensor) -> Tensor:
    """Step for step csrc/number_format.h's `modulus`, so that both round alike."""
    parts = parts.abs()
    larger = parts.amax(-1)
    scale = torch.ones_like(larger)
    scale.masked_fill_(larger > 2.0**500, 2.0**-600).masked_fill_(larger < 2.0**-500, 2.0**600)
    scaled = parts * scale.unsqueeze(-1)
    squares = scaled * scaled
    return _square_root(squares[..., 0] + squares[..., 1]) / scale


def _square_root(x: Tensor) -> Tensor:
    """Correctly rounded, as the native one is. On CPUs torch's own is off by one now and then; that of complex numbers,
    which goes to the C library, is not (counted: 243 and 0 of 20000)."""
    return torch.complex(x, torch.zeros_like(x)).sqrt().real if x.device.type == "cpu" else x.sqrt()


def _merge(repeat: int, parts: Sequence[_Part], detail: bool) -> Row | str:
    for part in parts:
        if isinstance(part.found, str):
            return part.found
    rows = [part.found for part in parts if isinstance(part.found, Row)]
    if len(rows) == 1 and rows[0].first_bad is None and (not detail or repeat == 1):
        return rows[0]
    bad = (part.start + row.first_bad for part, row in zip(parts, rows, strict=True) if row.first_bad is not None)
    first = next(bad, None)
    row = Row(
        _extreme(min, (row.abs_min for row in rows)),
        _extreme(max, (row.abs_max for row in rows)),
        _extreme(max, (row.finite_abs_max for row in rows)),
        repeat * sum(row.nan_count for row in rows),
        repeat * sum(row.posinf_count for row in rows),
        repeat * sum(row.neginf_count for row in rows),
        None if first is None else repeat * first,
    )
    if not detail:
        return row
    return row._replace(
        zero_count=repeat * sum(row.zero_count or 0 for row in rows),
        subnormal_count=repeat * sum(row.subnormal_count or 0 for row in rows),
        abs_min_nonzero=_extreme(min, (row.abs_min_nonzero for row in rows)),
    )


def _extreme(of: Callable[[Iterable[float | int]], float | int], values: Iterable[float | int | None]) -> float | int:
    numbers = [value for value in values if value is not None and value == value]
    return of(numbers) if numbers else math.nan


def _negated_zero(dtype: torch.dtype) -> int:
    return ~_INT64_MIN if dtype == torch.uint64 else 0


def _integer_magnitude(negated: int, dtype: torch.dtype) -> int:
    return _negated_zero(dtype) - negated

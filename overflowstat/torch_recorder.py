"""The recorder in plain torch operations, for any device torch knows."""

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .layout import memory_order
from .row import Row

__all__ = ["TorchRecorder", "count_at_least"]

# Bounds the extra memory: a few temporaries of this many elements. On a CPU small enough for L2, so that the passes
# after the first do not go to memory, and no more than torch leaves to one thread (at::internal::GRAIN_SIZE), since
# handing such a slice to two costs more than it brings; elsewhere a launch costs more than a pass, so larger ones.
SLICE_ON_CPU = 1 << 15
SLICE_ELSEWHERE = 1 << 20

_UNSIGNED_WIDENED = {torch.uint16: torch.int32, torch.uint32: torch.int64}
_INT64_MIN = -(1 << 63)


class TorchRecorder:
    """Gives the same rows as the native recorder, but for what torch.set_flush_denormal(True) makes of subnormals.

    Cost: on a CPU two passes over slices in cache (eight where a slice holds something that is not finite), elsewhere
    about fourteen launches a slice, and one host sync a device for all that was recorded since the last one; extra
    memory of at most a few slices, never a copy of a large tensor.
    """

    name = "torch"

    def __init__(self) -> None:
        self._unfetched: list[_Part] = []

    def capture(self) -> None:
        return None

    def record(self, tensors: Sequence[Tensor]) -> "_Reading":
        if any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("plain torch operations cannot read tensors while a CUDA graph is captured")
        with _without_gradients():
            parts = [[_Part(start, _measure(x)) for start, x in _slices(tensor)] for tensor in tensors]
        self._unfetched += [part for of_tensor in parts for part in of_tensor if isinstance(part.measure, Tensor)]
        kinds = [(tensor.dtype, _repeat(tensor)) for tensor in tensors]
        return _Reading(self, list(zip(kinds, parts, strict=True)))

    def fetch(self) -> None:
        """Bring all that was recorded to the host; one sync a device."""
        unfetched, self._unfetched = self._unfetched, []
        by_device: dict[torch.device, list[tuple[_Part, Tensor]]] = {}
        for part in unfetched:
            if isinstance(part.measure, Tensor):
                by_device.setdefault(part.measure.device, []).append((part, part.measure))
        for of_device in by_device.values():
            values = torch.stack([measure for _, measure in of_device]).tolist()
            for (part, _), value in zip(of_device, values, strict=True):
                part.measure = value


class _Reading:
    def __init__(self, recorder: TorchRecorder, tensors: list[tuple[tuple[torch.dtype, int], list["_Part"]]]) -> None:
        self._recorder = recorder
        self._tensors = tensors

    def ready(self) -> bool:
        """Whether all is at the host. A device's results come only when they are fetched."""
        return not any(isinstance(part.measure, Tensor) for _, parts in self._tensors for part in parts)

    def rows(self) -> list[Row]:
        if not self.ready():
            self._recorder.fetch()
        return [_merge(dtype, repeat, parts) for (dtype, repeat), parts in self._tensors]

    def replays(self) -> None:
        return None


def count_at_least(tensor: Tensor, threshold: float) -> int:
    """Elements whose magnitude is `threshold` or more, infinities among them. Cost: a few passes, one host sync."""
    with _without_gradients():
        counts = [(_any_magnitude(piece) >= threshold).sum() for _, piece in _slices(tensor)]
    return _repeat(tensor) * int(torch.stack(counts).sum()) if counts else 0


@contextmanager
def _without_gradients() -> Iterator[None]:
    """Of either mode: not every operation here has a forward-mode derivative in every version of torch."""
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
        yield


def _any_magnitude(x: Tensor) -> Tensor:
    """Also of integers, where float64 is near enough for a threshold."""
    return _magnitude(x) if x.is_floating_point() or x.is_complex() else x.to(torch.float64).abs()


@dataclass(slots=True)
class _Part:
    start: int  # memory-order index of the slice's first element, repeats apart
    measure: Tensor | list[int]  # what _measure gave, on its device until it is fetched


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


def _measure(x: Tensor) -> Tensor | list[int]:
    """[smallest, largest finite, NaNs, +infs, -infs, index of the first bad element] of one slice, int64.

    The first two are the bits of a float, or an int that orders as the magnitude falls (see _integer_measure); the
    largest finite one is that of -1.0 where nothing is finite, the index is -1 where all is.
    """
    if not (x.is_floating_point() or x.is_complex()):
        measure = _integer_measure(x)
        return measure.tolist() if _results_are_at_hand(x.device) else measure
    magnitude = _magnitude(x)
    if _results_are_at_hand(x.device):
        smallest, largest = torch.aminmax(magnitude)
        if math.isfinite(largest):  # then nothing needs to be counted
            return [*_bits(torch.stack([smallest, largest])).tolist(), 0, 0, 0, -1]
        return _counted(x, magnitude).tolist()
    return _counted(x, magnitude)


def _counted(x: Tensor, magnitude: Tensor) -> Tensor:
    nan, posinf, neginf = _specials(x)
    finite = magnitude < math.inf
    smallest = torch.where(finite, magnitude, math.inf).amin()
    largest = torch.where(finite, magnitude, -1.0).amax()
    bad = ~finite | nan
    first = torch.where(bad.any(), bad.to(torch.uint8).argmax(), -1)
    counts = torch.stack([nan.sum(), posinf.sum(), neginf.sum(), first])
    return torch.cat([_bits(torch.stack([smallest, largest])), counts])


def _results_are_at_hand(device: torch.device) -> bool:
    """Whether fetching a result waits for nothing. Then it is fetched at once, since small results that stay where
    large temporaries were would keep the C library from using that memory for the next."""
    return device.type == "cpu"


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int64) if x.dtype == torch.float64 else x.view(torch.int32).to(torch.int64)


def _float(bits: int, dtype: torch.dtype) -> float:
    integer, real = ("<q", "<d") if dtype in (torch.float64, torch.complex128) else ("<i", "<f")
    return float(struct.unpack(real, struct.pack(integer, bits))[0])


def _integer_measure(x: Tensor) -> Tensor:
    """As _measure. Magnitudes are kept negated, since -|x| fits where |x| does not; uint64 ones offset by 2**63."""
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
    return torch.cat([torch.stack([smallest, largest]).to(torch.int64), none])


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


def _merge(dtype: torch.dtype, repeat: int, parts: Sequence[_Part]) -> Row:
    if not parts:
        return Row(math.nan, math.nan, math.nan, 0, 0, 0, None)
    smallest, largest, *counts, first_of_part = zip(*(part.measure for part in parts), strict=True)
    if not (dtype.is_floating_point or dtype.is_complex):
        offset = _INT64_MIN if dtype == torch.uint64 else 0
        low, high = (_integer_magnitude(extreme, offset) for extreme in (max(smallest), min(largest)))
        return Row(low, high, high, 0, 0, 0, None)
    nans, posinfs, neginfs = (repeat * sum(of_parts) for of_parts in counts)
    finite = [(low, high) for low, high in zip(smallest, largest, strict=True) if _float(high, dtype) >= 0]
    has_inf = posinfs + neginfs > 0
    # The bits of floats that are not negative order as the floats do.
    abs_min = _float(min(low for low, _ in finite), dtype) if finite else math.inf if has_inf else math.nan
    finite_abs_max = _float(max(high for _, high in finite), dtype) if finite else math.nan
    first = next((repeat * (p.start + i) for p, i in zip(parts, first_of_part, strict=True) if i >= 0), None)
    return Row(abs_min, math.inf if has_inf else finite_abs_max, finite_abs_max, nans, posinfs, neginfs, first)


def _integer_magnitude(negated: int, offset: int) -> int:
    return ~negated - offset if offset else -negated

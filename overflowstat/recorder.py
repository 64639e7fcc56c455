"""What reads tensors: the native extension where it can, plain torch elsewhere.

A recorder takes any number of tensors and gives a `Row` for each. The two are interchangeable: same rows, other cost.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import native
from .dynamo import not_compiled
from .errors import warn_user
from .row import Row
from .torch_recorder import TorchRecorder

__all__ = ["NativeRecorder", "Reading", "Recorder", "RecorderName", "Replays", "is_capturing", "make_recorder"]

RecorderName = Literal["auto", "native", "torch"]


class Replays(NamedTuple):
    """What has become of a CUDA graph."""

    completed: int
    """How often it has been replayed to its end."""
    over: bool
    """Whether it is gone."""
    failure: str
    """What its device failed with, or nothing."""


def is_capturing() -> bool:
    """Whether the current stream is captured into a CUDA graph."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


class Reading(Protocol):
    """Rows on their way."""

    def ready(self) -> bool:
        """Whether `rows` would not wait. Never waits itself."""
        ...

    def rows(self) -> Sequence[Row | str]:
        """A row for each tensor, in order; where none will ever come, because a device failed, the reason.

        Waits, for a bounded time, until that is known. For what is read inside a CUDA graph these are the rows of its
        last replay, without a wait.
        """
        ...

    def replays(self) -> Replays | None:
        """None, or for what is read inside a CUDA graph, after a wait for the current stream, the graph's replays."""
        ...


class Recorder(Protocol):
    name: str

    def record(self, tensors: Sequence[Tensor]) -> Reading:
        """Begin to read strided tensors of any of `overflowstat.stats.READABLE_DTYPES`, as they are now.

        Never waits for a device; tensors in host memory are read before this returns. They may be written to or freed
        afterwards, on the stream that is current now. While that stream is captured into a CUDA graph, tensors on its
        device are read in each replay, and not now.
        """
        ...

    def capture(self) -> int | None:
        """A number for the CUDA graph into which the current stream is captured; None if it is not."""
        ...


class NativeRecorder:
    """Reads with `overflowstat._C`: one pass over each tensor, all of a list in one launch a device.

    Tensors on devices that the extension was not built for, and those inside torch.func's transforms, are passed on to
    plain torch.
    """

    name = "native"

    def __init__(self, extension: Any, detail: bool = False) -> None:
        self.extension = extension
        self.detail = detail
        self._kinds = {"cpu", "cuda"} if extension.has_cuda else {"cpu"}
        self._works_on: dict[torch.device, bool] = {}
        self._elsewhere = TorchRecorder(detail)

    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Try these now, since a device that was never tried cannot be read while a CUDA graph is captured."""
        for device in devices:
            if device.type in self._kinds and self.capture() is None:
                self.works_on(device)

    def detailed(self) -> "NativeRecorder":
        return _native_recorder(self.extension, detail=True)

    def capture(self) -> int | None:
        if "cuda" not in self._kinds or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        return self.extension.current_capture() or None

    def record(self, tensors: Sequence[Tensor]) -> Reading:
        here = [self._can_read(t) for t in tensors]
        if all(here):
            return _NativeReading(self.extension.record(tensors, self.detail))
        others = self._elsewhere.record([t for t, can in zip(tensors, here, strict=True) if not can])
        if not any(here):
            return others
        native = self.extension.record([t for t, can in zip(tensors, here, strict=True) if can], self.detail)
        return _MixedReading(here, _NativeReading(native), others)

    def _can_read(self, tensor: Tensor) -> bool:
        """Not what has no memory of its own, either: torch.func's wrappers, and the zeros of forward-mode gradients."""
        return (
            tensor.device.type in self._kinds
            and self.works_on(tensor.device)
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            and not tensor._is_zerotensor()
        )

    @not_compiled
    def works_on(self, device: torch.device) -> bool:
        """Whether a first read on this device works. A build without code for its architecture shows only then.

        Raises RuntimeError if there was none yet and a CUDA graph is being captured, when there cannot be one.
        """
        if device not in self._works_on:
            if self.capture() is not None:
                raise RuntimeError(
                    f"nothing on {device} was read before the capture of a CUDA graph began; run the model once before "
                    "that, or attach to it when it is on its device"
                )
            problem = self._first_problem(device)
            self._works_on[device] = problem is None
            if problem is not None:
                built_for = f", built for {';'.join(native.architectures())}," if device.type == "cuda" else ""
                warn_user(
                    f"the C++ extension{built_for} does not work on {_name(device)}, whose tensors are read by plain "
                    f"torch operations, slower: {problem}. What to do: python -m overflowstat env"
                )
        return self._works_on[device]

    def _first_problem(self, device: torch.device) -> str | None:
        try:
            # Apart from modes of the caller's, under which a tensor may be a fake one.
            with _disable_current_modes():
                four = torch.tensor([[1.0, -2.0], [math.inf, math.nan]], device="cpu")
                rows, expected = (
                    self.extension.record([tensor, tensor[:, 0]], self.detail).rows()  # by each of the two passes
                    for tensor in (four.to(device), four)
                )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if rows == expected:
            return None
        return next((row for row in rows if isinstance(row, str)), f"it finds {rows} in place of {expected}")


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, architecture {major}.{minor})"


class _NativeReading:
    def __init__(self, reading: Any) -> None:
        self._reading = reading

    def ready(self) -> bool:
        return bool(self._reading.ready())

    def rows(self) -> list[Row | str]:
        return [row if isinstance(row, str) else Row(*row) for row in self._reading.rows()]

    def replays(self) -> Replays | None:
        replays = self._reading.replays()
        return None if replays is None else Replays._make(replays)


class _MixedReading:
    """The rows of two readings, `here` telling which of them each one comes from."""

    def __init__(self, here: list[bool], native: Reading, elsewhere: Reading) -> None:
        self._here = here
        self._native = native
        self._elsewhere = elsewhere

    def ready(self) -> bool:
        return self._native.ready() and self._elsewhere.ready()

    def rows(self) -> list[Row | str]:
        native, elsewhere = iter(self._native.rows()), iter(self._elsewhere.rows())
        return [next(native if is_here else elsewhere) for is_here in self._here]

    def replays(self) -> Replays | None:
        return self._native.replays()  # plain torch reads at once or not at all


def make_recorder(name: RecorderName | Recorder = "auto", detail: bool = False) -> Recorder:
    """The recorder of that name; "auto" is the native one if it is there, else plain torch. A recorder is itself.

    With `detail` one that fills in what a Row has of that: for a recorder what its method detailed() gives.

    Raises ValueError for anything else, TypeError for a recorder that has no such method, and RuntimeError with the
    reason if "native" is not usable.
    """
    if not isinstance(name, str) and all(callable(getattr(name, method, None)) for method in ("record", "capture")):
        if not detail:
            return name
        if not callable(detailed := getattr(name, "detailed", None)):
            raise TypeError(f"recorder={name!r}: has no method detailed(), which detail=True asks for")
        return cast("Recorder", detailed())
    if name not in ("auto", "native", "torch"):
        raise ValueError(f'recorder={name!r}: must be "auto", "native" or "torch"')
    extension = None if name == "torch" else native.load()
    if extension is not None:
        return _native_recorder(extension, detail)
    if name == "native":
        raise RuntimeError(f'recorder="native" is not usable: {native.reason()}')
    return TorchRecorder(detail)


@functools.cache
def _native_recorder(extension: Any, detail: bool) -> NativeRecorder:
    """One for all, so that each device is tried once, with the launches that will be its."""
    return NativeRecorder(extension, detail)

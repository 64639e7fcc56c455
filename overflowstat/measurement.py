"""The statistics of tensors, for hooks: never raises, never waits before it is asked for what it found."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import warn_user
from .layout import distinct_elements
from .recorder import Reading, Recorder, Replays
from .row import Row
from .stats import TensorStats, apart_from_the_run, shape_of, why_unreadable

__all__ = ["Measurement", "Place", "measure", "measured_content"]

Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Measurement:
    """What is known, now or later, of some tensors. Holds no tensor."""

    def __init__(self, count: int, graph: int | None = None) -> None:
        self._graph = graph
        self._contents: list[TensorStats | str] = [""] * count
        self._sizes: dict[int, int] = {}
        self._readings: list[tuple[Reading, list[tuple[int, Shape]]]] = []

    def ready(self) -> bool:
        """Whether `contents` would not wait."""
        return all(reading.ready() for reading, _ in self._readings)

    def is_bad(self, position: int) -> bool:
        """Whether a tensor holds anything that is not finite. May wait."""
        content = self.contents()[position]
        return isinstance(content, TensorStats) and content.is_bad

    def size(self, position: int) -> int:
        """Bytes of memory that are read for a tensor."""
        return self._sizes.get(position, 0)

    def being_read(self) -> set[int]:
        """Positions of the tensors that are on their way."""
        return {i for _, places in self._readings for i, _ in places}

    def contents(self) -> Sequence[TensorStats | str]:
        """The statistics of each tensor, or what it is that cannot be read, or why it was not. May wait."""
        for reading, places in self._readings:
            for (i, shape), row in zip(places, reading.rows(), strict=True):
                self._contents[i] = measured_content(row, shape)
        if self._graph is None:
            self._readings.clear()
        return self._contents

    def replays(self) -> Replays | None:
        """Those of the CUDA graph that these are read in; None if none of them is read there. May wait."""
        found = [replays for reading, _ in self._readings if (replays := reading.replays()) is not None]
        if not found:
            return None
        counts, over, failures = zip(*found, strict=True)
        return Replays(min(counts), any(over), next(filter(None, failures), ""))

    def begin(self, recorder: Recorder, tensors: Iterable[tuple[int, Tensor]]) -> None:
        """Record these, each told by its place."""
        tensors = list(tensors)
        try:
            with apart_from_the_run():
                places = [(i, shape_of(tensor)) for i, tensor in tensors]
                self._sizes.update((i, distinct_elements(*shape[:2]) * shape[2].itemsize) for i, shape in places)
                self._readings.append((recorder.record([tensor for _, tensor in tensors]), places))
        except Exception as error:
            # Some tensors show only when read that they cannot be (storage freed, under vmap); the others still can.
            if len(tensors) == 1:
                self.put(tensors[0][0], f"not read: {type(error).__name__}")
                # By a ValueError a recorder refuses one for what it is; sharded and offloaded weights have no memory.
                if not isinstance(error, ValueError) and not _is_freed(tensors[0][1]):
                    warn_user(f"a tensor could not be read, and is not judged: {type(error).__name__}: {error}")
            else:
                for one in tensors:
                    self.begin(recorder, [one])

    def put(self, i: int, content: str) -> None:
        self._contents[i] = content


class Place(NamedTuple):
    """One tensor of a measurement."""

    measurement: Measurement
    position: int


def measure(recorder: Recorder, tensors: Sequence[Tensor], graph: int | None = None) -> Measurement:
    """Begin to read tensors as they are now: all that can be read in one `Recorder.record`.

    `graph` is what `Recorder.capture` says: if it is one, they will be read whenever that is replayed.
    """
    measurement = Measurement(len(tensors), graph)
    readable = []
    for i, tensor in enumerate(tensors):
        if reason := _reason(tensor):
            measurement.put(i, reason)
        else:
            readable.append((i, tensor))
    if readable:
        measurement.begin(recorder, readable)
    return measurement


def measured_content(row: Row | str, shape: Shape) -> TensorStats | str:
    """What a line shows of a row, or of the reason why there is none, which is no secret."""
    if isinstance(row, Row):
        return TensorStats.of(row, *shape)
    warn_user(f"tensors could not be read, and are not judged: {row}")
    return f"not read: {row}"


def _reason(tensor: Tensor) -> str:
    try:
        return why_unreadable(tensor)
    except Exception as error:  # of a subclass's own making
        return f"not read: {type(error).__name__}"


def _is_freed(tensor: Tensor) -> bool:
    try:
        return tensor.untyped_storage().nbytes() == 0
    except Exception:
        return False

"""The statistics of tensors, for hooks: never raises, never waits before it is asked for what it found."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .capture import EMPTY_HERE
from .dynamo import not_compiled
from .errors import warn_user
from .layout import distinct_elements
from .near import is_near
from .recorder import Reading, Recorder, Replays
from .row import NOTHING, NonFinite, Row
from .stats import TensorStats, apart_from_the_run, shape_of, why_unreadable
from .subnormal import is_mostly_subnormal
from .tensor_state import TensorState
from .torch_recorder import is_in_its_storage

__all__ = ["GivenMeasurement", "Measurement", "Place", "measure", "measured_content", "tell_of_missing"]

Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Measurement:
    """What is known, now or later, of some tensors, each told by its position. Keeps no tensor."""

    def __init__(self, count: int, graph: int | None = None) -> None:
        self.count = count
        self._graph = graph
        self._found: list[Row | str] = [""] * count
        self._shapes: dict[int, Shape] = {}
        self._states: dict[int, TensorState | None] = {}
        self._readings: list[tuple[Reading, list[int]]] = []

    def ready(self) -> bool:
        """Whether nothing else would wait."""
        return all(reading.ready() for reading, _ in self._readings)

    def wait(self) -> None:
        """Until all is there."""
        self._fetch()

    def tensor(self, position: int) -> Tensor | None:
        """The tensor itself, if it is still there and was not written to since."""
        state = self._states[position]
        return None if state is None else state.tensor()

    def state(self, position: int) -> TensorState | None:
        """Of a tensor when it was read; None for one without storage of its own."""
        return self._states[position]

    def being_read(self) -> Collection[int]:
        """Positions of the tensors that are, or were."""
        return self._shapes.keys()

    def size(self, position: int) -> int:
        """Bytes of memory that are read for a tensor."""
        shape, stride, dtype = self._shapes[position]
        return distinct_elements(shape, stride) * dtype.itemsize

    def non_finite(self, position: int) -> NonFinite:
        """What a tensor holds that is not finite. May wait."""
        self._fetch()
        found = self._found[position]
        return found.non_finite if isinstance(found, Row) else NOTHING

    def content(self, position: int) -> TensorStats | str:
        """The statistics of a tensor, or what it is that cannot be read, or why it was not. May wait."""
        self._fetch()
        found = self._found[position]
        return TensorStats.of(found, *self._shapes[position]) if isinstance(found, Row) else found

    def is_near(self, position: int, warn_at: float) -> bool:
        """Whether a tensor holds a number that is this share of its dtype's limit or more. May wait."""
        self._fetch()
        found = self._found[position]
        return isinstance(found, Row) and is_near(TensorStats.of(found, *self._shapes[position]), warn_at)

    def is_mostly_subnormal(self, position: int) -> bool:
        """Whether this is so of a tensor. May wait."""
        self._fetch()
        found = self._found[position]
        return (
            isinstance(found, Row)
            and bool(found.subnormal_count)
            and is_mostly_subnormal(TensorStats.of(found, *self._shapes[position]))
        )

    def replays(self) -> Replays | None:
        """Those of the CUDA graph that these are read in; None if none of them is read there. May wait."""
        found = [replays for reading, _ in self._readings if (replays := reading.replays()) is not None]
        if not found:
            return None
        counts, over, failures = zip(*found, strict=True)
        return Replays(min(counts), any(over), next(filter(None, failures), ""))

    def begin(self, recorder: Recorder, tensors: Sequence[tuple[int, Tensor]]) -> None:
        """Record these, each told by its position."""
        try:
            with apart_from_the_run():
                shapes = {i: shape_of(tensor) for i, tensor in tensors}
                self._readings.append((recorder.record([tensor for _, tensor in tensors]), list(shapes)))
                self._shapes.update(shapes)
                self._states.update({i: TensorState.of(tensor) for i, tensor in tensors})
        except Exception as error:
            # Some tensors show only when read that they cannot be (under vmap); the others still can.
            if len(tensors) == 1:
                self.put(tensors[0][0], f"not read: {type(error).__name__}")
                if not isinstance(error, ValueError):  # by which a recorder refuses one for what it is
                    warn_user(f"a tensor could not be read, and is not judged: {type(error).__name__}: {error}")
            else:
                for one in tensors:
                    self.begin(recorder, [one])

    def put(self, position: int, content: str) -> None:
        self._found[position] = content

    def _fetch(self) -> None:
        for reading, positions in self._readings:
            for i, row in zip(positions, reading.rows(), strict=True):
                self._found[i] = row if isinstance(row, Row) else _not_read(row)
        if self._graph is None:
            self._readings.clear()


class GivenMeasurement(Measurement):
    """Of what was read elsewhere.

    Args:
        count: of tensors.
        is_bad: whether any is that may be asked for.
        contents: gives what each is; called when that is asked for, which of good ones it rarely is.
    """

    def __init__(self, count: int, is_bad: bool, contents: Callable[[], Sequence[TensorStats | str]]) -> None:
        super().__init__(count)
        self._is_bad = is_bad
        self._make_contents = contents

    @functools.cached_property
    def _contents(self) -> Sequence[TensorStats | str]:
        return self._make_contents()

    def tensor(self, position: int) -> Tensor | None:
        return None

    def state(self, position: int) -> TensorState | None:
        return None

    def non_finite(self, position: int) -> NonFinite:
        if not self._is_bad:
            return NOTHING
        content = self._contents[position]
        return NOTHING if isinstance(content, str) or content.first_bad is None else content.non_finite

    def content(self, position: int) -> TensorStats | str:
        return self._contents[position]

    def is_near(self, position: int, warn_at: float) -> bool:
        content = self._contents[position]
        return not isinstance(content, str) and is_near(content, warn_at)

    def is_mostly_subnormal(self, position: int) -> bool:
        return False  # nobody counted


class Place(NamedTuple):
    """One tensor of a measurement."""

    measurement: Measurement
    position: int


@not_compiled
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
    """What a line shows of a row, or of the reason why there is none."""
    return TensorStats.of(row, *shape) if isinstance(row, Row) else _not_read(row)


def tell_of_missing(reason: str) -> None:
    warn_user(f"tensors could not be read, and are not judged: {reason}")


def _not_read(reason: str) -> str:
    """Which is no secret."""
    tell_of_missing(reason)
    return f"not read: {reason}"


def _reason(tensor: Tensor) -> str:
    try:
        return why_unreadable(tensor) or (EMPTY_HERE if _is_freed(tensor) else "")
    except Exception as error:  # of a subclass's own making
        return f"not read: {type(error).__name__}"


def _is_freed(tensor: Tensor) -> bool:
    """Wholly or in part, as sharded weights are between their uses."""
    try:
        with torch._C.DisableTorchFunction():
            return tensor.numel() > 0 and not is_in_its_storage(tensor)
    except Exception:  # of a subclass's own making
        return False

"""The weights of a batch: all of them read in one pass, each judged later in the frame of the module that owns it."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .measurement import Place, measure
from .recorder import Recorder

__all__ = ["WeightPass"]


class _State(NamedTuple):
    """What differs after a write or a swap of `.data`.

    An address would not do, since freed memory is soon used again; the weak reference keeps the storage's identity, and
    not its memory.
    """

    version: int
    storage: StorageWeakRef
    offset: int


class _Reading(NamedTuple):
    weight: Tensor  # held, so that its id is its own while this is
    state: _State
    place: Place


class WeightPass:
    """The statistics of a model's parameters as they are when this is made.

    `graph` is what `Recorder.capture` says: if it is one, as they are in each of its replays.

    Cost: one pass over each parameter, tied ones once, in one launch a device. Does not wait.
    """

    def __init__(self, modules: Iterable[nn.Module], recorder: Recorder, graph: int | None = None) -> None:
        self.graph = graph
        # Not by parameters(), which models override.
        weights = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
        # The others are looked at in their modules only: those that could change unseen (inference tensors, wrappers
        # without storage) and those that have no numbers yet (lazy, offloaded).
        known = [(p, state) for p in weights.values() if (state := _state(p)) is not None]
        measurement = measure(recorder, [p for p, _ in known], graph)
        self._readings = {id(known[i][0]): _Reading(*known[i], Place(measurement, i)) for i in measurement.being_read()}

    def find(self, weight: Tensor) -> Place | None:
        """Where what was read of this weight is; None if it was not there or has been changed since."""
        reading = self._readings.get(id(weight))
        if reading is None or reading.state != _state(weight):
            return None
        return reading.place


def _state(weight: Tensor) -> _State | None:
    try:
        storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
        return _State(weight._version, storage, int(weight.storage_offset()))
    except Exception:
        return None

"""The weights of a batch: all of them read in one pass, each judged later in the frame of the module that owns it."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .recorder import Recorder
from .stats import TensorStats, measure

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
    stats: TensorStats


class WeightPass:
    """The statistics of a model's parameters as they are when this is made.

    Cost: one pass over each parameter, tied ones once, in one launch and one host sync a device.
    """

    def __init__(self, modules: Iterable[nn.Module], recorder: Recorder) -> None:
        weights = {id(p): p for m in modules for p in m.parameters(recurse=False)}
        # Others (inference tensors, wrappers without storage) could change unseen: they are read in their modules only.
        known = [(p, state) for p in weights.values() if (state := _state(p)) is not None]
        contents = measure(recorder, [p for p, _ in known])
        self._readings = {
            id(weight): _Reading(weight, state, content)
            for (weight, state), content in zip(known, contents, strict=True)
            # A weight that has no numbers yet (lazy, offloaded) is looked at again in its module.
            if isinstance(content, TensorStats)
        }

    def find(self, weight: Tensor) -> TensorStats | None:
        """What was read of this weight; None if it was not there or has been changed since."""
        reading = self._readings.get(id(weight))
        if reading is None or reading.state != _state(weight):
            return None
        return reading.stats


def _state(weight: Tensor) -> _State | None:
    try:
        storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
        return _State(weight._version, storage, int(weight.storage_offset()))
    except Exception:
        return None

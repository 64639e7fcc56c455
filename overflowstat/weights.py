"""The weights of a batch: all of them read in one pass, each judged later in the frame of the module that owns it."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from .recorder import Recorder
from .stats import TensorStats, measure

__all__ = ["WeightPass"]


class _Reading(NamedTuple):
    weight: Tensor  # held, so that its id is its own while this is
    state: tuple[int | None, int]
    stats: TensorStats


class WeightPass:
    """The statistics of a model's parameters as they are when this is made.

    Cost: one pass over each parameter, tied ones once, in one launch and one host sync a device.
    """

    def __init__(self, modules: Iterable[nn.Module], recorder: Recorder) -> None:
        weights = {id(p): p for m in modules for p in m.parameters(recurse=False)}
        contents = measure(recorder, list(weights.values()))
        self._readings = {
            id(weight): _Reading(weight, state, content)
            for weight, content in zip(weights.values(), contents, strict=True)
            # A weight that has no numbers yet (lazy, offloaded) is looked at again in its module.
            if isinstance(content, TensorStats) and (state := _state(weight)) is not None
        }

    def find(self, weight: Tensor) -> TensorStats | None:
        """What was read of this weight; None if it was not there or has been changed since."""
        reading = self._readings.get(id(weight))
        if reading is None or reading.state != _state(weight):
            return None
        return reading.stats


def _state(weight: Tensor) -> tuple[int | None, int] | None:
    """What differs after an in-place write (the version, which inference tensors lack) or a swap of `.data`."""
    try:
        return None if weight.is_inference() else weight._version, weight.data_ptr()
    except Exception:
        return None

"""Module calls whose numbers may still be on their way."""

from collections.abc import Iterable
from dataclasses import dataclass

from .frames import Frame, Line
from .measurement import Measurement, Place
from .recorder import Replays

__all__ = ["PendingFrame"]


@dataclass(frozen=True, slots=True)
class PendingFrame:
    """A frame to be: what is known at the call, and where the rest will be."""

    batch_number: int
    module: str
    class_name: str
    lines: tuple[tuple[str, Place | str], ...]
    starts_batch: bool
    is_told: bool = False

    def ready(self) -> bool:
        """Whether `frame` would not wait."""
        return all(measurement.ready() for measurement in self._measurements())

    def is_known_bad(self) -> bool:
        """Whether some number that is there is bad, whatever is still on its way. Never waits."""
        places = (place for _, place in self.lines if isinstance(place, Place))
        return any(place.measurement.ready() and place.measurement.is_bad(place.position) for place in places)

    def replays(self) -> Replays | None:
        """Those of the CUDA graph that this call is in; None if nothing of it was read there. May wait."""
        found = [replays for m in self._measurements() if (replays := m.replays()) is not None]
        return min(found) if found else None

    def frame(self) -> Frame:
        """Waits until all numbers are there; those of a CUDA graph are as its last replay left them."""
        contents = {id(measurement): measurement.contents() for measurement in self._measurements()}
        lines = tuple(
            Line(label, place if isinstance(place, str) else contents[id(place.measurement)][place.position])
            for label, place in self.lines
        )
        return Frame(self.batch_number, self.module, self.class_name, lines, self.starts_batch)

    def _measurements(self) -> Iterable[Measurement]:
        return {
            id(place.measurement): place.measurement for _, place in self.lines if isinstance(place, Place)
        }.values()

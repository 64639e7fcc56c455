"""Module calls whose numbers may still be on their way."""

from dataclasses import dataclass

from .frames import Frame, Line
from .measurement import Measurement, Place
from .recorder import Replays
from .stats import TensorStats

__all__ = ["PendingFrame"]


@dataclass(frozen=True, slots=True)
class PendingFrame:
    """A frame to be: what is known at the call, and where the rest will be."""

    batch_number: int
    module: str
    class_name: str
    lines: tuple[tuple[str, Place | TensorStats | str], ...]
    starts_batch: bool
    is_told: bool = False
    """It is to be shown whatever it holds."""

    def ready(self) -> bool:
        """Whether nothing else would wait."""
        return all(measurement.ready() for measurement in self._measurements())

    def wait(self) -> None:
        """Until all numbers are there: first for those that were launched last, after which the others are."""
        for measurement in reversed(self._measurements()):
            measurement.wait()

    def is_bad(self) -> bool:
        return any(place.measurement.is_bad(place.position) for place in self._places())

    def is_known_bad(self) -> bool:
        """Whether some number that is there is bad, whatever is still on its way. Never waits."""
        return any(p.measurement.ready() and p.measurement.is_bad(p.position) for p in self._places())

    def replays(self) -> Replays | None:
        """Those of the CUDA graph that this call is in; None if nothing of it was read there. May wait."""
        found = [replays for m in self._measurements() if (replays := m.replays()) is not None]
        return min(found) if found else None

    def frame(self) -> Frame:
        """Waits until all numbers are there; those of a CUDA graph are as its last replay left them."""
        lines = tuple(
            Line(label, found.measurement.content(found.position) if isinstance(found, Place) else found)
            for label, found in self.lines
        )
        return Frame(self.batch_number, self.module, self.class_name, lines, self.starts_batch)

    def _places(self) -> list[Place]:
        return [found for _, found in self.lines if isinstance(found, Place)]

    def _measurements(self) -> list[Measurement]:
        found: list[Measurement] = []
        for place in self._places():
            if place.measurement not in found:
                found.append(place.measurement)
        return found

"""Module calls whose numbers may still be on their way."""

from dataclasses import dataclass
from typing import NamedTuple

from .frames import Frame, Line
from .measurement import Measurement, Place
from .recorder import Replays
from .row import NOTHING, NonFinite
from .stats import TensorStats

__all__ = ["PendingFrame", "PendingLine"]


class PendingLine(NamedTuple):
    """A `Line` to be."""

    label: str
    content: Place | TensorStats | str
    is_judged: bool
    allowed: NonFinite

    def is_bad(self) -> bool:
        """Whether it makes its frame bad. May wait."""
        if not self.is_judged or not isinstance(self.content, Place):
            return False
        found = self.content.measurement.non_finite(self.content.position)
        return found is not NOTHING and bool(found & ~self.allowed)

    def is_near(self, warn_at: float) -> bool:
        """Whether it is judged, and this near to its limit. May wait."""
        if not self.is_judged or self.allowed or not isinstance(self.content, Place):
            return False
        return self.content.measurement.is_near(self.content.position, warn_at)

    def is_mostly_subnormal(self) -> bool:
        """Whether it is judged, and this. May wait."""
        if not self.is_judged or self.allowed or not isinstance(self.content, Place):
            return False
        return self.content.measurement.is_mostly_subnormal(self.content.position)

    def arrived(self) -> Line:
        """May wait."""
        content = self.content
        if isinstance(content, Place):
            content = content.measurement.content(content.position)
        return Line(self.label, content, self.is_judged, self.allowed)


@dataclass(frozen=True, slots=True)
class PendingFrame:
    """A frame to be: what is known at the call, and where the rest will be."""

    batch_number: int
    module: str
    class_name: str
    lines: tuple[PendingLine, ...]
    starts_batch: bool
    is_recompute: bool = False
    is_told: bool = False
    """It is to be shown whatever it holds."""
    thread: int = 0
    """On which it ran."""
    calls: int = 1

    def ready(self) -> bool:
        """Whether nothing else would wait."""
        return all(measurement.ready() for measurement in self._measurements())

    def wait(self) -> None:
        """Until all numbers are there: first for those that were launched last, after which the others are."""
        for measurement in reversed(self._measurements()):
            measurement.wait()

    def is_bad(self) -> bool:
        return any(line.is_bad() for line in self.lines)

    def is_known_bad(self) -> bool:
        """Whether some number that is there is bad, whatever is still on its way. Never waits."""
        lines = (line for line in self.lines if isinstance(line.content, Place) and line.content.measurement.ready())
        return any(line.is_bad() for line in lines)

    def replays(self) -> Replays | None:
        """Those of the CUDA graph that this call is in; None if nothing of it was read there. May wait."""
        found = [replays for m in self._measurements() if (replays := m.replays()) is not None]
        return min(found) if found else None

    def frame(self) -> Frame:
        """Waits until all numbers are there; those of a CUDA graph are as its last replay left them."""
        lines = tuple(line.arrived() for line in self.lines)
        return Frame(
            self.batch_number, self.module, self.class_name, lines, self.starts_batch, self.is_recompute, self.calls
        )

    def _places(self) -> list[Place]:
        return [line.content for line in self.lines if isinstance(line.content, Place)]

    def _measurements(self) -> list[Measurement]:
        found: list[Measurement] = []
        for place in self._places():
            if place.measurement not in found:
                found.append(place.measurement)
        return found

"""Numbers that are near the limit of their dtype: told of before any is infinite. csrc/near.h finds the same ones."""

from .errors import warn_user
from .frames import Frame
from .stats import TensorStats
from .wording import limit_of, module_text, short_name

__all__ = ["NearLimit", "is_near"]


def is_near(found: TensorStats | str, warn_at: float) -> bool:
    """Whether the largest finite magnitude is this share of the limit or more. Not for integers and bool."""
    if not isinstance(found, TensorStats) or not (found.dtype.is_floating_point or found.dtype.is_complex):
        return False
    return found.finite_abs_max >= warn_at * limit_of(found.dtype)


class NearLimit:
    """Warns of each place once. `warn_at` is a share of the limit, or None for no warning."""

    def __init__(self, warn_at: float | None) -> None:
        self._warn_at = warn_at
        self._told: set[tuple[str, str]] = set()

    def warn(self, frame: Frame) -> None:
        if self._warn_at is None:
            return
        for line in frame.lines:
            place = (frame.module, line.label)
            if place in self._told or not line.is_judged or line.allowed or not is_near(line.content, self._warn_at):
                continue
            self._told.add(place)
            assert isinstance(line.content, TensorStats)
            largest, dtype = line.content.finite_abs_max, line.content.dtype
            warn_user(
                f"{module_text(frame.module, frame.class_name)}, {line.label}: {largest:.2e} is "
                f"{100 * largest / limit_of(dtype):.0f} % of the limit of {short_name(dtype)}, "
                f"in batch {frame.batch_number}"
            )

"""How near numbers are to the limit of their dtype, and where they began to grow towards it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .frames import Frame
from .stats import TensorStats
from .terminal import on_one_line
from .wording import limit_of, module_text, short_name

__all__ = ["Growth", "Headroom", "NearLine", "growth", "headroom", "headroom_of"]

# Less than this in all is what weights and norms do in any model, and no story.
GREW = 16.0
# A layer that multiplies by less is one of those whose outputs merely differ.
GREW_PER_LAYER = 1.5
# Two outputs in a row say nothing of a structure.
FEWEST_LAYERS = 3
# On the way up a module may take away so much: a ReLU that drops the largest negative number, for one.
LOSS = 2.0


def headroom(stats: TensorStats, dtype: torch.dtype | None = None) -> float | None:
    """Powers of two between a tensor's largest finite magnitude and the largest number of its dtype.

    0 is at the limit, 1 half of it. Infinite where all finite elements are zero; None where there is no finite element,
    or the dtype is no real floating one. With another `dtype` the distance to that one's limit, which is negative
    where the tensor would overflow in it.
    """
    if not stats.dtype.is_floating_point or math.isnan(stats.finite_abs_max):
        return None
    if stats.finite_abs_max == 0:
        return math.inf
    return math.log2(limit_of(dtype or stats.dtype)) - math.log2(stats.finite_abs_max)


@dataclass(frozen=True, slots=True)
class NearLine:
    """A line of a frame, and how near it is."""

    batch_number: int
    module: str
    class_name: str
    label: str
    value: float
    """Its largest finite magnitude."""
    dtype: torch.dtype
    powers_left: float
    """To the limit of its dtype, as `headroom` gives them."""
    powers_left_in_float16: float | None
    """Negative: it would overflow if run in float16. None where the dtype reaches no further than that."""

    def __str__(self) -> str:
        text = (
            f"{self.powers_left:6.1f} {self.value:8.2e} {short_name(self.dtype)} {self.module or '(root)'} {self.label}"
        )
        if self.powers_left_in_float16 is not None and self.powers_left_in_float16 < 0:
            text += f"; would overflow if run in float16, by {-self.powers_left_in_float16:.1f}"
        return on_one_line(text)


class Headroom(tuple[NearLine, ...]):
    """The nearest first; as text a table."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(["powers of two left", *map(str, self)]) if self else "no floating-point numbers were kept"


def headroom_of(frames: Iterable[Frame], limit: int = 20) -> Headroom:
    """The `limit` lines that are nearest to the limit of their dtype, each module's line once, where it was nearest.

    Weights, inputs and outputs alike. Lines that are all zero have nothing to tell.
    """
    nearest: dict[tuple[str, str], NearLine] = {}
    for frame in frames:
        for line in frame.lines:
            stats = line.content
            if not isinstance(stats, TensorStats) or (left := headroom(stats)) is None or left == math.inf:
                continue
            known = nearest.get((frame.module, line.label))
            if known is None or left < known.powers_left:
                reaches_further = limit_of(stats.dtype) > limit_of(torch.float16)
                nearest[frame.module, line.label] = NearLine(
                    frame.batch_number,
                    frame.module,
                    frame.class_name,
                    line.label,
                    stats.finite_abs_max,
                    stats.dtype,
                    left,
                    headroom(stats, torch.float16) if reaches_further else None,
                )
    return Headroom(sorted(nearest.values(), key=lambda line: line.powers_left)[:limit])


@dataclass(frozen=True, slots=True)
class Growth:
    """A run of module calls whose outputs grew, each fed by the one before it."""

    frames: tuple[Frame, ...]
    """The run, in execution order."""
    values: tuple[float, ...]
    """The largest finite magnitude in the output of each."""
    of_layers: bool
    """The frames are the same place of consecutive layers, with others between them; else they follow each other."""

    @property
    def start(self) -> Frame:
        return self.frames[0]

    @property
    def factor(self) -> float:
        """By which one step multiplied: the geometric mean, over steps at which the value changed."""
        return math.pow(self.values[-1] / self.values[0], 1 / max(1, len(self._changes()) - 1))

    @property
    def text(self) -> str:
        """As "2.37e+02 -> 9.74e+03 -> 6.27e+04 over the last 4 frames, from encoder.block.2.layer.1.wi_1"."""
        values = [f"{value:.2e}" for value in self._changes()]
        if len(values) > 6:
            values[2:-2] = ["..."]
        count = len(self.frames)
        over = f"{count} layers, {self.factor:.3g} times each" if self.of_layers else f"the last {count} frames"
        return f"{' -> '.join(values)} over {over}, from {module_text(self.start.module)}"

    def _changes(self) -> list[float]:
        """A parent gives what its last child gave."""
        return [value for i, value in enumerate(self.values) if i == 0 or value != self.values[i - 1]]


def growth(frames: Sequence[Frame]) -> Growth | None:
    """Where the growth began that the last of these frames, in execution order, is the end of.

    A bad last frame is what it ended in, and is left out. There is a run where the outputs multiplied by 16 or more in
    all. A frame is part of it only if it may be fed by the one before: if it was given a number that is as large as
    that one's largest, or is the module around it. Where both are there, the run that began earlier is given: the
    frames one after the other up to the last, or, over blocks that bring values down at their start while what passes
    them grows, the same place of three consecutive layers or more, each given what the one before gave, and 1.5 times
    as large.

    None if there is no such run.
    """
    if not frames:
        return None
    last = frames[-1]
    batch = [f for f in frames if f.batch_number == last.batch_number and f.is_recompute == last.is_recompute]
    if any(line.is_bad and line.label.startswith("output") for line in last.lines):
        batch.pop()
    if not batch or _output(batch[-1]) is None:
        return None
    candidates = [run for run in (_consecutive(batch), *_of_layers(batch, last)) if run is not None]
    position = {id(frame): i for i, frame in enumerate(batch)}
    return min(candidates, key=lambda run: position[id(run.start)], default=None)


def _consecutive(batch: Sequence[Frame]) -> Growth | None:
    run: list[tuple[Frame, float]] = []
    for frame in reversed(batch):
        value = _output(frame)
        if not value:
            break
        if run and (value > LOSS * run[-1][1] or not _may_be_fed_by(run[-1][0], frame, value)):
            break
        run.append((frame, value))
    if not run:
        return None
    run.reverse()
    smallest = min(value for _, value in run)
    start = max(i for i, (_, value) in enumerate(run) if value == smallest)
    return _grown(run[start:], of_layers=False)


def _of_layers(batch: Sequence[Frame], last: Frame) -> Iterator[Growth | None]:
    """Of the layers that end where the batch does; the one in which that is need not have come to its own end."""
    end = _output(batch[-1])
    calls = {frame.module: (i, frame) for i, frame in enumerate(batch)}
    for before, number, after in _places(last.module):
        run: list[tuple[Frame, float]] = []
        at = len(batch)
        current = number if _named(before, number, after) in calls else number - 1
        while (found := calls.get(_named(before, current, after))) is not None:
            i, frame = found
            value = _output(frame)
            if not value or i >= at:
                break
            if run:
                later, later_value = run[-1]
                is_fed = frame.class_name == later.class_name and value in _largest(later, "input")
                if not is_fed or later_value < GREW_PER_LAYER * value:
                    break
            run.append((frame, value))
            at, current = i, current - 1
        run.reverse()
        if len(run) < FEWEST_LAYERS:
            continue
        # What came after the last of them must not have taken the growth back, or made one of its own; what the last
        # frame calls by itself, as a norm, takes nothing back of what that was given.
        is_given = run[-1][1] in _largest(last, "input")
        if is_given or (end is not None and run[-1][1] / LOSS <= end <= GREW * run[-1][1]):
            yield _grown(run, of_layers=True)


def _grown(run: Sequence[tuple[Frame, float]], of_layers: bool) -> Growth | None:
    frames, values = tuple(frame for frame, _ in run), tuple(value for _, value in run)
    return Growth(frames, values, of_layers) if len(run) > 1 and values[-1] >= GREW * values[0] else None


def _places(name: str) -> Iterator[tuple[str, int, str]]:
    """(before, number, after) of each number in a qualified name, with and without what comes after it."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            for end in range(i + 1, len(parts) + 1):
                yield ".".join(parts[:i]), int(part), ".".join(parts[i + 1 : end])


def _named(before: str, number: int, after: str) -> str:
    return ".".join(part for part in (before, str(number), after) if part)


def _may_be_fed_by(frame: Frame, before: Frame, value: float) -> bool:
    is_around = before.module.startswith(f"{frame.module}.") if frame.module else before.module != ""
    return is_around or any(value <= given for given in _largest(frame, "input"))


def _output(frame: Frame) -> float | None:
    return max(_largest(frame, "output"), default=None)


def _largest(frame: Frame, label: str) -> list[float]:
    """The largest finite number of each floating-point line of this label; not where that is the dtype's limit itself,
    as in a mask: it stands there for infinity."""
    return [
        line.content.finite_abs_max
        for line in frame.lines
        if line.label.startswith(label)
        and isinstance(line.content, TensorStats)
        and line.content.dtype.is_floating_point
        and 0 <= line.content.finite_abs_max < limit_of(line.content.dtype)
    ]

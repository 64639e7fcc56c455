"""Frames of several ranks as one: what is in all shards of a tensor, or in the batches of all ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .frames import Frame, Line
from .ranks import rank_and_world_size
from .report import stats_line
from .stats import TensorStats
from .terminal import on_one_line, printable
from .wording import module_text

__all__ = ["MergedFrame", "MergedLine", "merge_frames"]

_Place = tuple[int, str, str, bool, str]
"""Batch, module, its class, whether it is a recompute, and of gradients what they are of."""


@dataclass(frozen=True, slots=True)
class MergedLine:
    """The same line of the same module call on several ranks."""

    label: str
    content: TensorStats | str
    """Over the elements of all ranks, those that several of them hold counted as often. `shape` and `first_bad` are
    those of one rank: the first that is bad, or else the first. A word where no rank has numbers."""
    ranks: tuple[int, ...]
    """That have it."""
    bad_ranks: tuple[int, ...]
    """On which it is bad."""

    def __str__(self) -> str:
        bad = f"  <- rank {', '.join(map(str, self.bad_ranks))}" if self.bad_ranks else ""
        return stats_line(self.content, self.label) + bad


@dataclass(frozen=True, slots=True)
class MergedFrame:
    """The same module call on several ranks; `print` it for its lines."""

    batch_number: int
    module: str
    class_name: str
    lines: tuple[MergedLine, ...]
    is_recompute: bool = False
    """As that of `Frame`."""

    def __str__(self) -> str:
        heading = on_one_line(module_text(self.module, self.class_name)) + " (recomputed)" * self.is_recompute
        return printable("\n".join([f"{'':17} {heading}", *map(str, self.lines)]))


def merge_frames(frames: Sequence[Frame], group: dist.ProcessGroup | None) -> list[MergedFrame]:
    """Those of all ranks, which call this at the same time: the calls of a module in a batch in their order.

    In the order of the first rank that has them; a rank need not have all, as a stage of a pipeline.

    Cost: one `all_gather_object`, which is two collectives; no tensor is read.
    """
    of_ranks: list[tuple[int, Sequence[Frame]]] = [(rank_and_world_size()[0], frames)]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, of_ranks[0], group=group)
        of_ranks = gathered
    found: dict[tuple[_Place, int], list[tuple[int, Frame]]] = {}
    cut = {number for _, theirs in of_ranks for number in _cut(theirs)}
    for rank, theirs in of_ranks:
        for key, frame in _numbered(theirs, cut):
            found.setdefault(key, []).append((rank, frame))
    return [_merged_frame(same) for same in found.values()]


def _cut(frames: Sequence[Frame]) -> set[int]:
    """Batches of which the beginning is not there."""
    return {frame.batch_number for frame in frames} - {frame.batch_number for frame in frames if frame.starts_batch}


def _numbered(frames: Sequence[Frame], cut: set[int]) -> Iterator[tuple[tuple[_Place, int], Frame]]:
    """Each with the number of the call: from the first one on, since a rank that raised has no more; but from the last
    one on in a batch of which some rank has only the end."""
    all_calls = Counter(map(_place, frames))
    calls: Counter[_Place] = Counter()
    for frame in frames:
        place = _place(frame)
        yield (place, calls[place] - all_calls[place] * (frame.batch_number in cut)), frame
        calls[place] += 1


def _place(frame: Frame) -> _Place:
    """A wrapper has the name of what it wraps. Gradients of weights are a frame of their own, which a rank may lack."""
    of = ""
    if frame.is_backward:
        of = re.split(r"[\[.]", frame.lines[0].label.removeprefix("grad "))[0]
        of = of if of in ("output", "input") else "weights"
    return frame.batch_number, frame.module, frame.class_name, frame.is_recompute, of


def _merged_frame(same: Sequence[tuple[int, Frame]]) -> MergedFrame:
    lines: dict[str, list[tuple[int, Line]]] = {}
    for rank, frame in same:
        for line in frame.lines:
            lines.setdefault(line.label, []).append((rank, line))
    first = same[0][1]
    merged = tuple(_merged_line(each) for each in lines.values())
    return MergedFrame(first.batch_number, first.module, first.class_name, merged, first.is_recompute)


def _merged_line(same: Sequence[tuple[int, Line]]) -> MergedLine:
    with_numbers = [line.content for _, line in same if isinstance(line.content, TensorStats)]
    content = _merged_stats(with_numbers) if with_numbers else same[0][1].content
    ranks, bad = tuple(rank for rank, _ in same), tuple(rank for rank, line in same if line.is_bad)
    return MergedLine(same[0][1].label, content, ranks, bad)


def _merged_stats(stats: Sequence[TensorStats]) -> TensorStats:
    shown = next((each for each in stats if each.is_bad), stats[0])
    return TensorStats(
        abs_min=_best(min, (each.abs_min for each in stats)),
        abs_max=_best(max, (each.abs_max for each in stats)),
        finite_abs_max=_best(max, (each.finite_abs_max for each in stats)),
        nan_count=sum(each.nan_count for each in stats),
        posinf_count=sum(each.posinf_count for each in stats),
        neginf_count=sum(each.neginf_count for each in stats),
        first_bad=shown.first_bad,
        numel=sum(each.numel for each in stats),
        dtype=shown.dtype,
        shape=shown.shape,
        zero_count=_total([each.zero_count for each in stats]),
        subnormal_count=_total([each.subnormal_count for each in stats]),
        abs_min_nonzero=None
        if any(each.abs_min_nonzero is None for each in stats)
        else _best(min, (each.abs_min_nonzero for each in stats if each.abs_min_nonzero is not None)),
        is_counted=all(each.is_counted for each in stats),
    )


def _best(choose: Callable[[list[float | int]], float | int], numbers: Iterable[float | int]) -> float | int:
    """Of those that are numbers."""
    there = [number for number in numbers if number == number]
    return choose(there) if there else float("nan")


def _total(counts: Sequence[int | None]) -> int | None:
    return None if None in counts else sum(count for count in counts if count is not None)

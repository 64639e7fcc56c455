"""The places in compiled programs at which module calls are read: what a row that one of them wrote holds."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..capture import text
from ..stats import TensorStats
from .row import FIRST_TENSOR, MAXIMA, MOST_TENSORS, ReadTensor

__all__ = ["Site", "new_site", "site", "will_read"]


@dataclass
class Site:
    """Of one module call in one graph."""

    order: int
    """That in which calls are traced, which is that in which they run."""
    labels: Sequence[str]
    words: Sequence[str]
    """For each label what it is that is no tensor, empty for a tensor."""
    read: list[ReadTensor | str] = field(default_factory=list)
    """For each tensor; for one that cannot be read a word."""

    @functools.cached_property
    def shown(self) -> list[tuple[str, str | tuple[int, ReadTensor]]]:
        """For each line its label, and a word, or where in a row its numbers begin, and of which tensor."""
        more = sum(isinstance(tensor, ReadTensor) and tensor.is_read for tensor in self.read) - MOST_TENSORS
        found: list[tuple[str, str | tuple[int, ReadTensor]]] = []
        read = iter(self.read)
        count = 0  # of tensors that have numbers in the row
        for label, word in zip(self.labels, self.words, strict=True):
            what = word or next(read, "not read")
            if isinstance(what, str):
                found.append((label, what))
                continue
            at = FIRST_TENSOR + MAXIMA * count
            count += what.is_read
            if count <= MOST_TENSORS:
                for_all = f", and {more} more" if count == MOST_TENSORS and what.is_read and more > 0 else ""
                found.append((label + for_all, (at, what)))
        return found

    @functools.cached_property
    def lines(self) -> list[str]:
        """Their labels."""
        return [label for label, _ in self.shown]

    def contents(self, row: Sequence[float]) -> list[TensorStats | str]:
        """What the lines show of a row, whose last call was here."""
        sizes = [int(size) for size in row[2:FIRST_TENSOR] if size >= 0]
        return [
            what if isinstance(what, str) else what[1].stats(row[what[0] : what[0] + MAXIMA], sizes)
            for _, what in self.shown
        ]


_sites: list[Site] = []


def new_site(order: int | None, labels: Sequence[str], words: Sequence[str]) -> int:
    """A number for it, which is its order where that is None."""
    number = len(_sites)
    _sites.append(Site(number if order is None else order, [text(label) for label in labels], words))
    return number


def site(number: int) -> Site:
    return _sites[number]


def will_read(number: int, read: list[ReadTensor | str]) -> None:
    """Where a graph is made: what a row of the site of this number will hold, tensor by tensor."""
    _sites[number].read = read
    for made in ("shown", "lines"):
        _sites[number].__dict__.pop(made, None)

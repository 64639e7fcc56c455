"""The places in compiled programs at which module calls are read: what a row that one of them wrote holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..stats import TensorStats
from .operation import tell_of_reads_to
from .row import FIRST_TENSOR, MAXIMA, MOST_TENSORS, ReadTensor

__all__ = ["Site", "new_site", "site"]


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

    def lines(self, row: Sequence[float]) -> list[tuple[str, TensorStats | str]]:
        """What a row shows, whose last call was here."""
        sizes = [int(size) for size in row[2:FIRST_TENSOR] if size >= 0]
        more = sum(isinstance(tensor, ReadTensor) and tensor.is_read for tensor in self.read) - MOST_TENSORS
        found: list[tuple[str, TensorStats | str]] = []
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
                found.append((label + for_all, what.stats(row[at : at + MAXIMA], sizes)))
        return found


_sites: list[Site] = []


def new_site(order: int | None, labels: Sequence[str], words: Sequence[str]) -> int:
    """A number for it, which is its order where that is None."""
    number = len(_sites)
    _sites.append(Site(number if order is None else order, labels, words))
    return number


def site(number: int) -> Site:
    return _sites[number]


def _tell(number: int, read: list[ReadTensor | str]) -> None:
    _sites[number].read = read


tell_of_reads_to(_tell)

"""The places in compiled programs at which module calls are read: what a row that one of them wrote holds."""

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from ..capture import text
from ..dynamo import compiled_now
from ..stats import TensorStats
from .row import FIRST_SIZE, FIRST_TENSOR, MAXIMA, MOST_TENSORS, ROWS, ReadTensor

__all__ = ["Site", "new_site", "site", "will_read"]


@dataclass
class Site:
    """Of one module call in one graph, in which calls run in the order of their sites."""

    number: int
    graph: object
    kinds: dict[Hashable, int]
    """Of calls of the modules of its type, and their numbers."""
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
        sizes = [int(size) for size in row[FIRST_SIZE:FIRST_TENSOR] if size >= 0]
        return [
            what if isinstance(what, str) else what[1].stats(row[what[0] : what[0] + MAXIMA], sizes)
            for _, what in self.shown
        ]


_sites: list[Site] = []
# Of all modules of a type the same, since a graph that was made of one runs with the rows of another.
_kinds: WeakKeyDictionary[type[nn.Module], dict[Hashable, int]] = WeakKeyDictionary()


def new_site(module_type: type[nn.Module], labels: Sequence[str], words: Sequence[str]) -> int:
    """A number for it, larger than those before."""
    kinds = _kinds.setdefault(module_type, {})
    _sites.append(Site(len(_sites), compiled_now(), kinds, [text(label) for label in labels], words))
    return len(_sites) - 1


def site(number: int) -> Site:
    return _sites[number]


def will_read(number: int, read: list[ReadTensor | str]) -> int:
    """Where a graph is made: what a row of the site of this number will hold, tensor by tensor. Gives which of the rows
    of the module that is: one for each kind of call, as far as there are as many."""
    place = _sites[number]
    place.read = read
    for made in ("shown", "lines"):
        place.__dict__.pop(made, None)
    read_as = tuple((tensor.dtype, tensor.is_read) if isinstance(tensor, ReadTensor) else tensor for tensor in read)
    kind = (tuple(place.labels), tuple(place.words), read_as)
    return place.kinds.setdefault(kind, len(place.kinds)) % ROWS

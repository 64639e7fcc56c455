"""The address spaces of a grid. An access outside of what is there, or not aligned to its size, is a Fault.

A generic address is the host's own for global memory. The other spaces have windows far above any of those, as on a
device, where which window an address lies in tells what it points to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ptx_on_cpu.program import Program, PtxError

WINDOWS = {"global": 0, "shared": 1 << 56, "local": 2 << 56, "parameter": 3 << 56}
POISON = 0xA5  # what memory holds that nothing was written to


class Fault(PtxError):
    """Something that a device would not survive, or that its rules leave undefined."""


def bytes_of(values: np.ndarray) -> np.ndarray:
    """[values, bytes], lowest first."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def check_alignment(addresses: np.ndarray, size: int) -> None:
    if (addresses % np.uint64(size)).any():
        raise Fault(f"{size} bytes at an address that is no multiple of {size}")


@dataclass
class Bank:
    """A space of which each owner (block, thread, or the grid) has one of its own: a row of `content`.

    Only the bytes of variables are there, and they have to be written before they are read.
    """

    name: str
    content: np.ndarray  # [owners, bytes]
    written: np.ndarray
    of_variable: np.ndarray  # [bytes]
    owner: np.ndarray  # of each thread
    read_only: bool = False

    @staticmethod
    def make(program: Program, space: str, owner: np.ndarray) -> Bank:
        shape = (int(owner.max()) + 1, program.size_of(space))
        of_variable = np.zeros(shape[1], bool)
        for variable in program.variables:
            if variable.space == space:
                of_variable[variable.offset : variable.offset + variable.size] = True
        content = np.full(shape, POISON, np.uint8)
        return Bank(space, content, np.zeros(shape, bool), of_variable, owner)

    def places(self, lanes: np.ndarray, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        check_alignment(addresses, size)
        columns = addresses.astype(np.int64)[:, None] + np.arange(size)
        if (columns < 0).any() or (columns >= len(self.of_variable)).any() or not self.of_variable[columns].all():
            raise Fault(f"{size} bytes outside of every variable in {self.name} memory")
        return self.owner[lanes][:, None], columns

    def load(self, lanes: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        places = self.places(lanes, addresses, size)
        if not self.written[places].all():
            raise Fault(f"{self.name} memory is read before it was written")
        found: np.ndarray = self.content[places]
        return found

    def store(self, lanes: np.ndarray, addresses: np.ndarray, values: np.ndarray) -> None:
        if self.read_only:
            raise Fault(f"a store to {self.name} memory")
        places = self.places(lanes, addresses, values.shape[1])
        self.content[places] = values
        self.written[places] = True


@dataclass(frozen=True)
class Region:
    """Host memory that a launch may use, and nothing beside it."""

    address: int
    size: int
    writable: bool


class GlobalMemory:
    """Regions, which do not overlap unless none of them is writable."""

    def __init__(self, regions: Iterable[Region]) -> None:
        ordered = sorted({r for r in regions if r.size}, key=lambda r: r.address)
        self.regions: list[Region] = []
        for region in ordered:
            before = self.regions[-1] if self.regions else None
            if before and region.address < before.address + before.size:
                if region.writable or before.writable:
                    raise PtxError("writable memory overlaps other memory of a launch")
                end = max(region.address + region.size, before.address + before.size)
                self.regions[-1] = Region(before.address, end - before.address, False)
            else:
                self.regions.append(region)
        self.first = np.array([r.address for r in self.regions], np.uint64)
        self.last = np.array([r.address + r.size for r in self.regions], np.uint64)
        self.writable = np.array([r.writable for r in self.regions], bool)
        self.bytes = [
            np.ctypeslib.as_array(ctypes.cast(r.address, ctypes.POINTER(ctypes.c_uint8)), (r.size,))
            for r in self.regions
        ]

    def locate(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The region of each access."""
        found = np.searchsorted(self.first, addresses, side="right") - 1
        inside = found >= 0
        if inside.all():
            inside = addresses + np.uint64(size) <= self.last[found]
        if not inside.all():
            raise Fault(f"{size} bytes outside of the memory of this launch")
        check_alignment(addresses, size)
        return found

    def load(self, addresses: np.ndarray, size: int, constant: bool) -> np.ndarray:
        """`constant`: through a cache that does not see what this launch writes."""
        found = self.locate(addresses, size)
        if constant and self.writable[found].any():
            raise Fault("a load that takes memory for constant which this launch writes")
        result = np.empty((len(addresses), size), np.uint8)
        for region in np.unique(found):
            chosen = found == region
            offsets = (addresses[chosen] - self.first[region]).astype(np.int64)
            result[chosen] = self.bytes[region][offsets[:, None] + np.arange(size)]
        return result

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        found = self.locate(addresses, values.shape[1])
        if not self.writable[found].all():
            raise Fault("a store to memory that this launch only reads")
        for region, address, value in zip(found, addresses, values, strict=True):
            offset = int(address - self.first[region])
            self.bytes[region][offset : offset + len(value)] = value

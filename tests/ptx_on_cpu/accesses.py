"""Instructions that read and write memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptx_on_cpu.decoding import Decode, Execute, Use
from ptx_on_cpu.memory import WINDOWS, Fault, bytes_of
from ptx_on_cpu.operands import TYPES, Lanes, storage
from ptx_on_cpu.program import PtxError

if TYPE_CHECKING:
    from ptx_on_cpu.machine import Machine

VECTORS = {"v2": 2, "v4": 4, "v8": 8}
CACHE_HINTS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt")
SCOPES = ("cta", "gpu", "sys")


def space_of(use: Use, variable_space: str | None) -> str | None:
    """Of a load or store; None is generic."""
    space = use.take("global", "shared", "local", "param")
    if space != "param":
        return space
    return variable_space or "parameter"


def take_ordering(use: Use) -> None:
    """How an access is ordered with others', which makes no difference where one instruction runs at a time."""
    use.take(*CACHE_HINTS)
    if use.take("relaxed", "acquire", "release", "acq_rel"):
        use.need(*SCOPES)
    use.take("volatile", "weak")


def load(use: Use) -> Execute:
    name = use.type()
    count = VECTORS.get(use.take(*VECTORS) or "", 1)
    targets = use.operands.list(0)
    if len(targets) != count or len(use.operands) != 2:
        raise PtxError("as many registers as the vector has")
    variable_space, address = use.operands.address(use.operands[1])
    space = space_of(use, variable_space)
    constant = use.take("nc") is not None
    take_ordering(use)
    writes = [use.operands.write(target, name) for target in targets]
    size = TYPES[name].itemsize

    def execute(machine: Machine, lanes: Lanes) -> None:
        content = load_bytes(machine, space, lanes, address(machine, lanes), size * count, constant)
        values = content.view(TYPES[name])
        for i, write in enumerate(writes):
            write(machine, lanes, np.ascontiguousarray(values[:, i]))

    return execute


def store(use: Use) -> Execute:
    name = use.type()
    count = VECTORS.get(use.take(*VECTORS) or "", 1)
    sources = use.operands.list(1)
    if len(sources) != count or len(use.operands) != 2:
        raise PtxError("as many registers as the vector has")
    variable_space, address = use.operands.address(use.operands[0])
    space = space_of(use, variable_space)
    take_ordering(use)
    bits = storage(TYPES[name])
    reads = [use.operands.read(source, f"b{8 * bits.itemsize}") for source in sources]

    def execute(machine: Machine, lanes: Lanes) -> None:
        values = np.stack([read(machine, lanes) for read in reads], axis=1)
        store_bytes(machine, space, lanes, address(machine, lanes), values.view(np.uint8))

    return execute


def in_spaces(addresses: np.ndarray) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Generic addresses by the space whose window they are in: space, which of them, addresses in that space."""
    windows = addresses >> np.uint64(56)
    found = []
    for space, window in WINDOWS.items():
        chosen = np.flatnonzero(windows == window >> 56)
        if len(chosen):
            found.append((space, chosen, addresses[chosen] - np.uint64(window)))
    if sum(len(chosen) for _, chosen, _ in found) != len(addresses):
        raise Fault("an address in no space")
    return found


def load_bytes(
    machine: Machine, space: str | None, lanes: Lanes, addresses: np.ndarray, size: int, constant: bool
) -> np.ndarray:
    if space is None:
        content = np.empty((len(lanes), size), np.uint8)
        for part, chosen, places in in_spaces(addresses):
            content[chosen] = load_bytes(machine, part, lanes[chosen], places, size, constant)
        return content
    if space == "global":
        return machine.memory.load(addresses, size, constant)
    return machine.banks[space].load(lanes, addresses, size)


def store_bytes(machine: Machine, space: str | None, lanes: Lanes, addresses: np.ndarray, values: np.ndarray) -> None:
    if space is None:
        for part, chosen, places in in_spaces(addresses):
            store_bytes(machine, part, lanes[chosen], places, values[chosen])
    elif space == "global":
        machine.memory.store(addresses, values)
    else:
        machine.banks[space].store(lanes, addresses, values)


UPDATES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "or": np.bitwise_or,
    "and": np.bitwise_and,
    "exch": lambda old, new: new,
}


def atomic(returns: bool) -> Decode:
    """Lane after lane, in no order that a program may count on."""

    def decode(use: Use) -> Execute:
        name = use.type()
        update = UPDATES[use.need(*UPDATES)]
        use.need("global")
        use.take("relaxed")
        use.take(*SCOPES)
        if len(use.operands) != 2 + returns:
            raise PtxError("operands of an atomic")
        write = use.operands.write(use.operands[0] if returns else "_", name)
        _, address = use.operands.address(use.operands[-2])
        read = use.operands.read(use.operands[-1], name)
        dtype = TYPES[name]

        def execute(machine: Machine, lanes: Lanes) -> None:
            addresses, values = address(machine, lanes), read(machine, lanes)
            old = np.empty(len(lanes), dtype)
            for i in range(len(lanes)):
                place = addresses[i : i + 1]
                old[i : i + 1] = machine.memory.load(place, dtype.itemsize, False).view(dtype)[:, 0]
                new = update(old[i : i + 1], values[i : i + 1]).astype(dtype)
                machine.memory.store(place, bytes_of(new))
            write(machine, lanes, old)

        return execute

    return decode


def fence(use: Use) -> Execute:
    """Nothing to do where one instruction runs at a time; fences.py proves where they stand."""
    use.take("sc", "acq_rel")
    use.need("cta", "gl", "gpu", "sys")
    return lambda machine, lanes: None

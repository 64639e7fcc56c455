"""Instructions that compute a register from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_on_cpu.decoding import Decode, Execute, Operation, Use, compute
from ptx_on_cpu.memory import WINDOWS, Fault, bytes_of
from ptx_on_cpu.operands import TYPES, Lanes
from ptx_on_cpu.program import PtxError

if TYPE_CHECKING:
    from ptx_on_cpu.machine import Machine

# Arithmetic


def arithmetic(operation: Operation, count: int) -> Decode:
    """Wraps around for integers. For floats it has to say how it rounds: what does not may be fused with another."""

    def decode(use: Use) -> Execute:
        name = use.type()
        if TYPES[name].kind == "f" and count == 2:
            use.need("rn")
        return compute(use, name, (name,) * count, operation)

    return decode


def multiply(use: Use) -> Execute:
    name = use.type()
    if TYPES[name].kind == "f":
        use.need("rn")
        return compute(use, name, (name, name), np.multiply)
    result = product_type(use, name)
    dtype = TYPES[result]
    return compute(use, result, (name, name), lambda a, b: a.astype(dtype) * b.astype(dtype))


def multiply_add(use: Use) -> Execute:
    name = use.type()
    result = product_type(use, name)
    dtype = TYPES[result]
    return compute(use, result, (name, name, result), lambda a, b, c: a.astype(dtype) * b.astype(dtype) + c)


def product_type(use: Use, name: str) -> str:
    """As wide as the factors, or twice that."""
    if name[0] not in "us":
        raise PtxError(f"a product of type {name}")
    return name if use.need("lo", "wide") == "lo" else f"{name[0]}{2 * int(name[1:])}"


def divide(remainder: bool) -> Decode:
    def operation(a: np.ndarray, b: np.ndarray) -> Any:
        if (b == 0).any():
            raise Fault("a division by 0")
        return a % b if remainder else a // b

    def decode(use: Use) -> Execute:
        name = use.type()
        if name[0] != "u":
            raise PtxError("a division of numbers with a sign")  # numpy's rounds down, not towards 0
        return compute(use, name, (name, name), operation)

    return decode


def extremum(operation: Operation) -> Decode:
    """Of integers, or of both halves of a word."""

    def decode(use: Use) -> Execute:
        packed = use.take("u16x2", "s16x2")
        if packed:
            dtype = TYPES[packed.removesuffix("x2")]

            def of_halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
                halves = [np.ascontiguousarray(word).view(dtype) for word in (a, b)]
                result: np.ndarray = operation(*halves).view(np.uint32)
                return result

            return compute(use, "b32", ("b32", "b32"), of_halves)
        name = use.type()
        if name[0] not in "us":
            raise PtxError(f"an extremum of type {name}")
        return compute(use, name, (name, name), operation)

    return decode


def square_root(use: Use) -> Execute:
    name = use.type()
    use.need("rn")
    return compute(use, name, (name,), np.sqrt)


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def set_predicate(use: Use) -> Execute:
    name = use.type()
    comparison = use.need(*COMPARISONS)
    if comparison == "ne" and TYPES[name].kind == "f":
        raise PtxError("ne is false for NaN, unlike numpy's")
    return compute(use, "pred", (name, name), COMPARISONS[comparison])


def select(use: Use) -> Execute:
    name = use.type()
    return compute(use, name, (name, name, "pred"), lambda a, b, chosen: np.where(chosen, a, b))


# Bits


def bitwise(operation: Operation, count: int) -> Decode:
    def decode(use: Use) -> Execute:
        name = use.type()
        if name[0] not in "bp":
            raise PtxError(f"bits of type {name}")
        return compute(use, name, (name,) * count, operation)

    return decode


def shift(operation: Operation) -> Decode:
    """By the width or more: what as many single steps would give."""

    def decode(use: Use) -> Execute:
        name = use.type()
        dtype = TYPES[name]
        width = 8 * dtype.itemsize

        def shifted(a: np.ndarray, distance: np.ndarray) -> Any:
            near = operation(a, np.minimum(distance, width - 1).astype(dtype))
            last = operation(near, np.ones(1, dtype))
            return np.where(distance < width, near, last)

        return compute(use, name, (name, "u32"), shifted)

    return decode


def funnel_shift(use: Use) -> Execute:
    """The upper (l) or the lower (r) word of two that are shifted as one, the first operand being the lower."""
    use.need("b32")
    is_left = use.need("l", "r") == "l"
    wraps = use.need("wrap", "clamp") == "wrap"

    def shifted(low: np.ndarray, high: np.ndarray, distance: np.ndarray) -> np.ndarray:
        both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
        by = (distance & np.uint32(31) if wraps else np.minimum(distance, 32)).astype(np.uint64)
        moved = (both << by) >> np.uint64(32) if is_left else both >> by
        result: np.ndarray = (moved & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        return result

    return compute(use, "b32", ("b32", "b32", "u32"), shifted)


def count_bits(use: Use) -> Execute:
    name = use.type()
    return compute(use, "u32", (name,), lambda a: np.unpackbits(bytes_of(a), axis=1).sum(axis=1))


def permute_bytes(use: Use) -> Execute:
    """Each nibble of the selector takes one of 8 bytes; its top bit takes that byte's sign instead, 8 times."""
    use.need("b32")

    def permuted(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
        choice = np.concatenate([bytes_of(low), bytes_of(high)], axis=1)
        nibbles = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
        taken = np.take_along_axis(choice, (nibbles & 7).astype(np.int64), axis=1)
        taken = np.where(nibbles & 8, np.where(taken & 0x80, 0xFF, 0), taken)
        result: np.ndarray = taken.astype(np.uint8).view(np.uint32)[:, 0]
        return result

    return compute(use, "b32", ("b32", "b32", "b32"), permuted)


def insert_bits(use: Use) -> Execute:
    """`length` bits of a, at `start` in b."""
    name = use.type()
    dtype = TYPES[name]

    def inserted(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> Any:
        check_field(dtype, start, length)
        field = ((dtype.type(1) << length.astype(dtype)) - dtype.type(1)) << start.astype(dtype)
        return b & ~field | a << start.astype(dtype) & field

    return compute(use, name, (name, name, "u32", "u32"), inserted)


def extract_bits(use: Use) -> Execute:
    """`length` bits from `start` on, the top one of which is the sign of a signed result."""
    name = use.type()
    dtype = TYPES[name]

    def extracted(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> Any:
        check_field(dtype, start, length)
        width = 8 * dtype.itemsize
        return a << (width - start - length).astype(dtype) >> (width - length).astype(dtype)

    return compute(use, name, (name, "u32", "u32"), extracted)


def check_field(dtype: np.dtype, start: np.ndarray, length: np.ndarray) -> None:
    width = 8 * dtype.itemsize
    if (length < 1).any() or (length >= width).any() or (start > width - length).any():
        raise Fault("a field of no bits, of all, or beyond its word")


# Moves


def move(use: Use) -> Execute:
    name = use.type()
    target, source = use.operands[0], use.operands[1]
    if not (source.startswith("{") or target.startswith("{")):
        return compute(use, name, (name,), lambda a: a)
    split = target.startswith("{")
    parts = use.operands.list(0 if split else 1)
    part = f"b{8 * TYPES[name].itemsize // len(parts)}"
    if split:
        read = use.operands.read(source, name)
        writes = [use.operands.write(text, part) for text in parts]

        def unpack(machine: Machine, lanes: Lanes) -> None:
            words = np.ascontiguousarray(read(machine, lanes)).view(TYPES[part]).reshape(len(lanes), -1)
            for i, write in enumerate(writes):
                write(machine, lanes, np.ascontiguousarray(words[:, i]))

        return unpack
    reads = [use.operands.read(text, part) for text in parts]
    write = use.operands.write(target, name)

    def pack(machine: Machine, lanes: Lanes) -> None:
        words = np.stack([read(machine, lanes) for read in reads], axis=1)
        write(machine, lanes, words.view(TYPES[name])[:, 0])

    return pack


def convert(use: Use) -> Execute:
    """Between integers; to a float, rounded to the nearest where that loses something."""
    source, result = use.type(), use.type()
    kinds = TYPES[result].kind, TYPES[source].kind
    if kinds[0] == "f":
        exact = kinds[1] == "f" and TYPES[source].itemsize < TYPES[result].itemsize
        if not exact:
            use.need("rn")
    elif kinds[1] == "f":
        raise PtxError("a float made an integer")
    return compute(use, result, (source,), lambda a: a.astype(TYPES[result]))


def convert_address(use: Use) -> Execute:
    """From a space to the generic one, or back."""
    use.need("u64")
    back = use.take("to")
    space = use.need("global", "shared", "local", "param").replace("param", "parameter")
    window = np.uint64(WINDOWS[space])

    def to_space(address: np.ndarray) -> Any:
        if (address >> np.uint64(56) != window >> np.uint64(56)).any():
            raise Fault(f"an address that is not in {space} memory")
        return address - window

    return compute(use, "u64", ("u64",), to_space if back else lambda address: address + window)

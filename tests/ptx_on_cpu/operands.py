"""Types and operands of instructions, made into functions that read and write the registers of some lanes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ptx_on_cpu.program import Instruction, Program, PtxError

if TYPE_CHECKING:
    from ptx_on_cpu.machine import Machine

Lanes: TypeAlias = np.ndarray  # indices of threads of the grid
Read: TypeAlias = Callable[["Machine", Lanes], np.ndarray]
Write: TypeAlias = Callable[["Machine", Lanes, np.ndarray], None]

WIDTHS = (8, 16, 32, 64)
TYPES: dict[str, np.dtype] = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in WIDTHS},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in WIDTHS},
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "pred": np.dtype(bool),
}
PREDICATE = TYPES["pred"]

SPECIAL_REGISTERS: dict[str, Read] = {
    "%tid.x": lambda machine, lanes: lanes % machine.block_size,
    "%ctaid.x": lambda machine, lanes: lanes // machine.block_size,
    "%ntid.x": lambda machine, lanes: np.full(len(lanes), machine.block_size),
    "%nctaid.x": lambda machine, lanes: np.full(len(lanes), machine.grid_size),
    "%laneid": lambda machine, lanes: lanes % 32,
}


def storage(dtype: np.dtype) -> np.dtype:
    """What a register of this type is kept as."""
    return dtype if dtype == PREDICATE else np.dtype(f"u{dtype.itemsize}")


class RegisterFile:
    """Numbers the registers of a program; which type each has."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.numbers: dict[tuple[str, str], int] = {}
        self.dtypes: list[np.dtype] = []

    def number(self, function: str, name: str) -> int:
        key = (function, name)
        if key not in self.numbers:
            declared = self.program.functions[function].register_types.get(name.rstrip("0123456789"))
            if declared not in TYPES:
                raise PtxError(f"{name} is not declared, or as {declared}")
            self.numbers[key] = len(self.dtypes)
            self.dtypes.append(storage(TYPES[declared]))
        return self.numbers[key]


class Operands:
    """The operands of one instruction."""

    def __init__(self, instruction: Instruction, registers: RegisterFile) -> None:
        self.instruction = instruction
        self.registers = registers

    def __len__(self) -> int:
        return len(self.instruction.operands)

    def __getitem__(self, position: int) -> str:
        return self.instruction.operands[position]

    def list(self, position: int) -> list[str]:
        """The members of {a, b}; an operand without braces is its own only member."""
        return [member.strip() for member in self[position].strip("{}").split(",")]

    def read(self, text: str, type_name: str) -> Read:
        """The low bytes of a register, or a constant, as values of this type."""
        dtype = TYPES[type_name]
        if text in SPECIAL_REGISTERS:
            special = SPECIAL_REGISTERS[text]
            return lambda machine, lanes: special(machine, lanes).astype(dtype)
        if text.startswith("%"):
            number = self.registers.number(self.instruction.function, text)
            kept = self.registers.dtypes[number]
            if kept == storage(dtype):
                return lambda machine, lanes: machine.register(number)[lanes].view(dtype)
            if PREDICATE in (kept, dtype) or kept.itemsize < dtype.itemsize:
                raise PtxError(f"{text} read as .{type_name}")
            return lambda machine, lanes: machine.register(number)[lanes].astype(storage(dtype)).view(dtype)
        constant = self.constant(text, dtype)
        return lambda machine, lanes: constant.repeat(len(lanes))

    def constant(self, text: str, dtype: np.dtype) -> np.ndarray:
        """A number, the bits of a float (0f..., 0d...), or the address of a variable in its own space."""
        if text in self.instruction.variables:
            return np.array([self.instruction.variables[text].offset], dtype)
        if floating := re.fullmatch(r"0([fd])([0-9A-Fa-f]{8}|[0-9A-Fa-f]{16})", text):
            bits = np.array([int(floating[2], 16)], "u4" if floating[1] == "f" else "u8")
            if bits.itemsize != dtype.itemsize:
                raise PtxError(f"{text} is not {dtype.itemsize} bytes wide")
            return bits.view(dtype)
        if not re.fullmatch(r"-?(0x[0-9a-fA-F]+|[0-9]+)U?", text) or dtype.kind == "f":
            raise PtxError(f"operand {text} is not known")
        value = int(text.rstrip("U"), 0)
        if dtype == PREDICATE:
            return np.array([bool(value)])
        return np.array([value % 2 ** (8 * dtype.itemsize)], storage(dtype)).view(dtype)

    def write(self, text: str, type_name: str) -> Write:
        """Sets a register to values of this type, sign- or zero-extended where it is wider. "_" takes nothing."""
        if text == "_":
            return lambda machine, lanes, values: None
        dtype = TYPES[type_name]
        number = self.registers.number(self.instruction.function, text)
        kept = self.registers.dtypes[number]
        if (kept == PREDICATE) != (dtype == PREDICATE) or kept.itemsize < dtype.itemsize:
            raise PtxError(f"{text} set to a .{type_name}")

        def write(machine: Machine, lanes: Lanes, values: np.ndarray) -> None:
            values = np.asarray(values)
            if values.dtype != dtype:
                raise PtxError(f"{values.dtype} set as .{type_name}")  # a mistake in instructions.py
            target = machine.register_for_writing(number)
            target[lanes] = values.view(kept) if kept.itemsize == dtype.itemsize else values.astype(kept)

        return write

    def address(self, text: str) -> tuple[str | None, Read]:
        """Of [register + offset] or [variable + offset]; the variable's space, if it is one."""
        found = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
        if found is None:
            raise PtxError(f"not an address: {text}")
        base, offset = self.read(found[1], self.address_type(found[1])), np.uint64(int(found[2] or 0) % 2**64)
        variable = self.instruction.variables.get(found[1])
        return variable.space if variable else None, lambda machine, lanes: base(machine, lanes) + offset

    def address_type(self, base: str) -> str:
        """Shared memory is small enough for registers of 32 bits."""
        if not base.startswith("%"):
            return "u64"
        return f"u{8 * self.registers.dtypes[self.registers.number(self.instruction.function, base)].itemsize}"

"""An instruction on its way from text to something that can be executed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from ptx_on_cpu.operands import TYPES, Lanes, Operands, Read, RegisterFile
from ptx_on_cpu.program import Instruction, Program, PtxError

if TYPE_CHECKING:
    from ptx_on_cpu.machine import Machine

Execute: TypeAlias = Callable[["Machine", Lanes], None]
Operation: TypeAlias = Callable[..., Any]  # arrays to an array, element by element
Decode: TypeAlias = Callable[["Use"], Execute]


class Use:
    """One instruction while its meaning is looked up; modifiers are taken off as they are understood."""

    def __init__(self, program: Program, at: int, registers: RegisterFile) -> None:
        self.program = program
        self.at = at
        self.instruction: Instruction = program.instructions[at]
        self.modifiers = list(self.instruction.modifiers)
        self.operands = Operands(self.instruction, registers)

    def take(self, *names: str) -> str | None:
        """The first of these modifiers that is there."""
        found = next((name for name in self.modifiers if name in names), None)
        if found:
            self.modifiers.remove(found)
        return found

    def need(self, *names: str) -> str:
        found = self.take(*names)
        if found is None:
            raise PtxError(f"none of {names}")
        return found

    def type(self) -> str:
        """The type, which is the last modifier."""
        name = self.modifiers.pop()
        if name not in TYPES:
            raise PtxError(f"type {name} is not known here")
        return name

    def reads(self, *types: str) -> list[Read]:
        """The operands after the first, which have to be as many as these types."""
        if len(self.operands) != len(types) + 1:
            raise PtxError(f"{len(self.operands)} operands")
        return [self.operands.read(self.operands[i], name) for i, name in enumerate(types, 1)]


def compute(use: Use, result: str, sources: tuple[str, ...], operation: Operation) -> Execute:
    """First operand = operation(the others)."""
    write = use.operands.write(use.operands[0], result)
    reads = use.reads(*sources)
    dtype = TYPES[result]

    def execute(machine: Machine, lanes: Lanes) -> None:
        values = operation(*[read(machine, lanes) for read in reads])
        write(machine, lanes, values.astype(dtype, copy=False))

    return execute

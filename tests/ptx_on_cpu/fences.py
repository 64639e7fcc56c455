"""What the text of a kernel proves about the order in which it writes a row and the row's stamp.

Where the kernel runs on the CPU a fence has no effect, so whether it is there, on every path and of system scope (the
reader is the host), is read from the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

from ptx_on_cpu.operands import TYPES
from ptx_on_cpu.program import Function, Instruction, Program, PtxError

ADDRESSES = ("mov", "cvta", "add", "sub", "mad", "selp")  # opcodes that make one address of another


class RowState(Enum):
    NOT_WRITTEN = auto()
    WRITTEN = auto()  # and nothing orders that before what comes next
    FENCED = auto()


def check_stamps_follow_fences(program: Program, kernel: str, rows: int) -> tuple[int, int]:
    """Every path to the store of a stamp writes its row, then has a fence of system scope. Raises PtxError if not.

    `rows` says which parameter of the kernel these are; the volatile stores there are those of stamps. Returns how many
    bytes of rows and how many stamps the program stores: where either is 0, nothing was proved.
    """
    function = program.functions[kernel]
    stores = _stores_to(program, function, function.parameters[rows].name)
    stamps = {at for at in stores if "volatile" in program.instructions[at].modifiers}

    states: dict[int, set[RowState]] = {at: set() for at in _body(program, function)}
    unvisited = [(function.first, RowState.NOT_WRITTEN)]
    while unvisited:
        at, state = unvisited.pop()
        if state in states[at]:
            continue
        states[at].add(state)
        instruction = program.instructions[at]
        if at in stamps:
            if state is not RowState.FENCED:
                raise PtxError(f"{kernel}: a stamp where its row may be {state.name}: {instruction.text}")
            state = RowState.NOT_WRITTEN
        elif at in stores:
            state = RowState.WRITTEN
        elif _is_system_fence(instruction) and state is RowState.WRITTEN:
            state = RowState.FENCED
        unvisited += [(successor, state) for successor in _successors(program, at)]
    return sum(_stored_bytes(program.instructions[at]) for at in stores - stamps), len(stamps)


def _stored_bytes(store: Instruction) -> int:
    return len(store.operands[1].split(",")) * TYPES[store.modifiers[-1]].itemsize


def _is_system_fence(instruction: Instruction) -> bool:
    return instruction.opcode in ("membar", "fence") and "sys" in instruction.modifiers and instruction.guard is None


def _body(program: Program, function: Function) -> range:
    firsts = [*sorted(f.first for f in program.functions.values()), len(program.instructions)]
    return range(function.first, firsts[firsts.index(function.first) + 1])


def _successors(program: Program, at: int) -> Iterator[int]:
    instruction = program.instructions[at]
    if instruction.opcode == "bra":
        yield program.target(instruction)
    if instruction.opcode not in ("bra", "ret", "exit") or instruction.guard is not None:
        yield at + 1


def _stores_to(program: Program, function: Function, pointer: str) -> set[int]:
    """Stores whose address is made from a pointer that is a parameter."""
    addresses = _made_of(program, function, pointer)
    return {
        at
        for at in _body(program, function)
        if program.instructions[at].opcode == "st"
        and program.instructions[at].operands[0].strip("[]").split("+")[0] in addresses
    }


def _made_of(program: Program, function: Function, parameter: str) -> set[str]:
    """Registers that hold a parameter, or an address made of it."""
    found: set[str] = set()
    while True:
        before = len(found)
        for at in _body(program, function):
            instruction = program.instructions[at]
            sources = instruction.operands[1:]
            is_load = instruction.opcode == "ld" and sources[0] in (f"[{parameter}]", f"[{parameter}+0]")
            if is_load or (instruction.opcode in ADDRESSES and found & set(sources)):
                found.add(instruction.operands[0])
        if len(found) == before:
            return found

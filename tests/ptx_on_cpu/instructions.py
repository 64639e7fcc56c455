"""All instructions that are known, by NVIDIA's "PTX ISA". Others, and other forms of these, are an error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptx_on_cpu.accesses import atomic, fence, load, store
from ptx_on_cpu.arithmetic import (
    arithmetic,
    bitwise,
    convert,
    convert_address,
    count_bits,
    divide,
    extract_bits,
    extremum,
    funnel_shift,
    insert_bits,
    move,
    multiply,
    multiply_add,
    permute_bytes,
    select,
    set_predicate,
    shift,
    square_root,
)
from ptx_on_cpu.control import barrier, branch, call, leave, shuffle, vote
from ptx_on_cpu.decoding import Decode, Execute, Use
from ptx_on_cpu.operands import Read, RegisterFile
from ptx_on_cpu.program import Program, PtxError

PARTING = {"bra", "call", "ret", "exit", "bar", "barrier", "shfl", "vote"}
OPCODES: dict[str, Decode] = {
    "add": arithmetic(np.add, 2),
    "sub": arithmetic(np.subtract, 2),
    "neg": arithmetic(np.negative, 1),
    "abs": arithmetic(np.abs, 1),
    "mul": multiply,
    "mad": multiply_add,
    "div": divide(remainder=False),
    "rem": divide(remainder=True),
    "min": extremum(np.minimum),
    "max": extremum(np.maximum),
    "sqrt": square_root,
    "setp": set_predicate,
    "selp": select,
    "and": bitwise(np.bitwise_and, 2),
    "or": bitwise(np.bitwise_or, 2),
    "xor": bitwise(np.bitwise_xor, 2),
    "not": bitwise(np.invert, 1),
    "shl": shift(np.left_shift),
    "shr": shift(np.right_shift),
    "shf": funnel_shift,
    "popc": count_bits,
    "prmt": permute_bytes,
    "bfi": insert_bits,
    "bfe": extract_bits,
    "mov": move,
    "cvt": convert,
    "cvta": convert_address,
    "ld": load,
    "st": store,
    "atom": atomic(returns=True),
    "red": atomic(returns=False),
    "membar": fence,
    "fence": fence,
    "bra": branch,
    "call": call,
    "ret": leave,
    "exit": leave,
    "bar": barrier,
    "barrier": barrier,
    "shfl": shuffle,
    "vote": vote,
}


@dataclass(frozen=True)
class Step:
    execute: Execute
    guard: Read | None
    guard_value: bool
    parts: bool  # threads may part, meet or end here


class Code:
    """The steps of a program, one for each instruction."""

    def __init__(self, program: Program) -> None:
        self.registers = RegisterFile(program)
        self.steps = [self.step(program, at) for at in range(len(program.instructions))]

    def step(self, program: Program, at: int) -> Step:
        instruction = program.instructions[at]
        try:
            use = Use(program, at, self.registers)
            if instruction.opcode not in OPCODES:
                raise PtxError(f"opcode {instruction.opcode} is not known")
            execute = OPCODES[instruction.opcode](use)
            if use.modifiers:
                raise PtxError(f"modifiers {use.modifiers} are not known here")
            guard = use.operands.read(instruction.guard, "pred") if instruction.guard else None
        except (PtxError, ValueError, IndexError, KeyError) as error:
            raise PtxError(f"{error} in: {instruction.text}") from error
        return Step(execute, guard, instruction.guard_value, instruction.opcode in PARTING)

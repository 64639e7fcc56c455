"""Instructions where threads part, meet or end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ptx_on_cpu.decoding import Execute, Use
from ptx_on_cpu.memory import Fault
from ptx_on_cpu.operands import Lanes
from ptx_on_cpu.program import PtxError, Variable, split_operands

if TYPE_CHECKING:
    from ptx_on_cpu.machine import Machine

ALL_LANES = 0xFFFFFFFF


def branch(use: Use) -> Execute:
    use.take("uni")
    target = use.program.target(use.instruction)
    return lambda machine, lanes: machine.jump(lanes, target)


def call_parts(operands: tuple[str, ...]) -> tuple[list[str], str, list[str]]:
    """Names of the results, the function and the arguments of a call."""
    has_results = operands[0].startswith("(")
    results = list(split_operands(operands[0].strip("() "))) if has_results else []
    rest = operands[1:] if has_results else operands
    arguments = list(split_operands(rest[1].strip("() "))) if len(rest) > 1 else []
    return results, rest[0], arguments


def copy_variables(machine: Machine, lanes: Lanes, sources: list[Variable], targets: list[Variable]) -> None:
    bank = machine.banks["argument"]
    for source, target in zip(sources, targets, strict=True):
        if source.size != target.size:
            raise Fault(f"{source.name} and {target.name} differ in size")
        for values in (bank.content, bank.written):
            from_, to = (
                slice(source.offset, source.offset + source.size),
                slice(target.offset, target.offset + target.size),
            )
            values[lanes, to] = values[lanes, from_]


def call(use: Use) -> Execute:
    use.take("uni")
    _, name, arguments = call_parts(use.instruction.operands)
    function = use.program.functions[name]
    sources = [use.instruction.variables[argument] for argument in arguments]

    def execute(machine: Machine, lanes: Lanes) -> None:
        copy_variables(machine, lanes, sources, function.parameters)
        machine.call(lanes, use.at, function.first)

    return execute


def leave(use: Use) -> Execute:
    if use.instruction.opcode == "exit" and not use.program.functions[use.instruction.function].is_kernel:
        raise PtxError("a function that ends its thread")
    function = use.program.functions[use.instruction.function]

    def execute(machine: Machine, lanes: Lanes) -> None:
        for at, returned in machine.leave(lanes).items():
            caller = use.program.instructions[at]
            results, _, _ = call_parts(caller.operands)
            copy_variables(machine, returned, function.results, [caller.variables[name] for name in results])

    return execute


def barrier(use: Use) -> Execute:
    if use.take("warp"):
        use.need("sync")
        return for_whole_warps(use, use.operands[0], lambda machine, warps: None)
    use.need("sync")
    use.take("aligned")
    if use.instruction.operands != ("0",):
        raise PtxError("a barrier other than of all threads")
    return lambda machine, lanes: machine.meet_block(lanes, use.at)


def for_whole_warps(use: Use, mask_text: str, then: Callable[[Machine, np.ndarray], None]) -> Execute:
    mask = use.operands.read(mask_text, "b32")

    def execute(machine: Machine, lanes: Lanes) -> None:
        if (mask(machine, lanes) != ALL_LANES).any():
            raise Fault("a mask other than of all lanes")
        machine.meet_warp(lanes, use.at, then)

    return execute


def shuffle(use: Use) -> Execute:
    """Each lane gets the value of the lane whose number differs in the bits of the second operand."""
    use.need("b32")
    use.need("sync")
    use.need("bfly")
    target, _, in_range = use.operands[0].partition("|")
    write = use.operands.write(target, "b32")
    write_in_range = use.operands.write(in_range or "_", "pred")
    value, distance, clamp = (use.operands.read(use.operands[i], "b32") for i in (1, 2, 3))

    def exchange(machine: Machine, warps: np.ndarray) -> None:
        lanes = warps.reshape(-1)
        if (clamp(machine, lanes) != 31).any() or (distance(machine, lanes) > 31).any():
            raise Fault("a shuffle in a part of a warp")
        sources = lanes - lanes % 32 + (lanes % 32 ^ distance(machine, lanes).astype(np.int64))
        write(machine, lanes, value(machine, sources))
        write_in_range(machine, lanes, np.ones(len(lanes), bool))

    return for_whole_warps(use, use.operands[4], exchange)


def vote(use: Use) -> Execute:
    use.need("sync")
    name = use.type()
    mode = use.need("any", "all", "ballot")
    if (mode == "ballot") != (name == "b32"):
        raise PtxError(f"vote.{mode}.{name}")
    write = use.operands.write(use.operands[0], name)
    read = use.operands.read(use.operands[1], "pred")

    def count(machine: Machine, warps: np.ndarray) -> None:
        votes = read(machine, warps.reshape(-1)).reshape(warps.shape)
        if mode == "ballot":
            result: np.ndarray = np.packbits(votes, axis=1, bitorder="little").view(np.uint32)[:, 0]
        else:
            result = np.asarray(votes.any(axis=1) if mode == "any" else votes.all(axis=1))
        write(machine, warps.reshape(-1), np.repeat(result, warps.shape[1]))

    return for_whole_warps(use, use.operands[2], count)

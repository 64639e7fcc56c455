"""The threads of a grid, and which of them run next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np

from ptx_on_cpu.instructions import Code
from ptx_on_cpu.memory import Bank, Fault, GlobalMemory, Region
from ptx_on_cpu.program import Program, parse

WARP = 32
NOT_WAITING = -1
DEEPEST_CALL = 8
MOST_TURNS = 500_000  # a grid that takes more does not end: two minutes


class Schedule(Protocol):
    def __call__(self, runnable: np.ndarray) -> np.ndarray:
        """Which threads may run now, of those that can: at least one of them."""


def lockstep(runnable: np.ndarray) -> np.ndarray:
    """All that can: threads of all blocks go through the program together, as closely as they can."""
    return runnable


class RandomWarps:
    """One warp at a time, the others where they are: what only a barrier orders comes in any order.

    From one turn to hundreds, any magnitude as often as another: a warp may stop anywhere, and then be left far behind.
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.warp = 0
        self.turns = 0

    def __call__(self, runnable: np.ndarray) -> np.ndarray:
        of_warp = runnable.reshape(-1, WARP)
        self.turns -= 1
        if self.turns < 0 or not of_warp[self.warp].any():
            self.warp = int(self.random.choice(np.flatnonzero(of_warp.any(axis=1))))
            self.turns = 2 ** int(self.random.integers(10))
        chosen = np.zeros_like(of_warp)
        chosen[self.warp] = of_warp[self.warp]
        return chosen.reshape(-1)


class Module:
    """A program that is ready to run."""

    def __init__(self, text: str) -> None:
        self.program: Program = parse(text)
        self.code = Code(self.program)


def groups_of(lanes: np.ndarray, threads: int, size: int) -> np.ndarray:
    """All threads of the warps or blocks that these lanes are of: [groups, size]."""
    touched = np.zeros(threads // size, bool)
    touched[lanes // size] = True
    return np.arange(threads).reshape(-1, size)[touched]


class Machine:
    """One launch. Threads at the same instruction execute it together, those that are furthest behind first."""

    def __init__(self, module: Module, grid_size: int, block_size: int, memory: Iterable[Region]) -> None:
        if block_size % WARP:
            raise ValueError("blocks are of whole warps here")
        self.module = module
        self.grid_size: int = grid_size
        self.block_size: int = block_size
        self.threads = threads = np.arange(grid_size * block_size)
        self.registers: list[np.ndarray | None] = [None] * len(module.code.registers.dtypes)
        self.memory = GlobalMemory(memory)
        self.banks = {
            "shared": Bank.make(module.program, "shared", threads // block_size),
            "local": Bank.make(module.program, "local", threads),
            "argument": Bank.make(module.program, "argument", threads),
            "parameter": Bank.make(module.program, "parameter", np.zeros_like(threads)),
        }
        self.next = np.zeros(len(threads), np.int64)  # the instruction that each thread executes next
        self.running = np.ones(len(threads), bool)
        self.waiting_at = np.full(len(threads), NOT_WAITING)
        self.calls = np.zeros((DEEPEST_CALL, len(threads)), np.int64)
        self.depth = np.zeros(len(threads), np.int64)

    def register(self, number: int) -> np.ndarray:
        values = self.registers[number]
        if values is None:
            raise Fault("a register is read before it was set")
        return values

    def register_for_writing(self, number: int) -> np.ndarray:
        values = self.registers[number]
        if values is None:
            dtype = self.module.code.registers.dtypes[number]
            values = self.registers[number] = np.zeros(len(self.threads), dtype)
        return values

    def launch(self, kernel: str, arguments: list[bytes], schedule: Schedule = lockstep) -> None:
        """Runs the grid to its end. Raises Fault, with the instruction."""
        function = self.module.program.functions[kernel]
        parameters = self.banks["parameter"]
        if [variable.size for variable in function.parameters] != [len(argument) for argument in arguments]:
            raise Fault(f"arguments of other sizes than {kernel} has")
        for variable, argument in zip(function.parameters, arguments, strict=True):
            place = slice(variable.offset, variable.offset + variable.size)
            parameters.content[0, place] = np.frombuffer(argument, np.uint8)
            parameters.written[0, place] = True
        parameters.read_only = True
        self.next[:] = function.first
        turns = 0
        with np.errstate(all="ignore"):
            while self.running.any():
                turns += 1
                if turns > MOST_TURNS:
                    raise Fault(f"{kernel} does not end")
                self.turn(schedule)

    def turn(self, schedule: Schedule) -> None:
        """Lets the threads that are furthest behind run until they may part or meet others."""
        runnable = self.running & (self.waiting_at == NOT_WAITING)
        if not runnable.any():
            places = {self.module.program.instructions[at].text for at in self.waiting_at[self.running]}
            raise Fault("threads wait for others that never come: " + ", ".join(sorted(places)))
        chosen = np.flatnonzero(schedule(runnable))
        places_next = self.next[chosen]
        at = int(places_next.min())
        ahead = places_next[places_next > at]
        stop = int(ahead.min()) if len(ahead) else len(self.module.code.steps)
        self.run(chosen[places_next == at], at, stop)

    def run(self, lanes: np.ndarray, at: int, stop: int) -> None:
        steps = self.module.code.steps
        while at < stop:
            step = steps[at]
            try:
                active = lanes
                if step.guard is not None:
                    active = lanes[step.guard(self, lanes) == step.guard_value]
                if step.parts:
                    self.next[lanes] = at + 1
                    if len(active):
                        step.execute(self, active)
                    return
                if len(active):
                    step.execute(self, active)
            except Fault as fault:
                raise Fault(f"{fault} in: {self.module.program.instructions[at].text}") from None
            at += 1
        self.next[lanes] = at

    # What the instructions that make threads part or meet do with them

    def jump(self, lanes: np.ndarray, target: int) -> None:
        self.next[lanes] = target

    def call(self, lanes: np.ndarray, at: int, target: int) -> None:
        if (self.depth[lanes] >= DEEPEST_CALL).any():
            raise Fault("calls that are nested too deep")
        self.calls[self.depth[lanes], lanes] = at
        self.depth[lanes] += 1
        self.next[lanes] = target

    def leave(self, lanes: np.ndarray) -> Mapping[int, np.ndarray]:
        """Returns from a call, or ends a thread that is in none; the lanes of each call that was returned from."""
        outermost = self.depth[lanes] == 0
        self.running[lanes[outermost]] = False
        inner = lanes[~outermost]
        self.depth[inner] -= 1
        calls = self.calls[self.depth[inner], inner]
        self.next[inner] = calls + 1
        return {int(at): inner[calls == at] for at in np.unique(calls)}

    def meet_warp(self, lanes: np.ndarray, at: int, then: Callable[[Machine, np.ndarray], None]) -> None:
        """Waits for all lanes of the warp at this instruction; `then` gets those that are complete: [warps, 32]."""
        self.waiting_at[lanes] = at
        members = groups_of(lanes, len(self.threads), WARP)
        complete = members[(self.waiting_at[members] == at).all(axis=1)]
        if len(complete):
            self.waiting_at[complete] = NOT_WAITING
            then(self, complete)

    def meet_block(self, lanes: np.ndarray, at: int) -> None:
        """Waits for all threads of the block at this instruction."""
        self.waiting_at[lanes] = at
        members = groups_of(lanes, len(self.threads), self.block_size)
        complete = members[(self.waiting_at[members] == at).all(axis=1)]
        self.waiting_at[complete] = NOT_WAITING

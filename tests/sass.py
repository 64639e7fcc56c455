"""What the machine code of csrc/cuda does in its hot loops, read from nvdisasm's listing.

Run as a program it compiles for every architecture that is shipped and prints the table of csrc/cuda/README.md.
"""

from __future__ import annotations

import heapq
import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

CSRC = Path(__file__).parent.parent / "csrc"
PROBE = Path(__file__).parent / "sass_probe.cu"
sys.path.insert(0, str(CSRC.parent))

from compile_once import KEPT, compile_once  # noqa: E402

from overflowstat.building.architectures import nvcc_architecture_flags  # noqa: E402
from overflowstat.building.cuda_toolkit import CudaToolkit, find_cuda_toolkit  # noqa: E402

ARCHITECTURES = ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0")


def find_nvdisasm(cuda: CudaToolkit) -> str | None:
    """The toolkit's, the one on PATH, or the one inside the triton wheel, which torch's CUDA wheels bring along."""
    spec = importlib.util.find_spec("triton")
    wheel = (
        [Path(folder) / "backends" / "nvidia" / "bin" for folder in spec.submodule_search_locations or ()]
        if spec
        else []
    )
    for folder in (Path(cuda.home) / "bin", None, *wheel):
        if found := shutil.which("nvdisasm", path=None if folder is None else str(folder)):
            return found
    return None


@dataclass
class Instruction:
    text: str  # without its guard
    guarded: bool
    target: str | None = None  # label that it may go to

    @property
    def opcode(self) -> str:
        return self.text.split(None, 1)[0]

    @property
    def is_vector_load(self) -> bool:
        return bool(re.match(r"LDG\S*\.128", self.text))

    @property
    def is_other_load(self) -> bool:
        return bool(re.match(r"(LDG?|LDL)\b", self.text)) and not self.is_vector_load

    @property
    def reads(self) -> set[int]:
        """Registers among its sources; a wide one by its first."""
        _, _, sources = self.text.partition(",")
        return {int(number) for number in re.findall(r"\bR(\d+)\b", sources)}

    @property
    def is_call(self) -> bool:
        return self.opcode.startswith("CALL") and self.target is None

    @property
    def falls_through(self) -> bool:
        return self.guarded or self.is_call or not re.match(r"(BRA|BRXU?|EXIT|RET|JMP|CALL)\b", self.text)


@dataclass
class Kernel:
    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    @property
    def touches_local_memory(self) -> bool:
        return any(re.match(r"(LDL|STL)\b", instruction.text) for instruction in self.instructions)

    def hot_loops(self) -> list[HotLoop]:
        """The loops that load vectors. Each is the shortest way round, since only good data goes it."""
        shortest: dict[int, list[Instruction]] = {}
        for at, instruction in enumerate(self.instructions):
            head = self.labels.get(instruction.target or "")
            if head is None or head > at:
                continue
            way = [self.instructions[i] for i in self._shortest_way(head, at)]
            if any(step.is_vector_load for step in way) and (head not in shortest or len(way) < len(shortest[head])):
                shortest[head] = way
        return [HotLoop(way) for _, way in sorted(shortest.items())]

    def _shortest_way(self, head: int, last: int) -> list[int]:
        before = {head: head}
        queue = [(1, head)]
        while queue:
            length, at = heapq.heappop(queue)
            if at == last:
                break
            instruction = self.instructions[at]
            onward = [at + 1] if instruction.falls_through else []
            if instruction.target in self.labels:
                onward.append(self.labels[instruction.target])
            for to in onward:
                if head <= to <= last and to not in before:
                    before[to] = at
                    heapq.heappush(queue, (length + 1, to))
        if last not in before:
            return []
        way = [last]
        while way[-1] != head:
            way.append(before[way[-1]])
        return way[::-1]


@dataclass
class HotLoop:
    way: list[Instruction]

    @property
    def vectors(self) -> int:
        return sum(step.is_vector_load for step in self.way)

    @property
    def instructions_per_vector(self) -> float:
        return len(self.way) / self.vectors

    @property
    def calls(self) -> int:
        return sum(step.is_call for step in self.way)

    @property
    def other_loads(self) -> list[str]:
        return [step.text for step in self.way if step.is_other_load]

    @property
    def in_flight(self) -> int:
        """Vector loads issued before any of them is used."""
        loaded: set[int] = set()
        issued = 0
        for step in self.way:
            if step.reads & loaded:
                break
            if step.is_vector_load:
                issued += 1
                first = int(re.findall(r"\bR(\d+),", step.text)[0])
                loaded |= set(range(first, first + 4))
        return issued


def parse(listing: str) -> list[Kernel]:
    """The functions of a listing by `nvdisasm -c`. A CALL to a label inside a function is but a far branch."""
    kernels: list[Kernel] = []
    for line in listing.splitlines():
        if found := re.match(r"\.text\.(\S+):", line):
            kernels.append(Kernel(found[1]))
        elif found := re.match(r"(\.L_\w+):", line):
            kernels[-1].labels[found[1]] = len(kernels[-1].instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?(.*?)\s*;", line):
            branch = re.search(r"^(?:BRA|CALL)\b.*`\((\.L_\w+)\)", found[2])
            guarded = found[1] is not None or bool(re.match(r"BRA(\.\w+)* !?U?P\d", found[2]))
            kernels[-1].instructions.append(Instruction(found[2], guarded, branch[1] if branch else None))
    return kernels


@dataclass
class Compiled:
    """One architecture's machine code: each kernel, and for each format the probe that has its loop alone."""

    kernels: dict[str, Kernel]
    probes: dict[str, Kernel]
    registers: dict[str, int]
    spilled_bytes: dict[str, int]
    shared_bytes: dict[str, int]


def most_registers(kernel: str) -> int:
    """Of a thread, so that of the 65536 of a multiprocessor there are enough for four blocks of 256, or for three."""
    return 80 if "dense_detail" in kernel else 64


def build(architecture: str, cuda: CudaToolkit, csrc: Path = CSRC, folder: Path = KEPT) -> tuple[Path, str]:
    """Compiles as setup.py does, both sides, for one architecture, with all warnings: machine code, compiler's words.

    Raises with the compiler's output.
    """
    command = [cuda.nvcc, "-std=c++17", "-O3", "-fmad=false", "-Xcompiler=-Wall,-Wextra", "-Xptxas=-v", "-c", "--keep"]
    command += [*nvcc_architecture_flags((architecture,)), "-I", str(csrc), str(PROBE)]
    sources = [*csrc.rglob("*.h"), *csrc.rglob("*.cu*"), PROBE]
    made = compile_once(command, "probe.o", sources, folder).parent
    (cubin,) = made.glob("*.cubin")
    return cubin, (made / "log").read_text()


def compile_for(
    architecture: str, cuda: CudaToolkit, nvdisasm: str, csrc: Path = CSRC, folder: Path = KEPT
) -> Compiled:
    cubin, log = build(architecture, cuda, csrc, folder)
    listing = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    formats = re.findall(r"^  k(\w+),$", (csrc / "number_format.h").read_text(), re.M)
    compiled = Compiled({}, {}, {}, {}, {})
    for kernel in parse(listing):
        if probe := re.search(r"probeILNS_6FormatE(\d+)E", kernel.name):
            compiled.probes[formats[int(probe[1])]] = kernel
        elif found := re.search(r"(dense|strided)_kernel", kernel.name):
            compiled.kernels[found[0]] = kernel
    compiled.probes = {name: compiled.probes[name] for name in formats if name in compiled.probes}
    for name, kernel in compiled.kernels.items():
        own = re.search(
            rf"Compiling entry function '{kernel.name}'.*?Used (\d+) registers.*?(\d+) bytes smem", log, re.S
        )
        assert own is not None, log
        compiled.registers[name] = int(own[1])
        compiled.shared_bytes[name] = int(own[2])
        compiled.spilled_bytes[name] = sum(map(int, re.findall(r"(\d+) bytes spill", own[0])))
    return compiled


def print_table() -> None:
    cuda, problem = find_cuda_toolkit()
    if cuda is None:
        sys.exit(problem)
    nvdisasm = find_nvdisasm(cuda)
    if nvdisasm is None:
        sys.exit("nvdisasm was not found")
    compiled = {arch: compile_for(arch, cuda, nvdisasm) for arch in ARCHITECTURES if arch in cuda.architectures}
    rows: dict[str, list[str]] = {}
    for name in ("dense_kernel", "strided_kernel"):
        for what, label in (("registers", "registers"), ("spilled_bytes", "bytes spilled")):
            rows[f"{label}, {name}"] = [str(getattr(c, what)[name]) for c in compiled.values()]
    rows["hot loops, dense_kernel"] = [str(len(c.kernels["dense_kernel"].hot_loops())) for c in compiled.values()]
    for format in next(iter(compiled.values())).probes:
        loops = [c.probes[format].hot_loops()[0] for c in compiled.values()]
        calls = f" + {loops[0].calls} calls" if loops[0].calls else ""
        label = (
            f"{format}{calls}, {'/'.join(sorted({f'{loop.in_flight} of {loop.vectors}' for loop in loops}))} in flight"
        )
        rows[label] = [f"{loop.instructions_per_vector:.1f}" for loop in loops]
    print("| |", " | ".join(compiled), "|")
    print("|---" * (len(compiled) + 1) + "|")
    for label, cells in rows.items():
        print("|", label, "|", " | ".join(cells), "|")


if __name__ == "__main__":
    print_table()

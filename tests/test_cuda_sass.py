"""The machine code: what makes the pass wait for memory alone must be there for every architecture that is shipped.

No GPU is needed to read it, and none has run it here; why these figures suffice is in csrc/cuda/README.md.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sass import ARCHITECTURES, CSRC, Compiled, HotLoop, compile_for, find_nvdisasm, most_registers, parse

from overflowstat.building.cuda_toolkit import find_cuda_toolkit

CUDA, PROBLEM = find_cuda_toolkit()
NVDISASM = find_nvdisasm(CUDA) if CUDA else None

pytestmark = [pytest.mark.slow, pytest.mark.any_torch]
needs_compiler = pytest.mark.skipif(CUDA is None, reason=f"nvcc is needed, and {PROBLEM}")
needs_disassembler = pytest.mark.skipif(
    NVDISASM is None, reason="nvdisasm is in neither the toolkit nor PATH nor an installed triton wheel"
)

# Instructions that can be issued for a thread while 16 bytes arrive for it: A100, H200, B200, whose memory is fastest
# for their multiprocessors; cards of the other architectures have more time.
ISSUED_WHILE_A_VECTOR_ARRIVES = {"7.5": 153, "8.0": 153, "8.6": 153, "9.0": 99, "10.0": 70, "12.0": 153}
# Integer instructions have half of the lanes; loads, branches and some moves go elsewhere.
INTEGER_SHARE = 0.55

# Instructions for 16 bytes, a tenth above the most that nvcc 13.0 needs: below 9.0, and from there on, where one
# compares both halves of a word.
MOST_INSTRUCTIONS = {
    "Float64": (25, 25),
    "Float32": (18, 17),
    "Float16": (36, 19),
    "Bfloat16": (36, 19),
    "Float8E4m3fn": (58, 32),
    "Float8E5m2": (58, 32),
    "Float8E4m3fnuz": (71, 41),
    "Float8E5m2fnuz": (71, 41),
    "Float8E8m0fnu": (53, 28),
    "Int64": (33, 33),
    "Int32": (21, 19),
    "Int16": (47, 34),
    "Int8": (74, 47),
    "Uint64": (21, 21),
    "Uint32": (12, 11),
    "Uint16": (25, 12),
    "Uint8": (52, 25),
    "Bool": (74, 47),
}
# Bound by the square root in double precision that they call: one vector in flight, and no promise.
COMPLEX = {"Complex128", "Complex64", "Complex32"}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(request: pytest.FixtureRequest) -> tuple[str, Compiled]:
    assert CUDA is not None and NVDISASM is not None
    if request.param not in CUDA.architectures:
        pytest.skip(f"nvcc {CUDA.version} does not compile for {request.param}")
    return request.param, compile_for(request.param, CUDA, NVDISASM)


def loop_faults(loop: HotLoop, vectors: int) -> list[str]:
    faults = [f"a load that is not of 16 bytes: {text}" for text in loop.other_loads]
    if loop.vectors != vectors or loop.in_flight != vectors:
        faults.append(f"{loop.in_flight} of {loop.vectors} loads are on their way before the first is used")
    return faults


def faults(compiled: Compiled) -> list[str]:
    """What is wrong with the kernels whatever the format: spills, too many registers, loads one after the other."""
    found = []
    for name, kernel in compiled.kernels.items():
        if kernel.touches_local_memory or compiled.spilled_bytes[name]:
            found.append(f"{name} spills")
        if compiled.registers[name] > most_registers(name):
            found.append(f"{name} has {compiled.registers[name]} registers")
    loops = compiled.kernels["dense_kernel"].hot_loops()
    real = [loop for loop in loops if not loop.calls]
    if (len(real), len(loops)) != (len(MOST_INSTRUCTIONS), len(MOST_INSTRUCTIONS) + len(COMPLEX)):
        found.append(f"{len(loops)} loops over vectors, {len(real)} of them without a call")
    for loop in loops:
        found += loop_faults(loop, 1 if loop.calls else 4)
    return found


@needs_compiler
@needs_disassembler
def test_loads_are_of_16_bytes_and_all_on_their_way_before_the_first_is_used(compiled: tuple[str, Compiled]) -> None:
    assert faults(compiled[1]) == []


@needs_compiler
@needs_disassembler
def test_each_format_stays_below_what_can_be_issued_while_memory_delivers(compiled: tuple[str, Compiled]) -> None:
    architecture, code = compiled
    assert set(code.probes) == MOST_INSTRUCTIONS.keys() | COMPLEX
    for name, most in MOST_INSTRUCTIONS.items():
        (loop,) = code.probes[name].hot_loops()
        assert loop_faults(loop, 4) == [], name
        assert loop.instructions_per_vector <= most[float(architecture) >= 9], name
        assert loop.instructions_per_vector <= ISSUED_WHILE_A_VECTOR_ARRIVES[architecture] * INTEGER_SHARE, name


BROKEN = {
    "vectors loaded by halves": (
        "return {__ldg(data + i)};",
        "const uint2* half = reinterpret_cast<const uint2*>(data + i);\n"
        "    return {{__ldg(half).x, __ldg(half).y, __ldg(half + 1).x, __ldg(half + 1).y}};",
        "0 loops over vectors",
    ),
    "two vectors at a time": ("kIsComplex<F> ? 1 : 4;", "kIsComplex<F> ? 1 : 2;", "2 of 2 loads"),
    "a vector looked at before the next is asked for": (
        "items[n] = source.load(kPastLast ? smaller(at, count - 1) : at);",
        "items[n] = source.load(kPastLast ? smaller(at, count - 1) : at);\n"
        "    if (items[n].keys(0) == 0x2718) __trap();",
        "loads are on their way",
    ),
    "twice as many blocks as registers": ("kBlocksPerMultiprocessor = 4;", "kBlocksPerMultiprocessor = 8;", "spills"),
    "half as many blocks": ("kBlocksPerMultiprocessor = 4;", "kBlocksPerMultiprocessor = 2;", "registers"),
}


@needs_compiler
@needs_disassembler
@pytest.mark.parametrize("what", BROKEN)
def test_code_that_lost_it_is_caught(what: str, tmp_path: Path) -> None:
    assert CUDA is not None and NVDISASM is not None
    old, new, fault = BROKEN[what]
    broken = tmp_path / "csrc"
    shutil.copytree(CSRC, broken)
    kernel = broken / "cuda" / "reduce.cuh"
    source = kernel.read_text()
    assert source.count(old) == 1, "the code that this breaks has changed"
    kernel.write_text(source.replace(old, new))
    found = faults(compile_for("8.0", CUDA, NVDISASM, broken, tmp_path))
    assert any(fault in each for each in found), found


LISTING = """\
.text.dense_kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0020*/                   LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x1000] ;
        /*0030*/                   IADD3 R0, P0, R0, 0x400, RZ ;
        /*0040*/                   IMNMX.U32 R12, R5, R12, PT ;
        /*0050*/                   LDG.E.128.CONSTANT R16, [R2.64+0x2000] ;
        /*0060*/              @!P1 BRA `(.L_x_2) ;
        /*0070*/                   LDS.64 R20, [R60+0x8] ;
        /*0080*/                   CALL.REL.NOINC `(count) ;
.L_x_2:
        /*0090*/              @!P0 BRA `(.L_x_1) ;
        /*00a0*/                   STL [R1], R3 ;
        /*00b0*/                   EXIT ;
"""


def test_a_listing_is_read_as_it_is_meant() -> None:
    """By hand: the good path of the loop is 7 instructions with 3 loads, of which 2 precede the use of R5."""
    (kernel,) = parse(LISTING)
    assert kernel.touches_local_memory
    (loop,) = kernel.hot_loops()
    assert (len(loop.way), loop.vectors, loop.in_flight, loop.calls) == (7, 3, 2, 0)
    assert loop.other_loads == []

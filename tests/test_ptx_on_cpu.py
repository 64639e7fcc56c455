"""The machine of tests/ptx_on_cpu on small programs: what PTX means, and that nothing wrong is let through."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_on_cpu.fences import check_stamps_follow_fences
from ptx_on_cpu.machine import Machine, Module, RandomWarps, Schedule, lockstep
from ptx_on_cpu.memory import Fault, Region
from ptx_on_cpu.program import PtxError, parse

pytestmark = pytest.mark.any_torch

PROGRAM = """
.version 9.0
.target sm_90
.address_size 64
.shared .align 8 .b8 first_shared[256];
.shared .align 8 .b8 second_shared[256];
.visible .entry kernel(
	.param .u64 kernel_param_0,
	.param .u64 kernel_param_1
)
.maxntid 64, 1, 1
{{
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<9>;
	.reg .f64 %fd<9>;
	ld.param.u64 %rd1, [kernel_param_0];
	ld.param.u64 %rd7, [kernel_param_1];
	cvta.to.global.u64 %rd2, %rd1;
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd3, %r1, 4;
	add.s64 %rd4, %rd2, %rd3;
	mov.u32 %r2, first_shared;
	shl.b32 %r3, %r1, 2;
	add.s32 %r2, %r2, %r3;
{body}
	ret;
}}
"""
THREADS = 64


def execute(body: str, *, schedule: Schedule = lockstep, writable: bool = True, words: int = THREADS) -> np.ndarray:
    """Runs 64 threads that have their number in %r1, the address of their word in %rd4, that of their own word of
    shared memory in %r2, and 77 in %rd7; returns the words."""
    memory = np.arange(1000, 1000 + words, dtype=np.uint32)
    machine = Machine(
        Module(PROGRAM.format(body=body)), 1, THREADS, [Region(memory.ctypes.data, memory.nbytes, writable)]
    )
    arguments = [np.uint64(memory.ctypes.data).tobytes(), np.uint64(77).tobytes()]
    machine.launch("kernel", arguments, schedule)
    return memory


def result_of(instructions: str) -> int:
    """What they leave in %r5, the same in each thread."""
    words = execute(instructions + "\nst.global.u32 [%rd4], %r5;")
    assert (words == words[0]).all()
    return int(words[0])


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ("mov.u32 %r5, -1;", 0xFFFFFFFF),
        ("mov.b32 %r5, 5; sub.s32 %r5, %r5, 7;", 0xFFFFFFFE),
        ("mov.u32 %r5, 0x80000000; shr.s32 %r5, %r5, 31;", 0xFFFFFFFF),
        ("mov.u32 %r5, 0x80000000; shr.u32 %r5, %r5, 40;", 0),
        ("mov.u32 %r5, 0x80000000; shr.s32 %r5, %r5, 40;", 0xFFFFFFFF),
        ("mov.u32 %r5, 1; shl.b32 %r5, %r5, 32;", 0),
        ("mov.u32 %r4, 0x12345678; mov.u32 %r3, 0x9ABCDEF0; shf.l.wrap.b32 %r5, %r4, %r3, 8;", 0xBCDEF012),
        ("mov.u32 %r4, 0x12345678; mov.u32 %r3, 0x9ABCDEF0; shf.r.wrap.b32 %r5, %r4, %r3, 40;", 0xF0123456),
        ("mov.u32 %r4, 0x12345678; mov.u32 %r3, 0x9ABCDEF0; shf.l.clamp.b32 %r5, %r4, %r3, 40;", 0x12345678),
        ("mov.u32 %r4, 0x12345678; mov.u32 %r3, 0x9ABCDEF0; shf.r.clamp.b32 %r5, %r4, %r3, 40;", 0x9ABCDEF0),
        ("mov.u32 %r4, 0x80; cvt.s32.s8 %r5, %r4;", 0xFFFFFF80),
        ("mov.u32 %r4, 0x180; cvt.u32.u8 %r5, %r4;", 0x80),
        ("mov.u32 %r4, 0x8180FF01; mov.u32 %r3, 0x7F; prmt.b32 %r5, %r4, %r3, 0x4321;", 0x7F8180FF),
        # The top bit of a selector's nibble replicates the sign of the byte that it selects.
        ("mov.u32 %r4, 0x8100FF01; prmt.b32 %r5, %r4, 0, 0xBA98;", 0xFF00FF00),
        ("mov.u32 %r4, 0xABCD; mov.u32 %r3, 0x11111111; bfi.b32 %r5, %r4, %r3, 8, 12;", 0x111BCD11),
        ("mov.u32 %r4, 0x1234F5; bfe.u32 %r5, %r4, 4, 8;", 0x4F),
        ("mov.u32 %r4, 0x1234F5; bfe.s32 %r5, %r4, 4, 4;", 0xFFFFFFFF),
        ("mov.u32 %r4, 0xF0F00001; popc.b32 %r5, %r4;", 9),
        ("mov.u32 %r4, 7; mov.u32 %r3, 3; mad.lo.s32 %r5, %r4, %r3, %r4;", 28),
        ("mov.u32 %r4, 7; div.u32 %r5, %r4, 2;", 3),
        ("mov.u32 %r4, 0x00010005; min.u16x2 %r5, %r4, 0x00020003;", 0x00010003),
        ("mov.u32 %r4, -3; max.s32 %r5, %r4, 2;", 2),
        ("mov.u32 %r4, -3; max.u32 %r5, %r4, 2;", 0xFFFFFFFD),
        ("mov.b64 {%r5, _}, %rd7;", 77),
        ("mov.u32 %r3, 9; mov.b64 %rd5, {%r3, %r3}; shr.u64 %rd5, %rd5, 32; cvt.u32.u64 %r5, %rd5;", 9),
        (
            "mov.f64 %fd1, 0d4000000000000000; sqrt.rn.f64 %fd2, %fd1; "
            "setp.lt.f64 %p1, %fd2, %fd1; selp.u32 %r5, 4, 6, %p1;",
            4,
        ),
        ("setp.lt.u32 %p1, %r1, 1; vote.sync.any.pred %p2, %p1, -1; bar.sync 0; mov.u32 %r5, 3;", 3),
        ("shfl.sync.bfly.b32 %r4|%p1, %r1, 5, 31, -1; xor.b32 %r5, %r4, %r1;", 5),
        ("and.b32 %r4, %r1, 31; setp.gt.u32 %p1, %r4, 29; vote.sync.ballot.b32 %r5, %p1, -1;", 0xC0000000),
    ],
)
def test_what_instructions_compute(instructions: str, expected: int) -> None:
    assert result_of(instructions) == expected


def test_a_guard_leaves_out_the_other_threads() -> None:
    words = execute("setp.lt.u32 %p1, %r1, 3; mov.u32 %r5, 1; @!%p1 mov.u32 %r5, 2; @%p1 st.global.u32 [%rd4], %r5;")
    assert words[:3].tolist() == [1, 1, 1] and words[3:].tolist() == list(range(1003, 1064))


def test_threads_that_parted_meet_again() -> None:
    words = execute(
        """
        mov.u32 %r5, 0;
        $loop:
        add.s32 %r5, %r5, 1;
        setp.lt.u32 %p1, %r5, %r1;
        @%p1 bra $loop;
        shfl.sync.bfly.b32 %r4|%p2, %r5, 1, 31, -1;
        st.global.u32 [%rd4], %r4;
        """
    )
    assert words.tolist() == [max(thread ^ 1, 1) for thread in range(THREADS)]


def test_atomics_of_all_threads_add_up() -> None:
    words = execute("cvt.u32.u64 %r5, %rd7; atom.global.add.u32 %r4, [%rd2], %r5; red.global.max.u32 [%rd2+4], %r1;")
    assert words[0] == 1000 + 77 * THREADS and words[1] == 1001


NEIGHBOURS_WORD = "xor.b32 %r4, %r1, 32; shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r6;"  # of a thread of another warp
EXCHANGE = (
    "mov.u32 %r6, first_shared; "
    + NEIGHBOURS_WORD
    + "st.shared.u32 [%r2], %r1; {barrier} ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd4], %r5;"
)


@pytest.mark.parametrize("schedule", [lockstep, RandomWarps(1), RandomWarps(2)])
def test_a_barrier_lets_warps_exchange(schedule: Schedule) -> None:
    words = execute(EXCHANGE.format(barrier="bar.sync 0;"), schedule=schedule)
    assert words.tolist() == [thread ^ 32 for thread in range(THREADS)]


def test_one_warp_at_a_time_shows_that_a_barrier_is_missing() -> None:
    execute(EXCHANGE.format(barrier=""))  # in lockstep it does not matter
    with pytest.raises(Fault, match="shared memory is read before it was written"):
        execute(EXCHANGE.format(barrier=""), schedule=RandomWarps(1))


@pytest.mark.parametrize(
    ("instructions", "fault"),
    [
        ("ld.global.u32 %r5, [%rd4+4];", "4 bytes outside of the memory of this launch"),
        ("st.global.u32 [%rd4+-4], %r1;", "4 bytes outside of the memory of this launch"),
        ("ld.global.v2.u32 {%r4, %r5}, [%rd4];", "outside of the memory|no multiple of 8"),
        ("ld.global.u32 %r5, [%rd2+2];", "no multiple of 4"),
        ("ld.global.nc.u32 %r5, [%rd4];", "takes memory for constant"),
        ("ld.u32 %r5, [%rd7];", "outside of the memory of this launch|no multiple"),
        ("atom.global.add.u32 %r5, [%rd2+256], 1;", "outside of the memory"),
        ("ld.shared.u32 %r5, [%r2];", "shared memory is read before it was written"),
        ("st.shared.u32 [%r2+4], %r1;", "outside of every variable in shared memory"),
        ("add.s32 %r5, %r6, 1;", "a register is read before it was set"),
        ("div.u32 %r5, %r1, %r1;", "a division by 0"),
        ("setp.lt.u32 %p1, %r1, 5; @%p1 bra $b; bar.sync 0; bra $c; $b: bar.sync 0; $c:", "wait for others that never"),
        ("setp.lt.u32 %p1, %r1, 5; @%p1 ret; bar.sync 0;", "wait for others that never come: bar.sync 0"),
        ("and.b32 %r4, %r1, 31; setp.lt.u32 %p1, %r4, 5; @%p1 vote.sync.any.pred %p2, %p1, -1;", "wait for others"),
        ("vote.sync.any.pred %p2, %p1, 15;", "a mask other than of all lanes"),
    ],
)
def test_what_a_device_would_not_survive_or_leaves_undefined(instructions: str, fault: str) -> None:
    with pytest.raises(Fault, match=fault):
        execute(instructions)


def test_memory_that_is_only_read_cannot_be_written() -> None:
    with pytest.raises(Fault, match="only reads"):
        execute("st.global.u32 [%rd4], %r1;", writable=False)
    execute("ld.global.nc.u32 %r5, [%rd4];", writable=False)


@pytest.mark.parametrize(
    ("instructions", "problem"),
    [
        ("lop3.b32 %r5, %r1, %r1, %r1, 1;", "opcode lop3 is not known"),
        ("add.cc.u32 %r5, %r1, %r1;", "modifiers .'cc'. are not known"),
        ("add.f64 %fd1, %fd1, %fd1;", "none of .'rn'"),  # ptxas may fuse it with a product
        ("cvt.rzi.u32.f64 %r5, %fd1;", "a float made an integer"),
        ("ld.const.u32 %r5, [%rd1];", "modifiers .'const'"),
        ("add.u32 %r5, %rs1, %r1;", "%rs1 read as .u32"),
        ("mov.u32 %r5, %clock;", "%clock is not declared"),
        ("mov.u32 %r5, somewhere;", "operand somewhere is not known"),
        ("vote.sync.uni.pred %p1, %p2, -1;", "none of"),
        (".const .b32 four;", "not a declaration"),
    ],
)
def test_what_is_not_known_is_an_error_before_anything_runs(instructions: str, problem: str) -> None:
    with pytest.raises(PtxError, match=problem):
        Module(PROGRAM.format(body=instructions))


ROW = "st.global.u64 [%rd2], %rd3; "
FENCE = "membar.sys; "
STAMP = "st.volatile.global.u64 [%rd2+56], %rd7; "


@pytest.mark.parametrize("fence", [FENCE, "fence.acq_rel.sys; "])
def test_a_row_a_fence_and_a_stamp_in_this_order_are_proved(fence: str) -> None:
    program = parse(PROGRAM.format(body=ROW + fence + STAMP))
    assert check_stamps_follow_fences(program, "kernel", 0) == (8, 1)
    loop = "$next: " + ROW + fence + STAMP + "setp.lt.u32 %p1, %r1, 5; @%p1 bra $next;"
    assert check_stamps_follow_fences(parse(PROGRAM.format(body=loop)), "kernel", 0) == (8, 1)


@pytest.mark.parametrize(
    "body",
    [
        ROW + STAMP,
        ROW + "membar.gl; " + STAMP,
        FENCE + ROW + STAMP,
        STAMP + FENCE + ROW,
        FENCE + STAMP + ROW,
        ROW + FENCE + ROW + STAMP,
        "setp.lt.u32 %p1, %r1, 5; " + ROW + "@%p1 membar.sys; " + STAMP,
        "setp.lt.u32 %p1, %r1, 5; " + ROW + "@%p1 bra $past; " + FENCE + "$past: " + STAMP,
        "setp.lt.u32 %p1, %r1, 5; " + ROW + FENCE + "$again: " + STAMP + "@%p1 bra $again;",
    ],
    ids=[
        "no fence",
        "of smaller scope",
        "before the row",
        "stamp first",
        "no row",
        "a part of the row after it",
        "in some threads",
        "on one path",
        "a stamp of its own each time",
    ],
)
def test_a_stamp_that_may_come_before_its_row_is_not(body: str) -> None:
    with pytest.raises(PtxError, match="a stamp where its row may be"):
        check_stamps_follow_fences(parse(PROGRAM.format(body=body)), "kernel", 0)

"""Single PTX instructions, with numbers in and out, except those that every kernel of test_triton.py computes with."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import pytest
import torch

from tools.emulator.decode import CORE, _expanded, decode, lanewise
from tools.emulator.handwritten import execute, kernel
from tools.emulator.ptx import UnknownPTX

ONES, TOP, NAN, INF = 0xFFFFFFFF, 0x80000000, math.nan, math.inf
HALVES = "cvt.u16.u32 %h0, a; cvt.u16.u32 %h1, b"
ALL_SETP = (
    "setp.lt.s32 %p1, a, b; setp.lt.u32 %p2, a, b; setp.hi.and.u32 %p3|%p4, a, b, !%p1; selp.b32 %r15, 1, 0, %p1;"
    "@%p2 or.b32 %r15, %r15, 2; @%p3 or.b32 %r15, %r15, 4; @%p4 or.b32 %r15, %r15, 8; mov.b32 d, %r15"
)
SETP = "setp.{0}.f32 %p1, a, b; selp.b32 %r15, 1, 0, %p1; setp.{0}u.f32 %p2, a, b; @%p2 or.b32 %r15, %r15, 2; mov.b32 d, %r15"
ORDERED = {"lt": (1, 0, 0), "le": (1, 1, 0), "eq": (0, 1, 0), "ne": (1, 0, 1), "ge": (0, 1, 1), "gt": (0, 0, 1)}
"""Comparisons, and whether they are true of a smaller, an equal and a larger number."""
RESULTS: dict[str, list[tuple[Any, ...]]] = {
    # Operands a, b, c, e, and the result d in 32 bits, or D in 64; a number with a point is a float32.
    "sub.s32 d, a, b": [(3, 5, -2), (0, TOP, TOP)],
    "mul.hi.u32 d, a, b": [(ONES, ONES, ONES - 1), (3, TOP, 1)],
    "mul.hi.s32 d, a, b": [(-1, -1, 0), (3, TOP, -2), (TOP, TOP, 1 << 30)],
    "mad.lo.s32 d, a, b, c": [(3, -5, 7, -8), (0x10000, 0x10000, 9, 9)],
    "div.u32 d, a, b": [(7, 2, 3), (ONES, 2, 0x7FFFFFFF), (7, 0, ONES)],
    "div.s32 d, a, b": [(-7, 2, -3), (7, -2, -3), (TOP, -1, TOP), (-7, 0, -1)],
    "rem.u32 d, a, b": [(7, 2, 1), (ONES, 10, 5), (7, 0, 7)],
    "rem.s32 d, a, b": [(-7, 2, -1), (7, -2, 1), (TOP, -1, 0), (-7, 0, -7)],
    "neg.s32 d, a": [(5, -5), (TOP, TOP)],
    "abs.s32 d, a": [(-5, 5), (5, 5), (TOP, TOP)],
    "min.s32 d, a, b": [(-1, 1, -1), (4, 3, 3)],
    "max.u32 d, a, b": [(-1, 1, -1), (4, 3, 4)],
    "min.relu.s32 d, a, b": [(-1, 1, 0), (4, 3, 3)],
    "not.b32 d, a": [(0x0F0F00FF, 0xF0F0FF00)],
    "shl.b32 d, a, b": [(3, 31, TOP), (3, 32, 0), (3, ONES, 0)],
    "shr.u32 d, a, b": [(TOP, 31, 1), (TOP, 32, 0), (TOP, ONES, 0)],
    "shr.s32 d, a, b": [(TOP, 4, 0xF8000000), (TOP, 32, -1), (5, 40, 0)],
    "shf.l.wrap.b32 d, a, b, c": [(0x89ABCDEF, 0x01234567, 8, 0x23456789), (1, 2, 33, 4), (1, 2, 32, 2)],
    "shf.r.wrap.b32 d, a, b, c": [(0x89ABCDEF, 0x01234567, 8, 0x6789ABCD), (4, 2, 33, 2), (1, 2, 32, 1)],
    "shf.l.clamp.b32 d, a, b, c": [(0x89ABCDEF, 0x01234567, 8, 0x23456789), (1, 2, 33, 1), (1, 2, 32, 1)],
    "shf.r.clamp.b32 d, a, b, c": [(0x89ABCDEF, 0x01234567, 8, 0x6789ABCD), (4, 2, 33, 2), (1, 7, 32, 7)],
    "bfe.u32 d, a, b, c": [(0x89ABCDEF, 8, 12, 0xBCD), (0x89ABCDEF, 28, 8, 8), (5, 0, 0, 0), (-1, 40, 4, 0), (7, 0, 99, 7)],
    "bfe.s32 d, a, b, c": [(0x89ABCDEF, 8, 12, -0x433), (0x89ABCDEF, 28, 8, -8), (5, 0, 0, 0), (-1, 40, 4, -1), (5, 1, 4, 2)],
    "bfi.b32 d, a, b, c, e": [
        *((0xABC, 0x11111111, 8, 12, 0x111ABC11), (-1, 0, 28, 8, 0xF0000000), (-1, 5, 3, 0, 5), (-1, 5, 40, 4, 5)),
    ],
    "prmt.b32 d, a, b, c": [(0x33221100, 0x77665544, 0x7520, 0x77552200), (0x00800180, 0, 0x9A8B, 0x00FFFF00)],
    "clz.b32 d, a": [(0, 32), (1, 31), (TOP, 0)],
    "popc.b32 d, a": [(0, 0), (0xF0F1, 9), (ONES, 32)],
    **{f"lop3.b32 d, a, b, c, {table:#x}": [(0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA, 0x01010101 * table)] for table in range(256)},
    "mul.wide.u32 D, a, b": [(ONES, ONES, ONES * ONES), (3, 5, 15)],
    "mul.wide.s32 D, a, b": [(-1, -1, 1), (TOP, 3, -3 << 31)],
    f"{HALVES}; mad.wide.u16 d, %h0, %h1, b": [(0xFFFF, 0xFFFF, 0xFFFE0001 + 0xFFFF)],
    f"{HALVES}; mad.wide.s16 d, %h0, %h1, b": [(0xFFFF, 0xFFFF, 1 + 0xFFFF), (0x8000, 2, -65534)],
    "mov.b64 D, {a, b}": [(1, 2, 2 << 32 | 1)],
    "cvt.s64.s32 D, a": [(-5, -5), (5, 5)],
    "cvt.u64.u32 D, a": [(-5, 2**32 - 5)],
    "cvt.u16.u32 %h0, a; cvt.s64.s16 D, %h0": [(0x18000, -0x8000), (5, 5)],
    "cvt.u16.u32 %h0, a; cvt.u64.u16 D, %h0": [(0x18000, 0x8000)],
    "cvt.u16.u32 %h0, a; cvt.s64.s8 D, %h0": [(0x180, -0x80), (0x17F, 0x7F)],
    "mov.b64 %d21, {a, b}; shr.s64 D, %d21, 7": [(128, TOP, (-(2**63) >> 7) + 1)],
    "mov.b64 %d21, {b, a}; mov.b64 {_, d}, %d21": [(1, 2, 1)],
    ALL_SETP: [(1, 2, 3), (-1, 1, 1), (1, -1, 2 | 8), (2, 1, 4), (1, 1, 8)],
    # 16-bit floats in words: all bits are kept, and sums are rounded once.
    "cvt.u16.u32 %h0, a; cvt.f32.f16 d, %h0": [(0x3C00, 1.0), (1, 2.0**-24), (0xFC00, -INF), (0x7E00, NAN), (0x8000, -0.0)],
    "cvt.u16.u32 %h0, a; cvt.f32.bf16 d, %h0": [(0x3F80, 1.0), (0xFF80, -INF), (0x7FC0, NAN), (0x8000, -0.0)],
    f"{HALVES}; add.f16 %h0, %h0, %h1; cvt.u32.u16 d, %h0": [
        *((0x6800, 0x3C00, 0x6800), (0x6800, 0x3E00, 0x6801), (0x7BFF, 0x7BFF, 0x7C00)),
    ],
    "add.f16x2 d, a, b": [(0x3C006800, 0xBC003E00, 0x6801)],
    # To nearest, ties to even; satfinite replaces infinities and keeps NaN (PTX ISA, cvt); TF32 rounds ties away from zero.
    "cvt.rn.f16.f32 %h0, a; cvt.u32.u16 d, %h0": [
        *((65519.9, 0x7BFF), (65520.0, 0x7C00), (2.0**-24, 1), (2.0**-25, 0), (2.0**-25 * 1.0000002, 1), (-0.0, 0x8000)),
        *((2049.0, 0x6800), (2051.0, 0x6802)),
    ],
    "cvt.rn.bf16.f32 %h0, a; cvt.u32.u16 d, %h0": [
        *((1.0, 0x3F80), (1.00390625, 0x3F80), (1.01171875, 0x3F82), (-INF, 0xFF80), (3.4e38, 0x7F80)),
    ],
    "cvt.rn.f16x2.f32 d, b, a": [(1.0, -2.0, 0xC0003C00), (65520.0, -65536.0, 0xFC007C00)],
    "cvt.rn.bf16x2.f32 d, b, a": [(1.0, -2.0, 0xC0003F80)],
    "cvt.rn.satfinite.f16x2.f32 d, b, a": [(1.0, -2.0, 0xC0003C00), (INF, -65536.0, 0xFBFF7BFF)],
    "cvt.rn.satfinite.f16x2.f32 %r15, a, a; cvt.u16.u32 %h0, %r15; cvt.f32.f16 d, %h0": [(NAN, NAN), (65519.9, 65504.0)],
    "cvt.rna.tf32.f32 d, a": [
        *((1 + 2.0**-11, 1 + 2.0**-10), (-1 - 2.0**-11, -1 - 2.0**-10), (1 + 2.0**-12, 1.0), (INF, INF), (NAN, NAN)),
    ],
    "fma.rn.f32 d, a, b, c": [(1 + 2.0**-12, 1 + 2.0**-12, -1 - 2.0**-11, 2.0**-24), (INF, 0.0, 1.0, NAN)],
    "min.f32 d, a, b": [(1.0, 2.0, 1.0), (0.0, -0.0, -0.0), (-0.0, 0.0, -0.0), (NAN, 1.0, 1.0), (1.0, NAN, 1.0), (NAN, NAN, NAN)],
    "max.f32 d, a, b": [(1.0, 2.0, 2.0), (0.0, -0.0, 0.0), (-0.0, 0.0, 0.0), (NAN, 1.0, 1.0), (1.0, NAN, 1.0), (NAN, NAN, NAN)],
    "min.NaN.f32 d, a, b": [(1.0, 2.0, 1.0), (-0.0, 0.0, -0.0), (NAN, 1.0, NAN), (1.0, NAN, NAN)],
    "max.NaN.f32 d, a, b": [(1.0, 2.0, 2.0), (0.0, -0.0, 0.0), (NAN, 1.0, NAN), (1.0, NAN, NAN)],
    # 1 for ordered comparisons, 2 for those that are true of NaN.
    **{
        SETP.format(name): [(1.0, 2.0, 3 * less), (-0.0, 0.0, 3 * equal), (INF, 1.0, 3 * more), (NAN, 1.0, 2), (1.0, NAN, 2)]
        for name, (less, equal, more) in ORDERED.items()
    },
    "setp.num.f32 %p1, a, b; selp.b32 d, 1, 0, %p1": [(INF, 0.0, 1), (NAN, 0.0, 0), (0.0, NAN, 0)],
    "setp.nan.f32 %p1, a, b; selp.b32 d, 1, 0, %p1": [(INF, 0.0, 0), (NAN, 0.0, 1), (0.0, NAN, 1)],
    "cvt.rzi.s32.f32 d, a": [(2.9, 2), (-2.9, -2), (0.0, 0)],
    # Approximations, in double precision, are rounded once.
    "ex2.approx.ftz.f32 d, a": [(3.0, 8.0), (0.5, 2**0.5), (-20.25, 2**-20.25)],
    "lg2.approx.ftz.f32 d, a": [(8.0, 3.0), (10.0, math.log2(10.0)), (0.0, -INF)],
    "rcp.approx.ftz.f32 d, a": [(3.0, 1 / 3), (-0.0, -INF)],
    "tanh.approx.f32 d, a": [(0.5, math.tanh(0.5)), (-INF, -1.0)],
    "sqrt.rn.f32 d, a": [(2.0, 2**0.5), (-1.0, NAN)],
}  # fmt: skip


OPERAND = r"\b[abcedD]\b"


def bits(number: float, width: int = 4) -> int:
    return int.from_bytes(struct.pack("<f", number), "little") if isinstance(number, float) else number % 2 ** (8 * width)


def execute_lanes(instruction: str, operands: list[list[int]], result: torch.Tensor) -> torch.Tensor:
    """Execute it in the lanes of a warp, with the operands of each in a, b, c and e; d has 32 bits, D 64."""
    registers = {"a": "%r11", "b": "%r12", "c": "%r13", "e": "%r14", "d": "%r10", "D": "%d20"}
    loads = "".join(f"ld.global.b32 %r{11 + index}, [%d4+{128 * index}];" for index in range(len(operands)))
    width = result.element_size()
    body = f"""
    mul.wide.u32 %d4, %r1, 4; add.s64 %d4, %d4, %d0; {loads}
    {re.sub(OPERAND, lambda match: registers[match[0]], instruction)};
    mul.wide.u32 %d4, %r1, {width}; add.s64 %d4, %d4, %d1; st.global.b{8 * width} [%d4], {registers["D" if width == 8 else "d"]};
    """
    source = torch.tensor(operands or [[0] * 32], dtype=torch.int64).to(torch.int32)
    report = execute(body, [source, result])
    assert report.finished and not report.findings, (instruction, report.findings)
    return result


def test_results() -> None:
    """The result has the same bits, with signs of zeros; any NaN is NaN."""
    for instruction, rows in RESULTS.items():
        *operands, _ = zip(*(rows[lane % len(rows)] for lane in range(32)), strict=True)
        is_wide = re.search(r"\bD\b", instruction) is not None
        result = torch.zeros(32, dtype=torch.int64 if is_wide else torch.int32)
        execute_lanes(instruction, [list(map(bits, numbers)) for numbers in operands], result)
        for row, found in zip(rows, result.tolist(), strict=False):
            is_nan = isinstance(row[-1], float) and math.isnan(row[-1])
            right = found & 0x7FFFFFFF > 0x7F800000 if is_nan else (found - bits(row[-1], result.element_size())) % 2**32 == 0
            assert right, (instruction, row, hex(found))


LANES: dict[str, list[int]] = {
    "shfl.sync.idx.b32 d, %r1, 5, 31, -1": [5] * 32,
    "shfl.sync.idx.b32 d, %r1, 5, 0x181f, -1": [lane // 8 * 8 + 5 for lane in range(32)],  # segments of 8
    "shfl.sync.bfly.b32 d, %r1, 2, 31, -1": [lane ^ 2 for lane in range(32)],
    "shfl.sync.up.b32 d, %r1, 3, 0, -1": [0, 1, 2, *range(29)],
    "shfl.sync.down.b32 d, %r1, 3, 31, -1": [*range(3, 32), 29, 30, 31],
    # Whether the lane that is shuffled from is in range.
    "shfl.sync.down.b32 %r15|%p1, %r1, 3, 31, -1; selp.b32 d, 1, 0, %p1": [1] * 29 + [0] * 3,
    # The first eight lanes alone, and all.
    "redux.sync.add.u32 %r15, %r1, 0xff; setp.lt.u32 %p1, %r1, 8; selp.b32 d, %r15, 0, %p1": [28] * 8 + [0] * 24,
    **{
        f"mul.lo.u32 %r15, %r1, 0x9E3779B9; redux.sync.{opcode} d, %r15, -1": [total] * 32
        for opcode, total in {"add.s32": -1954818448, "min.s32": -2119232183, "max.u32": -91423699, "or.b32": -1}.items()
    },
    # A lane whose guard is false keeps what it had.
    "mov.u32 d, 7; setp.lt.u32 %p1, %r1, 4; @%p1 mov.u32 d, 1; @!%p1 add.u32 d, d, 1": [1] * 4 + [8] * 28,
    # A branch back, taken until a condition fails.
    "mov.u32 d, 0; mov.u32 %r15, 0; $L: add.u32 d, d, %r15; add.u32 %r15, %r15, 1; setp.lt.u32 %p1, %r15, 10; @%p1 bra $L": (
        [45] * 32
    ),
}


@pytest.mark.parametrize("instruction", LANES)
def test_lanes(instruction: str) -> None:
    """Results of each lane for its lane number."""
    assert execute_lanes(instruction, [], torch.zeros(32, dtype=torch.int32)).tolist() == LANES[instruction]


def test_vectors() -> None:
    """Vector loads and stores; signed bytes are extended, words are truncated."""
    source, result = torch.arange(-64, 64, dtype=torch.int8).view(32, 4), torch.zeros(32, 4, dtype=torch.int32)
    address = "mul.wide.u32 %d4, %r1, 4; add.s64 %d5, %d4, %d1; add.s64 %d4, %d4, %d0;"
    four = "{%r10, %r11, %r12, %r13}"
    body = "mul.wide.u32 %d5, %r1, 16; add.s64 %d5, %d5, %d1;"
    body = f"{address} {body} ld.global.v4.s8 {four}, [%d4]; st.global.v4.b32 [%d5], {four};"
    assert not execute(body, [source, result]).findings and torch.equal(result, source.int())
    words, halves = torch.arange(32, dtype=torch.int32) * 65537, torch.zeros(32, 2, dtype=torch.int16)
    body = f"{address} ld.global.b32 %r10, [%d4]; mov.b32 {{%h1, %h2}}, %r10; st.global.v2.b16 [%d5+0], {{%h1, %h2}};"
    assert not execute(body, [words, halves]).findings and torch.equal(halves, words.view(torch.int16).view(32, 2))


UNKNOWN = {
    "atom.global.add.f32 %r4, [%d0], %r5": "atom.global.add.f32",
    "min.something.s32 %r4, %r5, %r6": "min.something.s32",
    "tcgen05.fence::before_thread_sync": "tcgen05.fence::before_thread_sync",
    "ld.volatile.global.b32 %r4, [%d0]": "ld.volatile.global.b32",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 %r4, %r5, %r6, %r7": "m16n8k32",
    "mov.b32 %r4, %nothing": "%nothing",
    "add.s32 %r4, %d1, %r5": "%d1 has 64 bits instead of 32",
    "add.s32 %r4, %r5": "add.s32 with 2 operands",
    "bra $nowhere": "$nowhere",
    "": "no kernel",
}


@pytest.mark.parametrize("statement", UNKNOWN)
def test_unknown_instructions_are_named(statement: str) -> None:
    with pytest.raises(UnknownPTX, match=re.escape(UNKNOWN[statement])):
        decode(kernel(f"{statement};") if statement else ".version 8.0\n.target sm_80\n")


def test_no_instruction_is_listed_twice() -> None:
    """With alternatives in braces expanded, each opcode has one line."""
    text = (CORE / "lanewise.def").read_text()
    opcodes = [opcode for listed in re.findall(r'^\w+\(\w+, "([^"]+)"', text, re.MULTILINE) for opcode in _expanded(listed)]
    assert len(lanewise()) == len(opcodes)

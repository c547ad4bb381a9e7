"""Single PTX instructions on special and random values, except those that every kernel of test_triton.py computes with."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, where

from tests.tolerance import assert_at_most
from tools.emulator.decode import CORE, _expanded, decode, lanewise
from tools.emulator.handwritten import execute, kernel
from tools.emulator.ptx import UnknownPTX

LANES = 1024
SPECIAL = (0, 1, 2, 31, 32, 33, 255, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
EDGES = (0.0, -0.0, 1.0, 65504.0, 65519.9, 65520.0, -65536.0, 2**-24, 2**-25, 1.0000001 * 2**-25, math.inf, -math.inf, math.nan)


def words() -> list[Tensor]:
    """Four operands, unsigned words in int64, whose arithmetic keeps the lower bits: special values, small and other ones."""
    generator = torch.Generator().manual_seed(1)
    drawn = lambda below: torch.randint(below, (4, LANES), generator=generator)  # noqa: E731
    kinds = torch.stack((torch.tensor(SPECIAL)[drawn(len(SPECIAL))], drawn(64), drawn(2**32)))
    return list(kinds.gather(0, drawn(3)[None])[0])


def floats() -> list[Tensor]:
    """Three operands: all pairs of edges, among them those of float16, and values of all magnitudes."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, LANES)
    spread = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-30, 30, shape, generator=generator)
    pairs = torch.tensor(list(itertools.product(EDGES, repeat=2))).T
    spread[:2, : pairs.shape[1]] = pairs
    return list(spread)


def signed(word: Tensor, bits: int = 32) -> Tensor:
    return (word + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def shifts(shift: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: where(b < 32, shift(a, b.clamp(max=31)), 0)


def extract(a: Tensor, first: Tensor, count: Tensor, sign: int) -> Tensor:
    first, count = first & 255, (count & 255).clamp(max=32)
    negative = sign * (count > 0) * (a >> (first + count - 1).clamp(0, 31) & 1)
    return (a >> first.clamp(max=63) & (1 << count) - 1) - (negative << count)


def insert(field: Tensor, value: Tensor, first: Tensor, count: Tensor) -> Tensor:
    first, count = ((number & 255).clamp(max=32) for number in (first, count))
    mask = (1 << count) - 1 << first
    return value & ~mask | field << first & mask


def permute(a: Tensor, b: Tensor, selectors: Tensor) -> Tensor:
    chosen = [selectors >> 4 * place & 15 for place in range(4)]
    found = [(b << 32 | a) >> 8 * (selector & 7) & 255 for selector in chosen]
    signs = [where(selector > 7, byte // 128 * 255, byte) for selector, byte in zip(chosen, found, strict=True)]
    return sum((byte << 8 * place for place, byte in enumerate(signs)), torch.zeros_like(a))


def logic(table: int, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    terms = (~(a ^ -(i >> 2)) & ~(b ^ -(i >> 1 & 1)) & ~(c ^ -(i & 1)) for i in range(8) if table >> i & 1)
    return sum(terms, torch.zeros_like(a))


def lower(a: Tensor, b: Tensor) -> Tensor:
    """The smaller number, also of zeros; NaN only of two."""
    return where(a == b, where(a.signbit(), a, b), torch.fmin(a, b))


def either_nan(a: Tensor, b: Tensor, other: Tensor) -> Tensor:
    return where(a.isnan() | b.isnan(), math.nan, other)


def halves(word: Tensor) -> Tensor:
    return word.short().view(torch.float16)


def in_pairs(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack((a, b), -1)


HALVES = "cvt.u16.u32 %h0, a; cvt.u16.u32 %h1, b"
INTEGERS: dict[str, Callable[..., Tensor]] = {
    "sub.s32 d, a, b": lambda a, b: a - b,
    "mul.hi.u32 d, a, b": lambda a, b: a * b >> 32,
    "mul.hi.s32 d, a, b": lambda a, b: signed(a) * signed(b) >> 32,
    "mad.lo.s32 d, a, b, c": lambda a, b, c: a * b + c,
    "div.u32 d, a, b": lambda a, b: where(b > 0, a // b.clamp(1), -1),
    "div.s32 d, a, b": lambda a, b: where(b > 0, torch.div(signed(a), signed(b + (b == 0)), rounding_mode="trunc"), -1),
    "rem.u32 d, a, b": lambda a, b: where(b > 0, a % b.clamp(1), a),
    "rem.s32 d, a, b": lambda a, b: where(b > 0, torch.fmod(signed(a), signed(b + (b == 0))), a),
    "neg.s32 d, a": lambda a: -a,
    "abs.s32 d, a": lambda a: signed(a).abs(),
    "min.s32 d, a, b": lambda a, b: torch.minimum(signed(a), signed(b)),
    "max.u32 d, a, b": torch.maximum,
    "min.relu.s32 d, a, b": lambda a, b: torch.minimum(signed(a), signed(b)).clamp(0),
    "not.b32 d, a": lambda a: ~a,
    "shl.b32 d, a, b": shifts(lambda a, b: a << b),
    "shr.u32 d, a, b": shifts(lambda a, b: a >> b),
    "shr.s32 d, a, b": lambda a, b: signed(a) >> b.clamp(max=31),
    "shf.l.wrap.b32 d, a, b, c": lambda a, b, c: (b << 32 | a) << c % 32 >> 32,
    "shf.r.wrap.b32 d, a, b, c": lambda a, b, c: (b << 32 | a) >> c % 32,
    "shf.l.clamp.b32 d, a, b, c": lambda a, b, c: (b << 32 | a) << c.clamp(max=32) >> 32,
    "shf.r.clamp.b32 d, a, b, c": lambda a, b, c: (b << 32 | a) >> c.clamp(max=32),
    "bfe.u32 d, a, b, c": lambda a, b, c: extract(a, b, c, 0),
    "bfe.s32 d, a, b, c": lambda a, b, c: extract(signed(a), b, c, 1),
    "bfi.b32 d, a, b, c, e": insert,
    "prmt.b32 d, a, b, c": permute,
    "clz.b32 d, a": lambda a: sum(a >> bit == 0 for bit in range(32)),
    "popc.b32 d, a": lambda a: sum(a >> bit & 1 for bit in range(32)),
    # Results of 64 bits.
    "mul.wide.u32 D, a, b": lambda a, b: a * b,
    "mul.wide.s32 D, a, b": lambda a, b: signed(a) * signed(b),
    f"{HALVES}; mad.wide.u16 d, %h0, %h1, b": lambda a, b: a % 2**16 * (b % 2**16) + b,
    f"{HALVES}; mad.wide.s16 d, %h0, %h1, b": lambda a, b: signed(a, 16) * signed(b, 16) + b,
    "mov.b64 D, {a, b}": lambda a, b: b << 32 | a,
    "cvt.s64.s32 D, a": signed,
    "cvt.u64.u32 D, a": lambda a: a,
    "cvt.u16.u32 %h0, a; cvt.s64.s16 D, %h0": lambda a: signed(a, 16),
    "cvt.u16.u32 %h0, a; cvt.u64.u16 D, %h0": lambda a: a % 2**16,
    "cvt.u16.u32 %h0, a; cvt.s64.s8 D, %h0": lambda a: signed(a, 8),
    "mov.b64 %d21, {a, b}; shr.s64 D, %d21, 7": lambda a, b: (b << 32 | a) >> 7,
    "mov.b64 %d21, {b, a}; mov.b64 {_, d}, %d21": lambda a, b: a,
    # Comparisons, signed, unsigned, combined with a predicate, and the complement.
    "setp.lt.s32 %p1, a, b; setp.lt.u32 %p2, a, b; setp.hi.and.u32 %p3|%p4, a, b, !%p1; selp.b32 %r15, 1, 0, %p1;"
    "@%p2 or.b32 %r15, %r15, 2; @%p3 or.b32 %r15, %r15, 4; @%p4 or.b32 %r15, %r15, 8; mov.b32 d, %r15": lambda a, b: (
        (signed(a) < signed(b)) + 2 * (a < b) + where(signed(a) < signed(b), 0, where(a > b, 4, 8))
    ),
    # 16-bit floats in words: all bits are kept, and sums are rounded once.
    "cvt.u16.u32 %h0, a; cvt.f32.f16 d, %h0": lambda a: halves(a).float(),
    "cvt.u16.u32 %h0, a; cvt.f32.bf16 d, %h0": lambda a: a.short().view(torch.bfloat16).float(),
    f"{HALVES}; add.f16 d, %h0, %h1": lambda a, b: halves(a) + halves(b),
    "add.f16x2 d, a, b": lambda a, b: in_pairs(halves(a) + halves(b), halves(a >> 16) + halves(b >> 16)),
    **{f"lop3.b32 d, a, b, c, {table:#x}": lambda a, b, c, table=table: logic(table, a, b, c) for table in range(256)},
}  # fmt: skip
COMPARISONS = {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}
SETP = "setp.{}.f32 %p1, a, b; selp.b32 d, 1, 0, %p1"
FLOATS: dict[str, Callable[..., Tensor]] = {
    "fma.rn.f32 d, a, b, c": lambda a, b, c: (a.double() * b.double() + c.double()).float(),
    "min.f32 d, a, b": lower,
    "max.f32 d, a, b": lambda a, b: -lower(-a, -b),
    "min.NaN.f32 d, a, b": lambda a, b: either_nan(a, b, lower(a, b)),
    "max.NaN.f32 d, a, b": lambda a, b: either_nan(a, b, -lower(-a, -b)),
    # To nearest, ties to even; satfinite replaces infinities and keeps NaN (PTX ISA, cvt); TF32 rounds ties away from zero.
    "cvt.rn.f16.f32 d, a": torch.Tensor.half,
    "cvt.rn.bf16.f32 d, a": torch.Tensor.bfloat16,
    "cvt.rn.f16x2.f32 d, b, a": lambda a, b: in_pairs(a, b).half(),
    "cvt.rn.bf16x2.f32 d, b, a": lambda a, b: in_pairs(a, b).bfloat16(),
    "cvt.rn.satfinite.f16x2.f32 d, b, a": lambda a, b: in_pairs(a, b).clamp(-65504, 65504).half(),
    "cvt.rna.tf32.f32 d, a": lambda a: where(a.isfinite(), (a.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32), a),
    **{SETP.format(name): lambda a, b, c=compare: c(a, b) & ~a.isnan() & ~b.isnan() for name, compare in COMPARISONS.items()},
    **{SETP.format(f"{name}u"): lambda a, b, c=compare: c(a, b) | a.isnan() | b.isnan() for name, compare in COMPARISONS.items()},
    SETP.format("num"): lambda a, b: ~a.isnan() & ~b.isnan(),
    SETP.format("nan"): lambda a, b: a.isnan() | b.isnan(),
}  # fmt: skip


OPERAND = r"\b[abcedD]\b"


def execute_each(instruction: str, sources: list[Tensor], result: Tensor) -> Tensor:
    """Execute it once for each element of a, b, c, e and d, one program for 32; D is d in 64 bits."""
    width = result.nbytes // len(result)
    registers = {"a": "%r11", "b": "%r12", "c": "%r13", "e": "%r14", "d": "%h10" if width == 2 else "%r10", "D": "%d20"}
    loads = "".join(f"add.s64 %d10, %d{index}, %d9; ld.global.b32 %r{11 + index}, [%d10];" for index in range(len(sources)))
    body = f"""
    mov.u32 %r4, %ctaid.x; shl.b32 %r4, %r4, 5; add.u32 %r4, %r4, %r1; mul.wide.u32 %d9, %r4, 4; {loads}
    {re.sub(OPERAND, lambda match: registers[match[0]], instruction)};
    mul.wide.u32 %d9, %r4, {width}; add.s64 %d10, %d{len(sources)}, %d9;
    st.global.b{8 * width} [%d10], {registers["D" if width == 8 else "d"]};
    """
    report = execute(body, [*sources, result], grid=len(result) // 32)
    assert report.finished and not report.findings, (instruction, report.findings)
    return result


def check(instruction: str, function: Callable[..., Tensor], operands: list[Tensor]) -> None:
    """The result has the same bits, with signs of zeros, and NaN in the same places."""
    used = set(re.findall(OPERAND, instruction))
    sources = operands[: len(used - {"d", "D"})]
    expected = function(*sources)
    if not expected.is_floating_point():
        expected = expected.to(torch.int64 if "D" in used else torch.int32)
    sources = [source if source.is_floating_point() else source.int() for source in sources]
    result = execute_each(instruction, sources, torch.zeros_like(expected))
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    same = (result.view(bits) == expected.view(bits)) | result.isnan() & expected.isnan()
    wrong = (~same).view(len(result), -1).any(1).nonzero()[:1, 0]
    assert same.all(), (instruction, *(tensor[wrong].tolist() for tensor in (*sources, result, expected)))


def test_integers() -> None:
    for instruction, function in INTEGERS.items():
        check(instruction, function, words())


def test_floats() -> None:
    for instruction, function in FLOATS.items():
        check(instruction, function, floats())


FUNCTIONS = {
    "ex2.approx.ftz.f32 d, a": torch.exp2,
    "lg2.approx.ftz.f32 d, a": torch.log2,
    "rcp.approx.ftz.f32 d, a": torch.reciprocal,
    "tanh.approx.f32 d, a": torch.tanh,
    "sqrt.rn.f32 d, a": torch.sqrt,
    "cvt.rzi.s32.f32 %r15, a; cvt.rn.f32.s32 d, %r15": torch.trunc,
}


def test_functions() -> None:
    """One rounding: half a unit in the last place, with a factor of two of room."""
    values = torch.rand(320, generator=torch.Generator().manual_seed(0)) * 20 + 0.01
    for instruction, function in FUNCTIONS.items():
        exact = function(values.double())
        error = (execute_each(instruction, [values], torch.zeros(320)) - exact).abs()
        assert_at_most(instruction, error, torch.finfo(torch.float32).eps * exact.abs())


LANE = torch.arange(32)
OF_LANES: dict[str, Tensor] = {
    "shfl.sync.idx.b32 d, %r1, 5, 31, -1": torch.full((32,), 5),
    "shfl.sync.idx.b32 d, %r1, 5, 0x181f, -1": LANE // 8 * 8 + 5,  # segments of 8
    "shfl.sync.bfly.b32 d, %r1, 2, 31, -1": LANE ^ 2,
    "shfl.sync.up.b32 d, %r1, 3, 0, -1": where(LANE >= 3, LANE - 3, LANE),
    "shfl.sync.down.b32 d, %r1, 3, 31, -1": where(LANE < 29, LANE + 3, LANE),
    # Whether the lane that is shuffled from is in range.
    "shfl.sync.down.b32 %r15|%p1, %r1, 3, 31, -1; selp.b32 d, 1, 0, %p1": LANE < 29,
    # The first eight lanes alone.
    "redux.sync.add.u32 %r15, %r1, 0xff; setp.lt.u32 %p1, %r1, 8; selp.b32 d, %r15, 0, %p1": 28 * (LANE < 8),
    # A lane whose guard is false keeps what it had.
    "mov.u32 d, 7; setp.lt.u32 %p1, %r1, 4; @%p1 mov.u32 d, 1; @!%p1 add.u32 d, d, 1": where(LANE < 4, 1, 8),
    # A branch back, taken until a condition fails.
    "mov.u32 d, 0; mov.u32 %r15, 0; $L: add.u32 d, d, %r15; add.u32 %r15, %r15, 1; setp.lt.u32 %p1, %r15, 10; @%p1 bra $L": (
        torch.full((32,), 45)
    ),
}
WORDS = LANE * 0x9E3779B9 % 2**32
for opcode, total in {  # the same in all lanes
    "add.s32": WORDS.sum(),
    "min.s32": signed(WORDS).min(),
    "max.u32": WORDS.max(),
    "or.b32": torch.tensor(functools.reduce(operator.or_, WORDS.tolist())),
}.items():
    OF_LANES[f"mul.lo.u32 %r15, %r1, 0x9E3779B9; redux.sync.{opcode} d, %r15, -1"] = total.expand(32)


def test_lanes() -> None:
    """Results of each lane for its lane number."""
    for instruction, expected in OF_LANES.items():
        found = execute_each(instruction, [], torch.zeros(32, dtype=torch.int32))
        assert torch.equal(found, expected.int()), instruction


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

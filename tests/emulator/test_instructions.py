"""Single PTX instructions on special and random values, compared with Python and torch."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
import re
from collections.abc import Callable
from inspect import signature

import pytest
import torch

from tests.tolerance import assert_at_most
from tools.emulator.decode import CORE, _expanded, decode, lanewise
from tools.emulator.handwritten import execute, kernel
from tools.emulator.ptx import UnknownPTX

BITS = 2**32
SPECIAL = (0, 1, 2, 31, 32, 33, 255, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)


def signed(value: int, bits: int = 32) -> int:
    value %= 2**bits
    return value - 2**bits if value >= 2 ** (bits - 1) else value


def logic(table: int, a: int, b: int, c: int) -> int:
    return sum(1 << bit for bit in range(32) if table >> (4 * (a >> bit & 1) + 2 * (b >> bit & 1) + (c >> bit & 1)) & 1)


def extract(a: int, first: int, count: int, is_signed: bool) -> int:
    first, count = first & 255, count & 255
    wide = signed(a) if is_signed else a
    field = wide >> first & ((1 << count) - 1)
    if is_signed and count and wide >> min(first + count - 1, 31) & 1:
        field -= 1 << count
    return field


def insert(field: int, value: int, first: int, count: int) -> int:
    first, count = first & 255, count & 255
    mask = ((1 << count) - 1) << first
    return value & ~mask | field << first & mask


def permute(a: int, b: int, selectors: int) -> int:
    found = 0
    for place in range(4):
        selector = selectors >> 4 * place & 15
        byte = (b << 32 | a) >> 8 * (selector & 7) & 255
        found |= (0xFF * (byte >> 7) if selector & 8 else byte) << 8 * place
    return found


def quotient(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


HALVES = "cvt.u16.u32 %h0, %r11; cvt.u16.u32 %h1, %r12"
INTEGERS: dict[str, Callable[..., int]] = {
    "add.u32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: a * b,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "mul.hi.s32": lambda a, b: signed(a) * signed(b) >> 32,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "div.u32": lambda a, b: a // b if b else -1,
    "div.s32": lambda a, b: quotient(signed(a), signed(b)),
    "rem.u32": lambda a, b: a % b if b else a,
    "rem.s32": lambda a, b: signed(a) - quotient(signed(a), signed(b)) * signed(b) if b else a,
    "neg.s32": lambda a: -a,
    "abs.s32": lambda a: abs(signed(a)),
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "max.u32": lambda a, b: max(a, b),
    "min.relu.s32": lambda a, b: max(0, min(signed(a), signed(b))),
    "and.b32": lambda a, b: a & b,
    "not.b32": lambda a: ~a,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32": lambda a, b: signed(a) >> min(b, 31),
    "shf.l.wrap.b32": lambda a, b, c: (b << 32 | a) << c % 32 >> 32,
    "shf.r.wrap.b32": lambda a, b, c: (b << 32 | a) >> c % 32,
    "shf.l.clamp.b32": lambda a, b, c: (b << 32 | a) << min(c, 32) >> 32,
    "shf.r.clamp.b32": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "bfe.u32": lambda a, b, c: extract(a, b, c, False),
    "bfe.s32": lambda a, b, c: extract(a, b, c, True),
    "bfi.b32": insert,
    "prmt.b32": permute,
    "clz.b32": lambda a: 32 - a.bit_length(),
    "popc.b32": lambda a: a.bit_count(),
    # Results of 64 bits.
    "mul.wide.u32 %d20, %r11, %r12": lambda a, b: a * b,
    "mul.wide.s32 %d20, %r11, %r12": lambda a, b: signed(a) * signed(b),
    f"{HALVES}; mad.wide.u16 %r13, %h0, %h1, %r12; cvt.u64.u32 %d20, %r13": lambda a, b: (a % 2**16 * (b % 2**16) + b) % BITS,
    f"{HALVES}; mad.wide.s16 %r13, %h0, %h1, %r12; cvt.s64.s32 %d20, %r13": lambda a, b: signed(
        signed(a, 16) * signed(b, 16) + b
    ),
    "mov.b64 %d20, {%r11, %r12}": lambda a, b: b << 32 | a,
    "cvt.s64.s32 %d20, %r11": signed,
    "cvt.u64.u32 %d20, %r11": lambda a: a,
    "cvt.u16.u32 %h0, %r11; cvt.s64.s16 %d20, %h0": lambda a: signed(a, 16),
    "cvt.u16.u32 %h0, %r11; cvt.u64.u16 %d20, %h0": lambda a: a % 2**16,
    "cvt.u16.u32 %h0, %r11; cvt.s64.s8 %d20, %h0": lambda a: signed(a, 8),
    "mov.b64 %d21, {%r11, %r12}; shr.s64 %d20, %d21, 7": lambda a, b: signed(b << 32 | a, 64) >> 7,
    "mov.b64 %d21, {%r12, %r11}; mov.b64 {_, %r13}, %d21; cvt.u64.u32 %d20, %r13": lambda a, b: a,
}
for table in range(256):  # of three inputs
    INTEGERS[f"lop3.b32 %r10, %r11, %r12, %r13, {table:#x}"] = functools.partial(logic, table)


def operands(count: int, lanes: int, seed: int) -> list[list[int]]:
    """Special and random integers for each operand."""
    choose = random.Random(seed)
    drawn = lambda: choose.choice((choose.choice(SPECIAL), choose.randrange(64), choose.randrange(BITS)))  # noqa: E731
    return [[drawn() for _ in range(lanes)] for _ in range(count)]


def as_tensor(words: list[int]) -> torch.Tensor:
    return torch.tensor([signed(word) for word in words], dtype=torch.int32)


def apply(instruction: str, sources: list[torch.Tensor], result: torch.Tensor) -> None:
    """Execute %r10 = f(%r11, %r12, ...), one program for 32 elements; 64-bit results are in %d20."""
    loads = "".join(f"add.s64 %d10, %d{index}, %d9; ld.global.b32 %r{11 + index}, [%d10];\n" for index in range(len(sources)))
    width = result.element_size()
    register = {2: "%h10", 4: "%r10", 8: "%d20"}[width]
    body = f"""
    mov.u32 %r4, %ctaid.x; shl.b32 %r4, %r4, 5; add.u32 %r4, %r4, %r1; mul.wide.u32 %d9, %r4, 4;
    {loads}
    {instruction};
    mul.wide.u32 %d9, %r4, {width}; add.s64 %d10, %d{len(sources)}, %d9; st.global.b{8 * width} [%d10], {register};
    """
    report = execute(body, [*sources, result], grid=result.numel() // 32)
    assert report.finished and not report.findings, report.findings


def test_integers() -> None:
    for instruction, function in INTEGERS.items():
        count = len(signature(function).parameters) if function is not signed else 1
        if " " not in instruction:
            instruction += " " + ", ".join(f"%r{10 + index}" for index in range(count + 1))
        words, bits = operands(count, 256, seed=1), 64 if "%d20" in instruction else 32
        result = torch.zeros(256, dtype=torch.int64 if bits == 64 else torch.int32)
        apply(instruction, [as_tensor(operand) for operand in words], result)
        for inputs, found in zip(zip(*words, strict=True), result.tolist(), strict=True):
            assert found == signed(function(*inputs), bits), (instruction, *map(hex, inputs))


def floats() -> torch.Tensor:
    """Return float32 values of all magnitudes, among them limits and subnormals of float16, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    edges = [0.0, -0.0, 65504.0, 65519.9, 65520.0, -65536.0, 2**-14, 2**-24, 2**-25, 1.0000001 * 2**-25, math.inf, -math.inf]
    spread = torch.randn(1024 - 13, generator=generator) * 2.0 ** torch.randint(-30, 30, (1011,), generator=generator)
    return torch.cat((torch.tensor([*edges, math.nan]), spread)).float()


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal bits, with signs of zeros, and NaN in the same places."""
    assert torch.equal(actual.isnan(), expected.isnan())
    integers = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    assert torch.equal(actual.nan_to_num(1.5).view(integers), expected.nan_to_num(1.5).view(integers))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_16_bits(dtype: torch.dtype) -> None:
    """Rounding to nearest with ties to even, as in torch, and exact conversion back."""
    name = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    values = floats()
    result = torch.zeros(len(values), dtype=dtype)
    apply(f"cvt.rn.{name}.f32 %h10, %r11", [values], result)
    assert_same_bits(result, values.to(dtype))
    pairs = torch.zeros(len(values), 2, dtype=dtype)
    apply(f"cvt.rn.{name}x2.f32 %r10, %r12, %r11", [values, values.flip(0).contiguous()], pairs.view(torch.int32).flatten())
    assert_same_bits(pairs, torch.stack((values, values.flip(0)), -1).to(dtype))
    back = torch.zeros(len(values))
    apply(f"cvt.u16.u32 %h0, %r11; cvt.f32.{name} %r10, %h0", [all_halves()[: len(values)]], back)
    assert_same_bits(back, all_halves()[: len(values)].short().view(dtype).float())


def test_sums_in_16_bits() -> None:
    """Sums are rounded once, as in torch."""
    left, right = all_halves(), all_halves().roll(1)
    total = left.short().view(torch.float16) + right.short().view(torch.float16)
    result = torch.zeros(len(left), dtype=torch.float16)
    apply("cvt.u16.u32 %h1, %r11; cvt.u16.u32 %h2, %r12; add.f16 %h10, %h1, %h2", [left, right], result)
    assert_same_bits(result, total)
    pairs = torch.zeros(len(left) // 2, dtype=torch.int32)
    both = [half.short().view(torch.int32) for half in (left, right)]
    apply("add.f16x2 %r10, %r11, %r12", both, pairs)
    assert_same_bits(pairs.view(torch.float16), total)


def all_halves() -> torch.Tensor:
    """All 16-bit patterns, in some order, in 32 bits."""
    return torch.randperm(65536, generator=torch.Generator().manual_seed(0)).int()


def test_saturation_keeps_nan() -> None:
    """satfinite replaces infinities by the largest value, and keeps NaN (PTX ISA, cvt)."""
    values = floats()
    pairs = torch.zeros(len(values), 2, dtype=torch.float16)
    apply("cvt.rn.satfinite.f16x2.f32 %r10, %r11, %r11", [values], pairs.view(torch.int32).flatten())
    assert_same_bits(pairs[:, 0].contiguous(), values.clamp(-65504, 65504).half())
    assert pairs[12].isnan().all() and pairs[10, 0] == 65504


def test_tf32_rounds_ties_away() -> None:
    values = torch.tensor([1.0, 1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-11), 1 + 2**-12, math.inf] + [0.0] * 26)
    result = torch.zeros(32)
    apply("cvt.rna.tf32.f32 %r10, %r11", [values], result)
    assert result[:6].tolist() == [1.0, 1 + 2**-10, 1 + 2**-9, -(1 + 2**-10), 1.0, math.inf]


FLOATS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add.f32": torch.add,
    "mul.f32": torch.mul,
    "sub.f32": torch.sub,
    "div.full.f32": torch.div,
    "min.f32": torch.fmin,
    "max.f32": torch.fmax,
    "min.NaN.f32": torch.minimum,
    "max.NaN.f32": torch.maximum,
}


@pytest.mark.parametrize("opcode", FLOATS)
def test_floats(opcode: str) -> None:
    a, b = floats(), floats().roll(500)
    result = torch.zeros(len(a))
    apply(f"{opcode} %r10, %r11, %r12", [a, b], result)
    assert_same_bits(result + 0.0, FLOATS[opcode](a, b) + 0.0)  # torch does not say which zero is the smaller one


def test_smaller_zero_is_the_negative_one() -> None:
    zeros = torch.tensor([0.0, -0.0] * 16)
    for opcode, expected in (("min.f32", -zeros.new_zeros(32)), ("max.f32", zeros.new_zeros(32))):
        result = torch.ones(32)
        apply(f"{opcode} %r10, %r11, %r12", [zeros, zeros.roll(1)], result)
        assert_same_bits(result, expected)


FUNCTIONS = {
    "ex2.approx.ftz.f32 %r10, %r11": torch.exp2,
    "lg2.approx.ftz.f32 %r10, %r11": torch.log2,
    "rcp.approx.ftz.f32 %r10, %r11": torch.reciprocal,
    "tanh.approx.f32 %r10, %r11": torch.tanh,
    "sqrt.rn.f32 %r10, %r11": torch.sqrt,
    "cvt.rzi.s32.f32 %r12, %r11; cvt.rn.f32.s32 %r10, %r12": torch.trunc,
}


@pytest.mark.parametrize("instruction", FUNCTIONS)
def test_functions(instruction: str) -> None:
    """One rounding: half a unit in the last place, with a factor of two of room."""
    values = torch.rand(320, generator=torch.Generator().manual_seed(0)) * 20 + 0.01
    result = torch.zeros(320)
    apply(instruction, [values], result)
    exact = FUNCTIONS[instruction](values.double())
    assert_at_most("result", (result - exact).abs(), torch.finfo(torch.float32).eps * exact.abs())


def test_fused_multiply_add_rounds_once() -> None:
    """fma computes (1 + x)^2 - (1 + 2 x) = x^2; with a rounded product it would be 0."""
    x, eps = 2.0**-12, torch.finfo(torch.float32).eps
    assert x**2 < eps
    for instruction, expected in (
        ("fma.rn.f32 %r10, %r11, %r11, %r12", x**2),
        ("mul.f32 %r14, %r11, %r11; add.f32 %r10, %r14, %r12", 0.0),
    ):
        result = torch.ones(32)
        apply(instruction, [torch.full((32,), 1 + x), torch.full((32,), -1 - 2 * x)], result)
        assert result.tolist() == [expected] * 32


COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b and a == a and b == b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: not (a < b or a > b),
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: not a >= b,
    "leu": lambda a, b: not a > b,
    "gtu": lambda a, b: not a <= b,
    "geu": lambda a, b: not a < b,
    "num": lambda a, b: a == a and b == b,
    "nan": lambda a, b: a != a or b != b,
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_of_floats(name: str) -> None:
    pairs = list(itertools.product((0.0, 1.0, -1.0, math.nan), repeat=2)) * 2
    a, b = (torch.tensor(values) for values in zip(*pairs, strict=True))
    result = torch.zeros(32, dtype=torch.int32)
    apply(f"setp.{name}.f32 %p1, %r11, %r12; selp.b32 %r10, 1, 0, %p1", [a, b], result)
    assert result.tolist() == [int(COMPARISONS[name](*pair)) for pair in pairs]


def test_comparisons_of_integers() -> None:
    """Signed and unsigned comparisons, combined with a predicate, and their complement."""
    words = operands(2, 128, seed=4)
    result = torch.zeros(128, dtype=torch.int32)
    instruction = """setp.lt.s32 %p1, %r11, %r12; setp.lt.u32 %p2, %r11, %r12; setp.hi.and.u32 %p3|%p4, %r11, %r12, !%p1;
    selp.b32 %r4, 1, 0, %p1; selp.b32 %r5, 2, 0, %p2; selp.b32 %r6, 4, 0, %p3; selp.b32 %r7, 8, 0, %p4;
    or.b32 %r4, %r4, %r5; or.b32 %r6, %r6, %r7; or.b32 %r10, %r4, %r6"""
    apply(instruction.replace("%r4", "%r14"), [as_tensor(operand) for operand in words], result)
    for a, b, found in zip(*words, result.tolist(), strict=True):
        less, below = signed(a) < signed(b), a < b
        assert found == less + 2 * below + 4 * (a > b and not less) + 8 * (a <= b and not less)


WORDS = [lane * 0x9E3779B9 % BITS for lane in range(32)]
REDUCTIONS: dict[str, int] = {
    "add.s32": signed(sum(WORDS)),
    "min.s32": min(map(signed, WORDS)),
    "max.u32": signed(max(WORDS)),
    "or.b32": signed(functools.reduce(operator.or_, WORDS)),
}
LANES: dict[str, Callable[[int], int]] = {
    "shfl.sync.idx.b32 %r10, %r1, 5, 31, -1": lambda lane: 5,
    "shfl.sync.idx.b32 %r10, %r1, 5, 0x181f, -1": lambda lane: lane // 8 * 8 + 5,  # segments of 8
    "shfl.sync.bfly.b32 %r10, %r1, 2, 31, -1": lambda lane: lane ^ 2,
    "shfl.sync.up.b32 %r10, %r1, 3, 0, -1": lambda lane: lane - 3 if lane >= 3 else lane,
    "shfl.sync.down.b32 %r10, %r1, 3, 31, -1": lambda lane: lane + 3 if lane < 29 else lane,
    # Whether the lane that is shuffled from is in range.
    "shfl.sync.down.b32 %r11|%p1, %r1, 3, 31, -1; selp.b32 %r10, 1, 0, %p1": lambda lane: lane < 29,
    # The first eight lanes alone.
    "redux.sync.add.u32 %r11, %r1, 0xff; setp.lt.u32 %p1, %r1, 8; selp.b32 %r10, %r11, 0, %p1": lambda lane: 28 * (lane < 8),
    # A lane whose guard is false keeps what it had.
    "mov.u32 %r10, 7; setp.lt.u32 %p1, %r1, 4; @%p1 mov.u32 %r10, 1; @!%p1 add.u32 %r10, %r10, 1": lambda lane: (
        1 if lane < 4 else 8
    ),
    # A branch back, taken until a condition fails.
    "mov.u32 %r10, 0; mov.u32 %r11, 0; $L: add.u32 %r10, %r10, %r11; add.u32 %r11, %r11, 1; setp.lt.u32 %p1, %r11, 10;"
    "@%p1 bra $L": lambda lane: 45,
}
for opcode, total in REDUCTIONS.items():  # the same in all lanes
    LANES[f"mul.lo.u32 %r11, %r1, 0x9E3779B9; redux.sync.{opcode} %r10, %r11, -1"] = ([total] * 32).__getitem__


@pytest.mark.parametrize("instruction", LANES)
def test_lanes(instruction: str) -> None:
    """Results of each lane for its lane number."""
    result = torch.zeros(32, dtype=torch.int32)
    apply(instruction, [], result)
    assert result.tolist() == [LANES[instruction](lane) for lane in range(32)]


def test_vectors() -> None:
    """Vector loads and stores; signed bytes are extended, words are truncated."""
    source = torch.arange(-64, 64, dtype=torch.int8).view(32, 4)
    result = torch.zeros(32, 4, dtype=torch.int32)
    body = """mul.wide.u32 %d4, %r1, 4; add.s64 %d4, %d4, %d0; mul.wide.u32 %d5, %r1, 16; add.s64 %d5, %d5, %d1;
    ld.global.v4.s8 {%r10, %r11, %r12, %r13}, [%d4]; st.global.v4.b32 [%d5], {%r10, %r11, %r12, %r13};"""
    report = execute(body, [source, result])
    assert not report.findings and torch.equal(result, source.int())
    halves = torch.zeros(32, 2, dtype=torch.int16)
    body = """mul.wide.u32 %d4, %r1, 4; add.s64 %d5, %d4, %d1; add.s64 %d4, %d4, %d0;
    ld.global.b32 %r10, [%d4]; mov.b32 {%h1, %h2}, %r10; st.global.v2.b16 [%d5+0], {%h1, %h2};"""
    assert not execute(body, [torch.arange(32, dtype=torch.int32) * 65537, halves]).findings
    assert torch.equal(halves, torch.arange(32, dtype=torch.int16)[:, None].expand(32, 2))


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("atom.global.add.f32 %r4, [%d0], %r5", "atom.global.add.f32"),
        ("min.something.s32 %r4, %r5, %r6", "min.something.s32"),
        ("tcgen05.fence::before_thread_sync", "tcgen05.fence::before_thread_sync"),
        ("ld.volatile.global.b32 %r4, [%d0]", "ld.volatile.global.b32"),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 %r4, %r5, %r6, %r7", "m16n8k32"),
        ("mov.b32 %r4, %nothing", "%nothing"),
        ("add.s32 %r4, %d1, %r5", "%d1 has 64 bits instead of 32"),
        ("add.s32 %r4, %r5", "add.s32 with 2 operands"),
        ("bra $nowhere", "$nowhere"),
        (None, "no kernel"),
    ],
)
def test_unknown_instructions_are_named(statement: str | None, named: str) -> None:
    with pytest.raises(UnknownPTX, match=re.escape(named)):
        decode(kernel(f"{statement};") if statement else ".version 8.0\n.target sm_80\n")


def test_no_instruction_is_listed_twice() -> None:
    """With alternatives in braces expanded, each opcode has one line."""
    text = (CORE / "lanewise.def").read_text()
    opcodes = [opcode for listed in re.findall(r'^\w+\(\w+, "([^"]+)"', text, re.MULTILINE) for opcode in _expanded(listed)]
    assert len(lanewise()) == len(opcodes)

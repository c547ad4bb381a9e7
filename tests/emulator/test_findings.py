"""PTX kernels with one error each, which the emulator reports by name, and the same kernels without it."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch

from tests.tolerance import assert_near
from tools.emulator.handwritten import SHARED_BASE, execute
from tools.emulator.machine import Report, kinds

SEEDS = range(6)
"""Seeds of the order in which warps take turns, on which findings must not depend."""


class Kernel(NamedTuple):
    """A body that gets a tensor of 64 integers; with wgmma, operands and results of a product.

    found: the name of its error, or "". possible: another error that may be found with it or before it.
    """

    found: str
    body: str
    warps: int = 1
    grid: int = 1
    possible: str = ""


GLOBAL_BOUNDS, SHARED_BOUNDS, MISALIGNED = "global memory out of bounds", "shared memory out of bounds", "misaligned address"
UNINITIALISED, UNDELIVERED = "read of uninitialised shared memory", "access to what cp.async has not delivered"
RACE, PROGRAMS, LANES = (
    "shared memory race",
    "global memory race between programs",
    "two lanes store different values to one address",
)
DIVERGENT, DEADLOCK, LIMIT = "divergent branch", "deadlock", "instruction limit"
UNCOVERED, IN_FLIGHT = "wgmma reads what no proxy fence covers", "access to registers of a wgmma in flight"
LATE = "wgmma uses a register written after wgmma.fence"  # only a note
DESCRIPTOR = "matrix descriptor that lanes disagree on or that is not modelled"

MINE = "shl.b32 %r4, %r0, 2; add.u32 %r4, %r4, %r3;"  # address of this thread's word of shared memory
OTHERS = "xor.b32 %r5, %r0, 32; shl.b32 %r5, %r5, 2; add.u32 %r5, %r5, %r3;"  # of the same lane's word in the other warp
EARLIER = f"{MINE} {OTHERS} st.shared.b32 [%r4], %r0; bar.sync 0;"  # all words are written, before a barrier
STORE, LOAD = "st.shared.b32 [%r4], 7;", "ld.shared.b32 %r6, [%r5];"  # of one's own word, of the other warp's
LANES_WORD = f"{EARLIER} shl.b32 %r6, %r1, 2; add.u32 %r6, %r6, %r3;"  # address of a word that the same lanes of all warps share
HALF = "setp.lt.u32 %p1, %r1, 16; @%p1"  # of the lanes
OWN = "mov.u32 %r4, %ctaid.x; mul.wide.u32 %d4, %r4, 4; add.s64 %d4, %d4, %d0;"  # of the program's integer
GLOBAL = "mul.wide.u32 %d4, %r0, 4; add.s64 %d4, %d4, %d0;"  # address of this thread's integer
COPY = f"{MINE} {GLOBAL} cp.async.ca.shared.global [%r4], [%d4], 4; cp.async.commit_group;"
TWO_COPIES = f"{COPY} {COPY.replace('[%r4]', '[%r4+1024]')} cp.async.wait_group 1;"
COPIED = "cp.async.wait_group 0;"
MATRIX = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10},"
FOUR = "{%r4, %r4, %r4, %r4}"
MMA = f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%r10, %r11, %r12, %r13}}, {FOUR}, {{%r4, %r4}}, {FOUR};"

KERNELS = {
    "inside": Kernel("", f"{GLOBAL} ld.global.b32 %r4, [%d4+128]; st.global.b32 [%d4], %r4;"),
    "load beyond the end": Kernel(GLOBAL_BOUNDS, f"{GLOBAL} ld.global.b32 %r4, [%d4+132];"),
    "store before the beginning": Kernel(GLOBAL_BOUNDS, f"{GLOBAL} st.global.b32 [%d4+-4], %r1;"),
    "copy from beyond the end": Kernel(GLOBAL_BOUNDS, COPY.replace("[%d4]", "[%d4+132]") + COPIED),
    "a copy of nothing": Kernel("", f"mov.u32 %r9, 0; {COPY.replace('[%d4], 4', '[%d4+132], 4, %r9')} {COPIED}"),
    "shared store beyond the end": Kernel(SHARED_BOUNDS, "st.shared.b32 [%r3+65536], %r3;"),
    "shared load before the beginning": Kernel(SHARED_BOUNDS, "ld.shared.b32 %r4, [%r3+-4];"),
    "misaligned load": Kernel(MISALIGNED, "ld.global.v2.b32 {%r4, %r5}, [%d0+4];"),
    "misaligned shared store": Kernel(MISALIGNED, "st.shared.b32 [%r3+2], %r3;"),
    "misaligned copy": Kernel(MISALIGNED, "cp.async.ca.shared.global [%r3+4], [%d0], 8;", possible=UNDELIVERED),
    "misaligned matrix": Kernel(MISALIGNED, f"{EARLIER} {MATRIX} [%r3+8];"),
    "uninitialised word": Kernel(UNINITIALISED, "ld.shared.b32 %r4, [%r3];"),
    "half uninitialised word": Kernel(UNINITIALISED, "st.shared.b16 [%r3], 1; ld.shared.b32 %r4, [%r3];"),
    "uninitialised matrix": Kernel(UNINITIALISED, f"{MATRIX} [%r3];"),
    # ---- races
    "a barrier after the store": Kernel("", f"{EARLIER} {STORE} bar.sync 0; {LOAD}", 2),
    "no barrier after the store": Kernel(RACE, f"{EARLIER} {STORE} {LOAD}", 2),
    "a barrier after the load": Kernel("", f"{EARLIER} {LOAD} bar.sync 0; {STORE}", 2),
    "no barrier after the load": Kernel(RACE, f"{EARLIER} {LOAD} {STORE}", 2),
    "the wrong barrier": Kernel(RACE, f"{EARLIER} {STORE} add.u32 %r7, %r2, 1; bar.sync %r7, 32; {LOAD}", 2),
    "a barrier of some warps": Kernel("", f"{EARLIER} shr.u32 %r7, %r2, 1; {STORE} bar.sync %r7, 64; {LOAD}", 4),
    "two warps store different values": Kernel(RACE, f"{LANES_WORD} st.shared.b32 [%r6], %r0;", 2),
    "two warps store the same values": Kernel("", f"{LANES_WORD} st.shared.b32 [%r6], %r1;", 2),
    "neighbouring bytes": Kernel("", "add.u32 %r4, %r3, %r0; st.shared.b8 [%r4], 5;", 2),
    "lanes store different values": Kernel(LANES, "st.shared.b32 [%r3], %r1;"),
    "lanes store the same value": Kernel("", "st.shared.b32 [%r3], %r2;"),
    "lanes overlap": Kernel(LANES, "shl.b32 %r4, %r1, 1; add.u32 %r4, %r4, %r3; st.shared.b32 [%r4], %r1;", possible=MISALIGNED),
    "lanes store different values to global memory": Kernel(LANES, "st.global.b32 [%d0], %r1;"),
    "programs store to one address": Kernel(PROGRAMS, "mov.u32 %r4, %ctaid.x; st.global.b32 [%d0], %r4;", 1, 2),
    "a program reads what another stores": Kernel(PROGRAMS, f"{OWN} st.global.b32 [%d4], %r4; ld.global.b32 %r4, [%d0];", 1, 2),
    "programs store apart": Kernel("", f"{OWN} st.global.b32 [%d4], %r4;", 1, 3),
    # ---- cp.async
    "the copy has arrived": Kernel("", f"{COPY} {COPIED} ld.shared.b32 %r6, [%r4];"),
    "no wait for the copy": Kernel(UNDELIVERED, f"{COPY} ld.shared.b32 %r6, [%r4];"),
    "a wait for an earlier copy": Kernel(UNDELIVERED, f"{TWO_COPIES} ld.shared.b32 %r6, [%r4+1024];"),
    "the earlier copy has arrived": Kernel("", f"{TWO_COPIES} ld.shared.b32 %r6, [%r4];"),
    "a copy is overwritten": Kernel(UNDELIVERED, f"{COPY} st.shared.b32 [%r4], 0;"),
    "no barrier after the wait": Kernel(RACE, f"{EARLIER} {COPY} {COPIED} {LOAD}", 2, possible=UNDELIVERED),
    "a barrier after the wait": Kernel("", f"{EARLIER} {COPY} {COPIED} bar.sync 0; {LOAD}", 2),
    "copies that are too long": Kernel(
        "cp.async copies more than its size", f"mov.u32 %r9, 8; {COPY.replace('], 4', '], 4, %r9')} {COPIED}"
    ),
    # ---- control
    "lanes part": Kernel(DIVERGENT, f"{HALF} bra $END; mov.u32 %r4, 0; $END:"),
    "lanes end apart": Kernel(DIVERGENT, f"{HALF} ret;"),
    "warps part": Kernel("", "setp.eq.u32 %p1, %r2, 0; @%p1 bra $END; mov.u32 %r4, 0; $END:", 2),
    "too few warps for a barrier": Kernel(DEADLOCK, "bar.sync 1, 96;", 2),
    "warps wait for each other": Kernel(DEADLOCK, "bar.sync %r2, 64;", 2),
    "warps that have ended are not waited for": Kernel("", "setp.eq.u32 %p1, %r2, 0; @%p1 ret; bar.sync 0;", 3),
    "no end": Kernel(LIMIT, "$L: bra $L;"),
    "shuffle from a lane that is not there": Kernel(
        "shuffle from a lane that does not take part", f"{HALF} shfl.sync.bfly.b32 %r4, %r1, 16, 31, -1;"
    ),
    "shuffle within the lanes that are there": Kernel("", f"{HALF} shfl.sync.bfly.b32 %r4, %r1, 8, 31, -1;"),
    "a product of half a warp": Kernel("instruction needs all lanes of the warp", f"mov.u32 %r4, 0; {HALF} {MMA}"),
    "a product of no lane": Kernel("", "setp.lt.u32 %p1, %r1, 0; @%p1 bar.sync 0;"),
}

# ---- wgmma: 64 x 16 halves times 16 x 8, without a swizzle

LEFT, RIGHT = SHARED_BASE, SHARED_BASE + 2048


def descriptor(start: int, leading: int, stride: int, swizzle: int = 0) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | swizzle << 62


WORDS = "shl.b32 %r4, %r0, 4; add.u32 %r4, %r4, %r3; mul.wide.u32 %d4, %r0, 16; add.s64 %d4, %d4, %d0;"  # of 16 bytes
FILL = f"""{WORDS} setp.lt.u32 %p1, %r0, 16;
ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d4]; st.shared.v4.b32 [%r4], {{%r10, %r11, %r12, %r13}};
@%p1 ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%d4+2048]; @%p1 st.shared.v4.b32 [%r4+2048], {{%r10, %r11, %r12, %r13}};
mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0; mov.b32 %r24, 0; mov.b32 %r28, 0;"""
START = "fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned;"
SUMS = "{%r20, %r21, %r22, %r23}"
MULTIPLY = f"""wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {SUMS},
{descriptor(LEFT, 128, 256)}, {descriptor(RIGHT, 128, 256)}, 1, 1, 1, 0, 0;"""
FROM_REGISTERS = f"""wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {SUMS}, {{%r24, %r24, %r24, %r28}},
{descriptor(RIGHT, 128, 256)}, 0, 1, 1, 0;"""
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
RESULTS = """mul.wide.u32 %d4, %r0, 16; add.s64 %d4, %d4, %d1; st.global.v4.b32 [%d4], {%r20, %r21, %r22, %r23};"""
CHANGE_LEFT = "st.shared.b32 [%r4], 0;"
UNFENCED = START.replace("fence.proxy.async.shared::cta;", "")


def product(start: str = START, multiply: str = MULTIPLY, before_wait: str = "", after_wait: str = "", wait: str = WAIT) -> str:
    """Store operands, multiply them, and wait for the product."""
    return f"{FILL} {start} {multiply} {COMMIT} {before_wait} {wait} {after_wait}"


def with_left(descriptor_of_left: str) -> str:
    return MULTIPLY.replace(str(descriptor(LEFT, 128, 256)), descriptor_of_left)


PRODUCTS = {
    "right": ("", product(after_wait=RESULTS)),
    "no fence": (UNCOVERED, product(UNFENCED)),
    "the fence comes too early": (UNCOVERED, f"fence.proxy.async; {product(UNFENCED)}"),
    "a store after the fence": (UNCOVERED, product(START.replace("bar", CHANGE_LEFT + "bar"))),
    "no barrier": (RACE, f"{FILL} bar.sync 0; {product(START.replace('bar.sync 0;', '')).replace('[%d4+2048]', '[%d4]')}"),
    "an operand is overwritten": (RACE, product(before_wait=CHANGE_LEFT)),
    "an operand is overwritten after the wait": ("", product(after_wait="bar.sync 0;" + CHANGE_LEFT)),
    "the wait is for an earlier group": (
        RACE,
        product(before_wait=MULTIPLY + COMMIT, wait=WAIT.replace("0;", "1;"), after_wait=CHANGE_LEFT),
    ),
    "nothing was committed": (RACE, product(after_wait=CHANGE_LEFT).replace(COMMIT, "")),
    "another warp's operand": (RACE, product(after_wait="st.shared.b32 [%r4+2048], 7;")),
    "products in a row": ("", product(multiply=MULTIPLY * 2, after_wait=RESULTS)),
    "sums are used too early": (IN_FLIGHT, product(before_wait="add.f32 %r30, %r20, %r20;")),
    "sums are written too early": (IN_FLIGHT, product(before_wait="mov.b32 %r20, 0;")),
    "sums are the next product's left matrix": (
        IN_FLIGHT,
        product(before_wait=FROM_REGISTERS.replace("%r28", "%r20").replace(SUMS, "{%r40, %r41, %r42, %r43}") + COMMIT),
    ),
    "the left matrix is in registers": ("", product(multiply=FROM_REGISTERS, after_wait="mov.b32 %r24, 1;")),
    "the left matrix is changed too early": (IN_FLIGHT, product(multiply=FROM_REGISTERS, before_wait="mov.b32 %r24, 1;")),
    "the left matrix is written, but not changed": ("", product(multiply=FROM_REGISTERS, before_wait="mov.b32 %r24, 0;")),
    "sums are written after the fence": (LATE, product(multiply="mov.b32 %r20, 0;" + MULTIPLY)),
    "lanes have different descriptors": (
        DESCRIPTOR,
        product(
            f"{START} cvt.u64.u32 %d9, %r1; mov.b64 %d10, {descriptor(LEFT, 128, 256)}; or.b64 %d10, %d10, %d9;",
            with_left("%d10"),
        ),
    ),
    "the swizzle has an offset": (DESCRIPTOR, product(multiply=with_left(str(descriptor(LEFT, 128, 256) | 1 << 49)))),
}


KERNELS |= {name: Kernel(found, body, 4) for name, (found, body) in PRODUCTS.items()}


def found_by(report: Report) -> set[str]:
    return {finding.what for finding in report.findings}


@pytest.mark.parametrize("name", KERNELS)
def test_finding(name: str) -> None:
    """The error is found for any order of the warps; it ends the kernel only if nothing can go on."""
    found, body, warps, grid, possible = KERNELS[name]
    product = torch.zeros(64 * 16 + 8 * 16, dtype=torch.float16), torch.zeros(128, 4)
    tensors = product if "wgmma" in body else (torch.zeros(64, dtype=torch.int32),)
    for seed in SEEDS if warps > 1 else (0,):
        report = execute(body, tensors, warps=warps, grid=grid, seed=seed)
        assert {found} - {""} <= found_by(report) <= {found, possible} - {""}, report.findings
        assert report.finished == found_by(report).isdisjoint({DIVERGENT, DEADLOCK, LIMIT})
        assert report.names == found_by(report) - {LATE}


def test_errors_name_both_instructions() -> None:
    """Findings name the program, and races also the other access."""
    integers = [torch.zeros(64, dtype=torch.int32)]
    finding = execute(KERNELS["no barrier after the store"].body, integers, warps=2).findings[0]
    accesses = {finding.instruction, re.sub(r"^warp \d, | \(.*$", "", finding.other)}
    assert accesses == {"st.shared.b32 [%r4], 7", "ld.shared.b32 %r6, [%r5]"}
    (finding,) = execute(KERNELS["programs store to one address"].body, integers, grid=2).findings
    assert finding.program == 1 and finding.other == "program 0"
    assert "st.global.b32 [%d0], %r4" in str(finding) and "program 0" in str(finding)


def blocked(matrix: torch.Tensor) -> torch.Tensor:
    """Rows of 16 elements as blocks of 8 x 8, blocks of the same rows next to each other."""
    return matrix.view(-1, 8, 2, 8).transpose(1, 2).contiguous()


@pytest.mark.parametrize("seed", SEEDS)
def test_wgmma(seed: int) -> None:
    """wgmma computes the product; lane l of a warp has columns 2 (l % 4), 2 (l % 4) + 1 of rows l / 4 and l / 4 + 8."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(64, 16, generator=generator).half(), torch.randn(8, 16, generator=generator).half()
    results = torch.full((4, 8, 4, 2, 2), torch.nan)  # warp, row, pair of columns, row or 8 below, column
    operands = torch.cat((blocked(left).flatten(), blocked(right).flatten()))
    report = execute(PRODUCTS["right"][1], [operands, results], warps=4, seed=seed)
    assert not report.findings
    product = results.permute(0, 3, 1, 2, 4).reshape(64, 8)
    assert_near("product", product, (left.double() @ right.double().T).float())


def test_all_findings_are_tested() -> None:
    """Each kind of finding has a kernel in this file."""
    assert {kernel.found for kernel in KERNELS.values()} - {""} == {text for text, _ in kinds()}

"""How fast this GPU is at what bounds the kernels: reads from L2 and from memory, a copy, products, exponentials.

Numbers are random: products of zeros take less power, and are faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from bench.measure import timing
from bench.report.rows import in_one_line
from triton_relattn.kernels.introspect import selection

from .report import Report

ROUNDS = 20
SIZES = (16 << 20, 512 << 20, 8192, 512)
BLOCK = 1024


@triton.jit
def read_kernel(source, sums, blocks, passes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up blocks of float32, a program each so many apart; all of it several times."""
    place = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(passes):
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            total += tl.load(source + block * BLOCK + place, cache_modifier=".cg")
    tl.store(sums + tl.program_id(0) * BLOCK + place, total)


@triton.jit
def exponential_kernel(sums, turns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Base-2 exponentials, each of the result of the one before; four at a time."""
    place = tl.arange(0, BLOCK)
    a, b, c, d = place * 1e-6, place * 2e-6, place * 3e-6, place * 4e-6
    for _ in range(turns):
        a, b, c, d = tl.exp2(a - 2.0), tl.exp2(b - 2.0), tl.exp2(c - 2.0), tl.exp2(d - 2.0)
    tl.store(sums + tl.program_id(0) * BLOCK + place, a + b + c + d)


@dataclass
class Roof:
    """A measurement. work: in units of the rate for a call, which gives ``unit`` when it is divided by seconds."""

    name: str
    call: Callable[[], object]
    work: float
    unit: str


PRODUCTS = "products in bfloat16"


def roofs(sizes: tuple[int, int, int, int]) -> list[Roof]:
    """All measurements. sizes: bytes read from L2 and from memory, the side of matrices, turns of loops."""
    l2_bytes, memory_bytes, side, turns = sizes
    programs = 8 * selection.multiprocessors(torch.device("cuda"))
    source = torch.randn(memory_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    sums = torch.empty(programs * BLOCK, device="cuda")
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    grid = (programs,)

    def read(size: int, passes: int) -> object:
        return read_kernel[grid](source, sums, size // 4 // BLOCK, passes, BLOCK)

    exponentials = partial(exponential_kernel[grid], sums, turns, BLOCK)
    return [
        Roof(PRODUCTS, lambda: left @ right, 2 * side**3 / 1e12, "TFLOP/s"),
        Roof("reads from L2", partial(read, l2_bytes, 32), 32 * l2_bytes / 1e12, "TB/s"),
        Roof("reads from memory", partial(read, memory_bytes, 1), memory_bytes / 1e12, "TB/s"),
        Roof("a copy", lambda: target.copy_(source), 2 * memory_bytes / 1e12, "TB/s"),
        Roof("exponentials", exponentials, 4 * turns * programs * BLOCK / 1e12, "T/s"),
    ]


def measure_roofs(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """A row for each; the rate of products is kept, for shares of it."""
    for roof in roofs((BLOCK * 16, BLOCK * 32, 64, 2) if options.most else SIZES):
        row = {"case": roof.name, "unit": roof.unit, "variant": options.arch}
        if time.monotonic() > deadline:
            report.left(1)
            continue
        try:
            roof.call()
            step = timing.Step(lambda: None, lambda _, call=roof.call: (call(), ())[1])  # type: ignore[misc]
            timed = timing.Timed("roofs", roof.name, step=step)
            timing.time_in_turn([timed], "cuda", 0.5, ROUNDS)
            rate = roof.work / (1e-3 * min(timed.milliseconds))
            if roof.name == PRODUCTS:
                report.state.put("matrix_peak", rate)
            row |= {"value": rate, "status": "ok"}
            report.say(f"  {roof.name}: {rate:.4g} {roof.unit}")
        except Exception as error:
            row |= {"status": "failed", "message": in_one_line(error)}
        report.add(**row)
    report.done()

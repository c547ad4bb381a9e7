"""How fast this GPU is at what bounds the kernels: reads from L2 and from memory, a copy, products, exponentials, shuffles.

The model of cycles (tools/cycles/machine.py) assumes these rates of an H100 and an A100, or takes them from papers. Measured ones
say how far its predictions are off from the start.
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
from tools.cycles.machine import MACHINES
from triton_relattn.kernels.introspect import selection

from .report import Report

ROUNDS = 20
L2_BYTES, MEMORY_BYTES = 16 << 20, 512 << 20
SIDE = 8192
TURNS = 512
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


@triton.jit
def shuffle_kernel(sums, turns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over the threads of a warp, by five shuffles each; of 32 numbers by 32 threads."""
    place = tl.arange(0, BLOCK)
    values = tl.reshape(place * 1e-6, [BLOCK // 32, 32])
    for _ in range(turns):
        values = values * 0.5 + tl.sum(values, 1)[:, None] * 1e-3
    tl.store(sums + tl.program_id(0) * BLOCK + place, tl.reshape(values, [BLOCK]))


@dataclass
class Roof:
    """A measurement. work: in units of the rate for a call, which gives ``unit`` when it is divided by seconds. assumed: what the
    model takes, if it has it."""

    name: str
    call: Callable[[], object]
    work: float
    unit: str
    assumed: float | None


def roofs(device: str, arch: str, tiny: bool) -> list[Roof]:
    """All measurements, on a GPU of an architecture; tiny: of little memory."""
    machine = MACHINES.get(arch)
    l2_bytes, memory_bytes, side, turns = (BLOCK * 16, BLOCK * 32, 64, 2) if tiny else (L2_BYTES, MEMORY_BYTES, SIDE, TURNS)
    programs = selection.multiprocessors(torch.device(device)) * (1 if tiny else 8)
    source = torch.zeros(memory_bytes // 4, device=device)
    target = torch.empty_like(source)
    sums = torch.empty(programs * BLOCK, device=device)
    left, right = (torch.zeros(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    grid = (programs,)
    of_l2 = of_memory = of_exponentials = None
    if machine is not None:
        of_l2, of_memory = machine.l2_terabytes, machine.memory_terabytes
        of_exponentials = 16 * machine.multiprocessors * machine.gigahertz / 1e3  # 16 a cycle and multiprocessor

    def read(size: int, passes: int) -> object:
        return read_kernel[grid](source, sums, size // 4 // BLOCK, passes, BLOCK)

    return [
        Roof("reads from L2", partial(read, l2_bytes, 32), 32 * l2_bytes / 1e12, "TB/s", of_l2),
        Roof("reads from memory", partial(read, memory_bytes, 1), memory_bytes / 1e12, "TB/s", of_memory),
        Roof("a copy", lambda: target.copy_(source), 2 * memory_bytes / 1e12, "TB/s", of_memory),
        Roof("products in bfloat16", lambda: left @ right, 2 * side**3 / 1e12, "TFLOP/s", None),
        Roof(
            "exponentials",
            lambda: exponential_kernel[grid](sums, turns, BLOCK),
            4 * turns * programs * BLOCK / 1e12,
            "T/s",
            of_exponentials,
        ),
        Roof(
            "sums over a warp",
            lambda: shuffle_kernel[grid](sums, turns, BLOCK),
            turns * programs * BLOCK / 32 / 1e12,
            "T/s",
            None,
        ),
    ]


def measure_roofs(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """A row for each, with what the model of cycles takes for it."""
    for roof in roofs(options.device, options.arch, options.tiny):
        row = {"part": "roofs", "case": roof.name, "unit": roof.unit, "variant": options.arch}
        if time.monotonic() > deadline:
            report.left(1)
            continue
        try:
            roof.call()
            step = timing.Step(lambda: None, lambda _, call=roof.call: (call(), ())[1])  # type: ignore[misc]
            timed = timing.Timed("roofs", roof.name, step=step)
            timing.time_in_turn([timed], options.device, 0.0 if options.tiny else 0.5, ROUNDS)
            rate = roof.work / (1e-3 * min(timed.milliseconds))
            row |= {"value": f"{rate:.4g}", "status": "ok"}
            if roof.assumed:
                row["message"] = f"the model takes {roof.assumed:.3g}, measured by assumed {rate / roof.assumed:.2f}"
            report.say(f"roofs: {roof.name}: {rate:.4g} {roof.unit}; {row.get('message', 'the model has none')}")
        except Exception as error:
            row |= {"status": "error", "message": in_one_line(error)}
        report.add("checks.csv", row)

"""Predictions for a compiled kernel: cycles for 64 x 64 scores, what limits it, whether wgmma overlap anything."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from triton.compiler.compiler import CompiledKernel

from ..absent_gpu import assembler_for, disassembled
from .decode import ends_wgmma_group, is_matrix
from .machine import MACHINES, Machine
from .sass import loops, parse
from .simulate import Steady, steady

SCORES = 64 * 64
"""Cycles are given for so many scores, whatever the tile: kernels with other tiles can be compared."""
FULL = 0.8
"""A unit that is busy for so much of the time is what limits a loop."""


UNITS = ("issue", "alu", "fma", "mufu", "tensor", "shared memory", "L2")
"""Units that can limit a loop."""


@dataclass(frozen=True)
class Loop:
    """A loop over tiles of scores. turns: of it for SCORES."""

    turn: Steady
    turns: float

    @property
    def cycles(self) -> float:
        """Cycles of a multiprocessor for SCORES."""
        return self.turn.cycles * self.turns

    @property
    def operations(self) -> float:
        """Multiplications and additions of the matrix units for SCORES."""
        return self.turn.operations * self.turns

    @property
    def limit(self) -> str:
        """Return what limits it: the busiest unit if it is FULL, else what the scheduler waits for most."""
        unit = max(UNITS, key=lambda unit: self.turn.busy[unit])
        share = f"{unit} {self.turn.busy[unit]:.0%}"
        if self.turn.busy[unit] >= FULL:
            return share
        reason, wait = max(self.turn.waits.items(), key=lambda item: item[1])
        return f"{share}, waits for {reason} {wait:.0%}"


@dataclass(frozen=True)
class Prediction:
    """A kernel on a machine.

    Attributes:
        programs: that a multiprocessor runs at once.
        loops: those with matrix instructions, the longest first; where no loop has any, the longest loop.
        wgmma_products: products of matrices that the kernel starts as wgmma, each of which could overlap what follows.
        wgmma_groups: groups of wgmma in the machine code. More than products: the assembler waits after every single wgmma,
            because it could not keep the accumulators apart from what other instructions write.
    """

    machine: Machine
    programs: int
    loops: tuple[Loop, ...]
    wgmma_products: int
    wgmma_groups: int

    @property
    def cycles(self) -> float:
        """For SCORES in the longest loop: near the diagonal, where a table is bounded."""
        return self.loops[0].cycles

    @property
    def far_cycles(self) -> float | None:
        """For SCORES in the shortest loop, beyond a bounded table; None if there is one loop only."""
        return self.loops[-1].cycles if len(self.loops) > 1 else None

    @property
    def is_serialised(self) -> bool:
        """Whether the assembler waits after every single wgmma."""
        return self.wgmma_groups > self.wgmma_products

    def mean_cycles(self, near: float = 1.0) -> float:
        """For SCORES if a share ``near`` of the tiles lie near the diagonal: configurations are ranked by it, the least first."""
        return self.cycles if self.far_cycles is None else near * self.cycles + (1 - near) * self.far_cycles


def predict(
    kernel: CompiledKernel, block_m: int, block_n: int, machine: Machine | None = None, programs: int | None = None
) -> Prediction | None:
    """Return what the model says of a kernel whose loops take a tile of block_m x block_n scores in a turn; None without a model.

    Args:
        machine: instead of the one that the kernel is compiled for, with other figures.
        programs: that a multiprocessor runs at once, if there are not as many as fit.
    """
    target = kernel.metadata.target
    machine = machine or (MACHINES.get(f"sm_{target.arch}") if target.backend == "cuda" else None)
    if machine is None:
        return None
    products = kernel.asm["ptx"].count("wgmma.commit_group")
    return of_sass(
        disassembled(kernel), machine, kernel.metadata.num_warps, kernel.metadata.shared, block_m * block_n, products, programs
    )


def of_sass(
    sass: str, machine: Machine, warps: int, shared_bytes: int, scores: int, wgmma_products: int, most_programs: int | None = None
) -> Prediction:
    """Return what the model says of machine code. scores: of a turn of its loops. most_programs: that there are at once."""
    registers = int(re.findall(r"REG:(\d+)", sass)[0])
    programs = machine.programs_that_fit(warps, registers, shared_bytes)
    programs = min(programs, most_programs or programs)
    instructions = parse(sass)
    every = sorted(loops(instructions), key=len, reverse=True)
    chosen = [loop for loop in every if any(map(is_matrix, loop))] or every[:1]
    return Prediction(
        machine,
        programs,
        tuple(Loop(steady(loop, machine, warps, programs), SCORES / scores) for loop in chosen),
        wgmma_products,
        sum(map(ends_wgmma_group, instructions)),
    )


def teraflops(cycles: float, machine: Machine, head_dim: int, products: int) -> float:
    """Return how many 10^12 operations a second so many products of attention are, in so many cycles for SCORES.

    products: 2 of the forward, 5 of the backward, as FlashAttention counts, whatever a kernel computes besides.
    """
    return products * 2 * SCORES * head_dim / cycles * machine.cycles_per_second / 1e12


def near_share(first: int, last: int, num_keys: int, block_m: int, block_n: int) -> float:
    """Return the share of tiles near the diagonal, for Prediction.mean_cycles; a table of relative positions first to last."""
    return min(1.0, (last - first + block_m + block_n) / num_keys)


def why_serialised(kernel: CompiledKernel) -> str:
    """Return what the assembler says about wgmma that it has serialised; nothing if it has not."""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(kernel.asm["ptx"])
        target = re.findall(r"^\.target (\w+)", kernel.asm["ptx"], re.MULTILINE)[0]
        command = [assembler_for(target), "-v", f"--gpu-name={target}", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return " ".join(re.findall(r"\(C7515\) (.*)", log))

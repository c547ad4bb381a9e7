"""The forward and the backward of a call as sums of what their kernels take, and designs of the backward that can be compared so.

Cycles of a multiprocessor for 64 x 64 scores, as everywhere in the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from triton_relattn.kernels.configs import PROGRAMS_PER_MULTIPROCESSOR

from ..compile import KernelCase
from .machine import Machine
from .predict import SCORES, Prediction

FORWARD, BACKWARD = ("forward",), ("rows", "columns", "table")
"""Kernels of a direction."""
PRODUCTS = {FORWARD: 2, BACKWARD: 5}
"""Products that FlashAttention counts."""
WORD, SUM = 2, 4  # bytes of a dS in 16 bits and of an element of a partial sum


def of_call(
    found: Mapping[KernelCase, Prediction | None], call: KernelCase, kernels: Iterable[str], far: bool = False
) -> float | None:
    """Return the cycles of a direction; None if one of its kernels is not known.

    call: whatever its kernel. far: of scores beyond a bounded table, which the table kernel does not visit.
    """
    total = 0.0
    for kernel in kernels:
        if kernel == "table" and (far or call.features.startswith("none")):
            continue
        prediction = found.get(replace(call, kernel=kernel))
        if prediction is None or (far and prediction.far_cycles is None):
            return None
        total += prediction.mean_cycles(0.0 if far else 1.0)
    return total


@dataclass(frozen=True)
class Size:
    """A call whose heads share a table with a row for every pair."""

    batch: int = 4
    heads: int = 32
    length: int = 4096
    head_dim: int = 64

    @property
    def blocks(self) -> float:
        """How many times 64 x 64 scores it has."""
        return self.batch * self.heads * self.length**2 / SCORES


def moved(count: float, machine: Machine) -> float:
    """Return the cycles that so many bytes take from or to memory."""
    return count / machine.memory_rate


def partial_sums(size: Size, machine: Machine, block_n: int) -> float:
    """Return the bytes of the table kernel's partial sums. block_n: rows of the table that a program sums."""
    rows = 2 * size.length - 1
    programs = -(-rows // block_n)
    splits = max(1, min(size.batch * size.heads, PROGRAMS_PER_MULTIPROCESSOR * machine.multiprocessors // programs))
    return splits * rows * size.head_dim * SUM


def workspace(size: Size, machine: Machine, programs: int, block_m: int) -> float:
    """Return the bytes of dS in words for the queries that one wave of the rows kernel's programs has: linear in the length."""
    return machine.multiprocessors * programs * block_m * size.length * WORD


def designs(cycles: Mapping[str, float], size: Size, machine: Machine, table_block_n: int) -> dict[str, float]:
    """Return the cycles of the whole backward by design. cycles: of the kernels rows, columns and table.

    * three kernels: as it is; each partial sum is written and read once.
    * words of dS: the rows kernel writes dS, which it has as words of 16 bits anyway; a product reads them and makes the gradient
      of the table. Reading them takes longer than multiplying. The rows kernel hides its writing, or does not.
    """
    sums = 2 * moved(partial_sums(size, machine, table_block_n), machine) / size.blocks
    words = moved(SCORES * WORD, machine)
    rows, columns = cycles["rows"], cycles["columns"]
    return {
        "three kernels": rows + columns + cycles["table"] + sums,
        "words of dS, writing hidden": max(rows, words) + columns + words,
        "words of dS, writing not hidden": rows + words + columns + words,
    }

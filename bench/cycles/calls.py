"""The forward and the backward of a call as sums of what their kernels take, and designs of the backward that can be compared so.

Cycles of a multiprocessor for 64 x 64 scores, as everywhere in the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from triton_relattn.kernels.configs import KERNELS, PROGRAMS_PER_MULTIPROCESSOR
from triton_relattn.kernels.tile_config import OF_P2C, OF_QUERY, OF_TABLES, OF_WORDS

from ..cases.features import GRIDS
from ..compile import KernelCase
from .machine import Machine
from .predict import SCORES, Prediction

FORWARD, BACKWARD = KERNELS[:1], KERNELS[1:]
"""Kernels of a direction. A call with a workspace has OF_WORDS instead of the dtable and dp2c kernels."""
PRODUCTS = {FORWARD: 2, BACKWARD: 5}
"""Products that FlashAttention counts."""
WORD, SUM = 2, 4  # bytes of a dS in 16 bits and of an element of a partial sum


def of_call(
    found: Mapping[KernelCase, Prediction | None], call: KernelCase, kernels: Iterable[str], far: bool = False
) -> float | None:
    """Return the cycles of a direction; None if one of its kernels is not known.

    call: whatever its kernel. far: of scores beyond a bounded table, which no kernel of OF_TABLES visits.
    """
    total = 0.0
    has_workspace = any(replace(call, kernel=kernel) in found for kernel in OF_WORDS)
    has_query_words = not far and replace(call, kernel=OF_QUERY) in found
    has_p2c = any(replace(call, kernel=kernel) in found for kernel in OF_P2C)
    for kernel in kernels:
        if kernel in OF_TABLES and (far or call.features in GRIDS or call.features.startswith("none")):
            continue
        if kernel in OF_TABLES and (kernel in OF_WORDS) != has_workspace:
            continue
        if kernel in OF_P2C and not has_p2c:
            continue
        if (kernel == OF_QUERY and not has_query_words) or (kernel == "dq" and has_query_words):
            continue
        prediction = found.get(replace(call, kernel=kernel))
        if prediction is None or (far and prediction.far_cycles is None):
            return None
        total += cycles_of(kernel, prediction, 0.0 if far else 1.0)
    return total


def cycles_of(kernel: str, prediction: Prediction, near: float) -> float:
    """Return the cycles of a kernel if a share ``near`` of the tiles lie near the diagonal. Loops that read words (OF_QUERY has
    two) are no faster than these come from memory."""
    words = moved(SCORES * WORD, prediction.machine)
    if kernel == OF_QUERY:
        return sum(max(loop.cycles, words) for loop in prediction.loops)
    if kernel in OF_TABLES:
        return near * max(prediction.cycles, words * (kernel in OF_WORDS))
    return prediction.mean_cycles(near)


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
    """Return the bytes of the dtable kernel's partial sums. block_n: rows of the table that a program sums."""
    rows = 2 * size.length - 1
    programs = -(-rows // block_n)
    splits = max(1, min(size.batch * size.heads, PROGRAMS_PER_MULTIPROCESSOR * machine.multiprocessors // programs))
    return splits * rows * size.head_dim * SUM


def workspace(size: Size, machine: Machine, programs: int, block_n: int) -> float:
    """Return the bytes of words of the keys that one wave of the dkv kernel's programs has: linear in the length."""
    return machine.multiprocessors * programs * block_n * size.length * WORD


def designs(cycles: Mapping[str, float], size: Size, machine: Machine, table_block_n: int) -> dict[str, float]:
    """Return the cycles of the whole backward by design. cycles: of each kernel, as cycles_of gives them.

    * dtable kernel: each partial sum is written and read once. The dkv kernel would be faster without its stores.
    * table from words: the dkv kernel writes dS as words, the dtable_words kernel reads them. Writing is hidden by the dkv
      kernel's work, or is not.
    * query from words, too: the dq_words kernel takes the place of the dq kernel.
    """
    sums = 2 * moved(partial_sums(size, machine, table_block_n), machine) / size.blocks
    words = moved(SCORES * WORD, machine)
    rows, columns, diagonals = cycles["dq"], cycles["dkv"], cycles["dtable_words"]
    return {
        "dtable kernel": rows + columns + cycles["dtable"] + sums,
        "table from words, writing hidden": rows + max(columns, words) + diagonals,
        "table from words, writing not hidden": rows + columns + words + diagonals,
        "query from words, too, writing hidden": cycles[OF_QUERY] + max(columns, words) + diagonals,
        "query from words, too, writing not hidden": cycles[OF_QUERY] + columns + words + diagonals,
    }

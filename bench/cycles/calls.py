"""The forward and the backward of a call as sums of what their kernels take, and designs of the backward that can be compared so.

Cycles of a multiprocessor for 64 x 64 scores, as everywhere in the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tools.cycles.machine import Machine
from tools.cycles.predict import SCORES, Prediction
from triton_relattn.kernels.introspect import KERNELS

from ..cases.features import GRIDS
from ..compile import KernelCase

FORWARD, BACKWARD = KERNELS[:1], KERNELS[1:]
"""Kernels of a direction."""
OF_TABLES = ("dtable", "dp2c")
PRODUCTS = {FORWARD: 2, BACKWARD: 5}
"""Products that FlashAttention counts."""
STORED = 2  # bytes of a dS in 16 bits


def of_call(
    found: Mapping[KernelCase, Prediction | None], call: KernelCase, kernels: Iterable[str], far: bool = False
) -> float | None:
    """Return the cycles of a direction; None if one of its kernels is not known.

    call: whatever its kernel. far: of scores beyond a bounded table, which no kernel of OF_TABLES visits.
    """
    total = 0.0
    has_tables = not call.features.startswith("none") and call.features not in GRIDS
    query_from_ds = not far and replace(call, kernel="dq_from_ds") in found
    for kernel in kernels:
        if kernel in OF_TABLES and (far or not has_tables):
            continue
        if kernel == "dp2c" and replace(call, kernel="dp2c") not in found:
            continue
        if kernel == ("dq" if query_from_ds else "dq_from_ds"):
            continue
        prediction = found.get(replace(call, kernel=kernel))
        if prediction is None or (far and prediction.far_cycles is None):
            return None
        # rel_value beside rel_key: the dtable kernel runs once with dS and once with P.
        times = 2 if kernel == "dtable" and call.features.split()[0] in ("shaw", "vits") else 1
        total += times * cycles_of(kernel, prediction, 0.0 if far else 1.0)
    return total


def cycles_of(kernel: str, prediction: Prediction, near: float) -> float:
    """Return the cycles of a kernel if a share ``near`` of the tiles lie near the diagonal. A loop that reads dS is no faster
    than it comes from memory, once also for the two products of dq_from_ds: one reads what the other has just read."""
    from_memory = moved(SCORES * STORED, prediction.machine)
    if kernel == "dq_from_ds":
        return max(prediction.cycles, from_memory)
    if kernel in OF_TABLES:
        return near * max(prediction.cycles, from_memory)
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


def workspace(size: Size, machine: Machine, programs: int, block_n: int) -> float:
    """Return the bytes of dS of the keys that one wave of the dkv kernel's programs has: linear in the length."""
    return machine.multiprocessors * programs * block_n * size.length * STORED


def designs(cycles: Mapping[str, float], machine: Machine) -> dict[str, float]:
    """Return the cycles of the whole backward by design. cycles: of each kernel, as cycles_of gives them.

    * query from q.k: the dq kernel computes scores a second time.
    * query from dS: the dq_from_ds kernel reads what the dkv kernel has stored. Writing is hidden by the dkv kernel's work, or is
      not.
    """
    stored = moved(SCORES * STORED, machine)
    tables, keys = cycles["dtable"], cycles["dkv"]
    return {
        "query from q.k, writing hidden": cycles["dq"] + max(keys, stored) + tables,
        "query from q.k, writing not hidden": cycles["dq"] + keys + stored + tables,
        "query from dS, writing hidden": cycles["dq_from_ds"] + max(keys, stored) + tables,
        "query from dS, writing not hidden": cycles["dq_from_ds"] + keys + stored + tables,
    }

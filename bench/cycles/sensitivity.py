"""Sensitivity to figures that nobody has published: each is varied, the others stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tools.cycles.machine import MACHINES
from tools.cycles.predict import Prediction, predict

from ..cases.configurations import own_tile
from ..compile import KernelCase
from ..compiled import compiled
from ..report.text import table
from .calls import FORWARD, PRODUCTS, of_call

AS_IT_IS = "as it is"
VARIED: dict[str, dict[str, Any]] = {
    AS_IT_IS: {},
    "ALU twice as fast": {"alu": 1.0},
    "float32 in one pipe": {"fma_pipes": 1},
    "uniform pipe half as fast": {"uniform": 4.0},
    "memory pipe half as fast": {"memory": 4.0},
    "shared memory twice as fast": {"shared_rate": 256.0},
    "shared memory: 64 cycles queued": {"shared_queue": 64.0},
    "wgmma waits for no operands": {"wgmma_ahead": 1e9},
    "wgmma waits for all operands": {"wgmma_ahead": 0.0},
    "wgmma: 0 cycles of latency": {"wgmma_latency": 0.0},
    "wgmma: 60 cycles": {"wgmma_latency": 60.0},
    "mma.sync as fast as wgmma": {"mma": 4.0},
    "mufu: 8 cycles": {"mufu_latency": 8.0},
    "mufu: 32 cycles": {"mufu_latency": 32.0},
    "shared memory: 20 cycles": {"shared_latency": 20.0, "shuffle_latency": 15.0},
    "shared memory: 40 cycles": {"shared_latency": 40.0, "shuffle_latency": 32.0},
    "L2: 200 cycles": {"l2_latency": 200.0},
    "L2: 500 cycles": {"l2_latency": 500.0},
    "L2: 32 bytes a cycle": {"l2_rate": 32.0},
    "L2: 5.5 TB/s": {"l2_terabytes": 5.5},
    "L2: 8 TB/s": {"l2_terabytes": 8.0},
    "barrier: 40 cycles": {"barrier": 40.0},
    "fence: 40 cycles": {"fence_latency": 40.0},
    "end of a loop: 20 cycles": {"branch": 20.0},
    "nothing is late": {"late": 0.0},
}
"""Description -> fields of a Machine."""


def predicted_variants(case: KernelCase) -> dict[str, Prediction | None]:
    """Return what the model says of a kernel, for each of VARIED."""
    config, machine = case.config, MACHINES[case.target]
    kernel = compiled(case.kernel, case.target, *case.call, config)
    tile = own_tile(case.kernel, config)
    return {name: predict(kernel, *tile, replace(machine, **changes)) for name, changes in VARIED.items()}


def shown(found: Mapping[KernelCase, Mapping[str, Prediction | None]]) -> str:
    """Return how the cycles of calls change whose kernels are all known, and their ratios to the same calls without a table."""
    by_variant = {name: {case: each[name] for case, each in found.items()} for name in VARIED}
    calls = {
        f"{'forward' if kernels == FORWARD else 'backward'} {case.head_dim} {case.features} {case.target}": (case, kernels)
        for kernels in PRODUCTS
        for case in found
        if case.kernel == "forward" and of_call(by_variant[AS_IT_IS], case, kernels) is not None
    }
    cycles = {
        name: {call: of_call(known, case, kernels) or float("nan") for call, (case, kernels) in calls.items()}
        for name, known in by_variant.items()
    }
    ratios = {
        name: {
            call: cycles[name][call] / (of_call(known, case.plain, kernels) or float("nan"))
            for call, (case, kernels) in calls.items()
        }
        for name, known in by_variant.items()
    }
    changes = {name: {call: value / cycles[AS_IT_IS][call] - 1 for call, value in cycles[name].items()} for name in VARIED}
    rows = [
        (
            call,
            f"{cycles[AS_IT_IS][call]:.0f}",
            f"{min(changes[name][call] for name in VARIED):+.0%} to {max(changes[name][call] for name in VARIED):+.0%}",
            f"{ratios[AS_IT_IS][call]:.2f}",
            f"{min(ratios[name][call] for name in VARIED):.2f} to {max(ratios[name][call] for name in VARIED):.2f}",
        )
        for call in calls
    ]
    each = [(name, *(f"{changes[name][call]:+.0%}" for call in calls)) for name in VARIED]
    summary = table(("call", "cycles", "change by", "of plain", "becomes"), rows)
    return f"{summary}\n\n{table(('change of cycles', *calls), each)}"

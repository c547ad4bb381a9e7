"""The kernels as they are selected now, compiled, against the budget of the installed Triton: bench/budgets."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import triton

from bench.cases import features
from bench.cases.attention import DTYPES
from bench.compile import BUDGET, KernelCase, budgets, counts, predicted, used_by
from bench.compiled import Resources, compiled, resources
from bench.cycles.machine import MACHINES
from bench.cycles.predict import Loop, Prediction
from bench.cycles.simulate import Steady
from bench.report.text import table
from triton_relattn.kernels.architectures import architecture_of
from triton_relattn.kernels.configs import KERNELS, TileConfig

REFRESH = "python -m bench compile --targets sm_80,sm_90 --budget"
ALLOWED = 1.03
"""Largest allowed ratio to the budget's instructions per score."""
ALLOWED_CYCLES = 1.05
"""Largest allowed ratio to the budget's cycles by the model, whose noise is below 2 %."""
SERIALISED = {
    ("forward", 64): ("vits", "window"),
    ("forward", 128): ("zero", "zero causal", "window"),
    ("dq", 64): ("zero causal",),
    ("dtable", 128): ("shaw", "shaw causal", "vits"),
}
"""Kernels for sm_90 and their widths -> feature sets in which the assembler waits after every wgmma. There should be none:
other configurations of these are serialised, too, or slower."""
QUICK = {("sm_90", name, 64) for name in features.FEATURES if name.partition(" ")[0] in features.TABLES}
QUICK |= {("sm_80", name, 128) for name in features.TABLES}
QUICK |= {
    ("sm_90", "deberta", 64),
    ("sm_90", "deberta_clamped", 64),
    ("sm_90", "shaw", 64),
    ("sm_80", "transformer_xl", 64),
    ("sm_90", "t5", 64),
    ("sm_90", "inkling causal", 128),
    ("sm_90", "grid", 64),
}
SETS = [
    pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
    for each in itertools.product(("sm_80", "sm_90"), features.FEATURES, (64, 128))
]

needs_budget = pytest.mark.skipif(
    not BUDGET.exists(), reason=f"no budget for Triton {triton.__version__}: {BUDGET.name} is missing; {REFRESH} writes it"
)


def cases(target: str, name: str, head_dim: int) -> list[KernelCase]:
    every = (KernelCase(kernel, target, "bf16", head_dim, name) for kernel in KERNELS)
    return [case for case in every if case.exists]


def worse(
    target: str, budget: Mapping[str, Any], config: TileConfig, used: Resources, found: Prediction | None = None
) -> list[tuple[str, str, str]]:
    """Return the columns of a budget's row that are exceeded: name, budget, and present value. Figures per score are multiplied
    by the warps and divided by the tile's elements."""
    now, loop = counts(used), used.main_loop
    scores = config.block_m * config.block_n / config.num_warps
    budget_scores = int(budget["block_m"]) * int(budget["block_n"]) / int(budget["num_warps"])
    limits: list[tuple[str, float, float, float]] = [
        ("spill_bytes", int(budget["spill_bytes"]), now["spill_bytes"], 1.0),
        ("shared_bytes", architecture_of(target).shared_memory, now["shared_bytes"], 1.0),
    ]
    for column, allowed in (("loop_instructions", ALLOWED), ("matrix_instructions", 1.0)):
        limits.append((f"{column} per score", int(budget[column]) / budget_scores, now[column] / scores, allowed))
    if found is not None:
        limits.append(("cycles", float(budget["cycles"]), found.cycles, ALLOWED_CYCLES))
        if found.far_cycles is not None:
            limits.append(("far_cycles", float(budget["far_cycles"] or 0), found.far_cycles, ALLOWED_CYCLES))
    if int(budget["spill_bytes"]) == 0:
        limits.append(("bytes of stack", 0, used.stack_bytes, 1.0))
        limits.append(("local memory in the loop", 0, loop["LDL"] + loop["STL"], 1.0))
    return [(what, f"{limit:.5g}", f"{value:.5g}") for what, limit, value, allowed in limits if value > limit * allowed]


@pytest.mark.thorough
@needs_budget
@pytest.mark.parametrize(("target", "name", "head_dim"), SETS)
def test_nothing_exceeds_its_budget(target: str, name: str, head_dim: int) -> None:
    """Selected configurations in bfloat16: spills, shared memory, instructions, cycles; matrix units at work, wgmma overlap."""
    known, lines = budgets(), []
    for case in cases(target, name, head_dim):
        assert case in known, f"{BUDGET.name} has no {case}; add it: {REFRESH}"
        used, found = used_by(case, case.config), predicted(case, case.config)
        lines += [(str(case), *line) for line in worse(target, known[case], case.config, used, found)]
        assert found is not None
        is_known = target == "sm_90" and name in SERIALISED.get((case.kernel, head_dim), ())
        if found.is_serialised != is_known:
            lines.append((str(case), "wgmma serialised", str(is_known), str(found.is_serialised)))
        products = used.main_loop["HMMA"] + used.main_loop["HGMMA"]
        assert counts(used)["matrix_instructions"] == products
        assert products > 0
    shown = table(("not as its budget says", "what", "budget", "now"), lines)
    assert not lines, f"\n{shown}\nIf this is intended, refresh the budget: {REFRESH} --features '{name}'"


@needs_budget
@pytest.mark.slow
@pytest.mark.parametrize(("target", "name", "head_dim"), SETS[::5])
def test_no_more_kernels_spill_without_lengths(target: str, name: str, head_dim: int) -> None:
    """Batches that are not padded: kernels that the budget, of padded ones, knows without spills have none."""
    known = budgets()
    for case in cases(target, name, head_dim):
        call = features.call(name, DTYPES[case.dtype], head_dim, has_lengths=False)
        used = resources(compiled(case.kernel, target, *call))
        assert used.fits(target), (case, used)
        if known[case]["spill_bytes"] == "0":
            assert (used.spill_bytes, used.stack_bytes) == (0, 0), (case, used)


def test_what_is_worse_is_found() -> None:
    """Each limit by itself; what is better, or the same work in another tile, passes."""
    row = {"block_m": "64", "block_n": "64", "num_warps": "4", "spill_bytes": "0"}
    row |= {"loop_instructions": "600", "matrix_instructions": "12", "cycles": "1000", "far_cycles": "500"}
    tile = TileConfig(64, 64, 4, 2)

    def prediction(*cycles: float) -> Prediction:
        turns = (Steady(600, 1e6, 1e4, each, 0.0, each, {}, {}) for each in cycles)
        return Prediction(MACHINES["sm_90"], 2, tuple(Loop(turn, 1.0) for turn in turns), 3, 3)

    def found(
        config: TileConfig = tile,
        others: int = 588,
        products: int = 12,
        local: int = 0,
        cycles: tuple[float, ...] = (1000.0, 500.0),
        **changes: int,
    ) -> list[str]:
        used: dict[str, Any] = {"registers": 255, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 81_920, "tensor_memory": 0}
        loop = Counter(IADD3=others - local, HGMMA=products, LDL=local)
        resources = Resources(**{**used, **changes}, loops=[loop])
        return [what for what, *_ in worse("sm_90", row, config, resources, prediction(*cycles))]

    assert found() == found(others=606) == found(others=500, products=10) == found(TileConfig(128, 64, 8, 2)) == []
    assert found(others=607) == ["loop_instructions per score"]
    assert found(others=500, products=13) == ["matrix_instructions per score"]
    assert found(TileConfig(64, 32, 4, 2)) == ["loop_instructions per score", "matrix_instructions per score"]
    assert found(TileConfig(64, 32, 2, 2)) == []
    assert found(cycles=(1050, 525)) == found(cycles=(600,)) == []
    assert found(cycles=(1051, 500)) == ["cycles"] and found(cycles=(900, 526)) == ["far_cycles"]
    assert found(spill_bytes=4) == ["spill_bytes"]
    assert found(shared_bytes=232_449) == ["shared_bytes"]
    assert found(stack_bytes=8) == ["bytes of stack"]
    assert found(local=1) == ["local memory in the loop"]

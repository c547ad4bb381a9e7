"""The kernels as they are selected now, compiled, against the budget of the installed Triton: bench/budgets."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import triton

from bench.compile import BUDGET, KernelCase, budgets, counts, predicted, used_by
from bench.compiled import Resources
from bench.report.text import table
from tools.cycles.machine import MACHINES
from tools.cycles.predict import Loop, Prediction
from tools.cycles.simulate import Steady
from triton_relattn.kernels.config.architectures import architecture_of
from triton_relattn.kernels.config.selection import KERNELS

REFRESH = "python -m bench compile --targets sm_80,sm_90 --budget"
MAIN = ("full", "clamp", "transformer_xl", "t5")
"""Feature sets whose kernels have a bound. The other rows of the budget are a report."""
ALLOWED = 1.15
"""Largest allowed ratio to the budget's cycles by the model, whose noise is below 2 % and whose error for ratios is 15 %."""
SETS = list(itertools.product(("sm_80", "sm_90"), MAIN, (64, 128)))

needs_budget = pytest.mark.skipif(
    not BUDGET.exists(), reason=f"no budget for Triton {triton.__version__}: {BUDGET.name} is missing; {REFRESH} writes it"
)


def cases(target: str, name: str, head_dim: int) -> list[KernelCase]:
    every = (KernelCase(kernel, target, "bf16", head_dim, name) for kernel in KERNELS)
    return [case for case in every if case.exists]


def worse(target: str, budget: Mapping[str, Any], used: Resources, found: Prediction) -> list[tuple[str, str, str]]:
    """Return what exceeds a budget's row, or the GPU: name, limit, and present value."""
    limits = [
        ("shared_bytes", architecture_of(target).shared_memory, used.shared_bytes, 1.0),
        ("cycles", float(budget["cycles"]), found.cycles, ALLOWED),
    ]
    if found.far_cycles is not None:
        limits.append(("far_cycles", float(budget["far_cycles"] or 0), found.far_cycles, ALLOWED))
    return [(what, f"{limit:.5g}", f"{value:.5g}") for what, limit, value, allowed in limits if value > limit * allowed]


@pytest.mark.thorough
@needs_budget
@pytest.mark.parametrize(("target", "name", "head_dim"), SETS)
def test_nothing_exceeds_its_budget(target: str, name: str, head_dim: int) -> None:
    """Selected configurations in bfloat16: cycles and shared memory; matrix units are at work."""
    known, lines = budgets(), []
    for case in cases(target, name, head_dim):
        assert case in known, f"{BUDGET.name} has no {case}; add it: {REFRESH}"
        used, found = used_by(case, case.config), predicted(case, case.config)
        assert found is not None
        lines += [(str(case), *line) for line in worse(target, known[case], used, found)]
        products = used.main_loop["HMMA"] + used.main_loop["HGMMA"]
        assert counts(used)["matrix_instructions"] == products
        assert products > 0
    shown = table(("not as its budget says", "what", "budget", "now"), lines)
    assert not lines, f"\n{shown}\nIf this is intended, refresh the budget: {REFRESH} --features '{name}'"


def test_what_is_worse_is_found() -> None:
    """Each limit by itself; what is better passes."""
    row = {"cycles": "1000", "far_cycles": "500"}

    def found(cycles: tuple[float, ...] = (1000.0, 500.0), shared_bytes: int = 81_920) -> list[str]:
        turns = (Steady(600, 1e6, 1e4, each, 0.0, each, {}, {}) for each in cycles)
        prediction = Prediction(MACHINES["sm_90"], 2, tuple(Loop(turn, 1.0) for turn in turns), 3, 3)
        used = Resources(255, 0, 0, shared_bytes, 0, [Counter(HGMMA=12)])
        return [what for what, *_ in worse("sm_90", row, used, prediction)]

    assert found() == found((1150, 575)) == found((600,)) == []
    assert found((1151, 500)) == ["cycles"] and found((900, 576)) == ["far_cycles"]
    assert found(shared_bytes=232_449) == ["shared_bytes"]

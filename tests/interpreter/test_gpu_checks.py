"""The checks of ``make gpu`` and of tests/gpu, in the interpreter: right results pass, and wrong ones are named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.cases.attention import Case
from bench.gpu.checks import Check, stand_ins
from tests.draws import KERNEL_LIMITS
from tests.gpu.layouts import LAYOUTS, POSITIONS, check_layout, check_packed


def statuses(check: Check) -> list[str]:
    return [row["status"] for row in check.run("cpu")]


def test_calls_that_stand_for_timed_ones() -> None:
    """Calls with several workspaces, and the forward alone."""
    checks = list(stand_ins(Case(4, 4, 4096, 16, rows=9, dtype="fp16", key_heads=2, rel_dim=32)))
    for check in (checks[0], checks[1], checks[4], checks[-1]):
        assert statuses(replace(check, case=check.case.resized(33))) == ["ok", "ok"]


def test_a_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong result is a FAILED row with its name; an exception is a failed row."""
    check = Check(Case(1, 2, 45, 16, dtype="fp16", num_queries=40))
    results = Check.results

    def scaled(check: Check, inputs: Any) -> dict[str, torch.Tensor]:
        found = results(check, inputs)
        return {**found, "d_value": 1.1 * found["d_value"]}

    monkeypatch.setattr(Check, "results", scaled)
    assert all(row["status"] == "FAILED" and row["message"].startswith("d_value") for row in check.run("cpu"))
    monkeypatch.setattr(Check, "results", lambda *_: 1 / 0)
    assert statuses(check) == ["failed", "failed"]


@pytest.mark.parametrize(("layout", "width"), [*zip(LAYOUTS, (40, 72) * 4, strict=False)])
def test_layouts(layout: str, width: int) -> None:
    outside = list(POSITIONS)[list(LAYOUTS).index(layout) % 3]
    check_layout(layout, width, outside, torch.float16, "cpu", length=37)


@pytest.mark.parametrize("seed", range(4))
def test_packed(seed: int) -> None:
    dtype = "float16" if seed % 2 else "float32"
    check_packed(seed, KERNEL_LIMITS._replace(dtypes=(dtype,), widths=(8, 40), longest=20), "cpu")

"""The checks of ``make gpu``, with real numbers: what is wrong is noticed, and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.cases.attention import Case
from bench.gpu.checks import Check, stand_ins


def statuses(check: Check) -> list[str]:
    return [row["status"] for row in check.run("cpu")]


def test_calls_that_stand_for_timed_ones() -> None:
    """With several workspaces, and the forward alone."""
    checks = list(stand_ins(Case(4, 32, 4096, 16, rows=9, dtype="fp16", key_heads=16, rel_dim=32)))
    for check in (checks[0], checks[1], checks[4], checks[-1]):
        assert statuses(replace(check, case=check.case.resized(33))) == ["ok", "ok"]


def test_a_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what raises is a row."""
    check = Check(Case(1, 2, 45, 16, dtype="fp16", num_queries=40))
    results = Check.results

    def scaled(check: Check, inputs: Any) -> dict[str, torch.Tensor]:
        found = results(check, inputs)
        return {**found, "d_value": 1.1 * found["d_value"]}

    monkeypatch.setattr(Check, "results", scaled)
    assert all(row["status"] == "FAILED" and row["message"].startswith("d_value") for row in check.run("cpu"))
    monkeypatch.setattr(Check, "results", lambda *_: 1 / 0)
    assert statuses(check) == ["failed", "failed"]

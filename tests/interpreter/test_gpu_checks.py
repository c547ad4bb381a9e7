"""The checks of ``make gpu``, with real numbers: what is wrong is noticed, and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.cases.attention import Case
from bench.gpu import checks, diagnosis
from bench.gpu.checks import Checked, checked, differences, run_case, standing_for
from triton_relattn import fused_relative_attention

SMALL: dict[str, Any] = {"batch": 1, "num_queries": 40, "num_keys": 45, "dtype": "float16", "width": 16}


def problems(case: Checked) -> list[tuple[str, list[str]]]:
    """Status and wrong results of both rows."""
    return [(row["status"], row["wrong"]) for row in run_case(case, "cpu")[0]]


@pytest.mark.parametrize("table", checks.TABLES)
def test_calls(table: str) -> None:
    case = checked(table, table != "full", shares=(0.6,), **SMALL)
    assert problems(case) == [("ok", [])] * 2


def test_calls_without_lse_that_stand_for_timed_ones() -> None:
    """Two lengths, several workspaces, one head and more; each runs."""
    every = list(standing_for(Case(4, 32, 4096, 16, rows=9, dtype="fp16", key_heads=16, rel_dim=32)))
    assert len(every) == 10 and len({case.sizes["num_queries"] for case in every}) == 2
    short = {"num_queries": 33, "num_keys": 33}
    for case in (every[0], every[1], every[4]):
        assert problems(replace(case, sizes=case.sizes | short)) == [("ok", [])] * 2


def test_a_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what raises is wrong as a whole."""
    case = checked("full", has_lse=False, **SMALL)

    attend: Any = fused_relative_attention

    def scaled(*, value: torch.Tensor, **others: Any) -> Any:
        return attend(value=value + 0.1 * (value - value.detach()), **others)

    monkeypatch.setattr(checks, "fused_relative_attention", scaled)
    assert problems(case) == [("FAILED", ["d_value"])] * 2
    monkeypatch.setattr(checks, "fused_relative_attention", lambda **_: 1 / 0)
    assert problems(case) == [("failed", ["all"])] * 2


@pytest.mark.parametrize("kernel", diagnosis.KERNELS)
def test_kernels_alone(kernel: str) -> None:
    """One kernel computes some of the results, and they are right."""
    length = 1024 if kernel == "dq_from_ds" else 40
    case = checked("full", kernel=kernel, **{**SMALL, "heads": 1, "num_queries": length, "num_keys": length})
    inputs, arguments = case.inputs("cpu", False)
    _, results = checks.run_kernel(case, inputs, arguments)
    assert results and checks.judge(results, inputs, arguments)["status"] == "ok"


def test_a_bit_that_changes_is_noticed() -> None:
    results = iter([{"out": torch.zeros(2)}, {"out": torch.zeros(2)}, {"out": torch.tensor([0.0, 1e-30])}])
    assert differences(lambda: next(results), 2, float("inf")) == (2, "run 2: out")

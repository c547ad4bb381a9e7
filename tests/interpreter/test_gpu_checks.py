"""The checks of ``make gpu``, with real numbers: what is wrong is noticed, and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.cases.attention import Case
from bench.gpu import checks, diagnosis
from bench.gpu.checks import Checked, checked, run_case, standing_for
from triton_relattn import fused_relative_attention

SMALL: dict[str, Any] = {"batch": 1, "num_queries": 40, "num_keys": 45, "dtype": "float16", "width": 16}


def problems(case: Checked) -> list[tuple[str, list[str]]]:
    """Status and wrong results of both rows."""
    return [(row["status"], row["wrong"]) for row in run_case(case, "cpu")[0]]


@pytest.mark.parametrize("table", checks.TABLES)
def test_calls(table: str) -> None:
    case = checked(table, table != "full", shares=(0.6,), **SMALL)
    assert problems(case) == [("ok", [])] * 2


def test_calls_that_stand_for_timed_ones() -> None:
    """Those without lse, with several workspaces."""
    every = list(standing_for(Case(4, 32, 4096, 16, rows=9, dtype="fp16", key_heads=16, rel_dim=32)))
    for case in (every[0], every[1], every[4]):
        assert problems(replace(case, sizes=case.sizes | {"num_queries": 33, "num_keys": 33})) == [("ok", [])] * 2


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
    case = checked("full", kernel=kernel, heads=1, **SMALL)
    inputs, arguments = case.inputs("cpu", False)
    _, results = checks.run_kernel(case, inputs, arguments)
    assert results and checks.judge(results, inputs, arguments)["status"] == "ok"

"""The choice of the library that multiplies float32 matrices on a CPU, and what each computes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.check import compute_results, worst_reference
from tests.conftest import cut_blocks
from triton_relattn._blockwise import products
from triton_relattn.testing import assert_within_budget, make_inputs

VARIABLE = "TRITON_RELATTN_CPU_PRODUCT"
on_onednn = pytest.mark.skipif(not products.has_linear(), reason="this build of torch lacks oneDNN, or its linear")


@pytest.mark.parametrize("choice", ["torch", pytest.param("onednn", marks=on_onednn)])
def test_the_variable_chooses(choice: str) -> None:
    """The environment variable that users are asked to report shows the choice."""
    environment = {**os.environ, VARIABLE: choice}
    command = [sys.executable, "-m", "triton_relattn"]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert process.returncode == 0, process.stderr
    assert f"float32 products: {choice}" in " ".join(process.stdout.split()), process.stdout


def test_another_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "mkl")
    with pytest.raises(ValueError, match=f'{VARIABLE} must be "onednn" or "torch", got \'mkl\''):
        products.chooses_onednn.__wrapped__()


def test_without_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oneDNN operator is private: if torch lacks it, torch.mm is used, and setting the variable raises an error."""

    def absent(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(products, "linear", absent)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not products.chooses_onednn.__wrapped__()
    monkeypatch.setenv(VARIABLE, "onednn")
    with pytest.raises(NotImplementedError, match="has no oneDNN"):
        products.chooses_onednn.__wrapped__()


@on_onednn
def test_the_probe_asks_for_speed_and_for_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe also works if the default dtype is float64 or the default device is another one."""
    monkeypatch.setattr(products, "FASTER", 1e9)
    assert not products.is_faster()
    monkeypatch.setattr(products, "FASTER", 0.0)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        assert products.has_linear() and products.is_faster()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(products, "linear", lambda left, right: (left.bfloat16() @ right.t().bfloat16()).float())
    assert not products.is_faster()


def test_only_long_float32_calls_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe takes milliseconds, and oneDNN does not support float64, so only long float32 calls run it."""
    asked = 0

    def choice() -> bool:
        nonlocal asked
        asked += 1
        return False

    monkeypatch.setattr(products, "chooses_onednn", choice)
    for length, dtype in ((64, torch.float32), (1100, torch.float64), (1100, torch.float32)):
        assert asked == 0
        compute_results("blockwise", make_inputs(1, 1, length, length, 4, num_rows=9, dtype=dtype, seed=0))
    assert asked > 0


CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "full": ((1, 2, 130, 130, 64), {"num_rows": 259}, {}),
    "clipped": ((2, 4, 97, 65, 32), {"num_rows": 31, "rel_value": True, "rel_bias": True, "key_heads": 2}, {"enable_gqa": True}),
    "window": ((1, 2, 200, 150, 16), {"num_rows": 41, "rel_p2c": True}, {"window_size": (40, 3), "query_offset": -30}),
    "lengths": ((3, 2, 70, 90, 24), {"num_rows": 159}, {"key_lengths": torch.tensor([90, 33, 1]), "query_offset": 20}),
}


@on_onednn
@pytest.mark.parametrize("step", [8, 64])
@pytest.mark.parametrize("case", CALLS)
def test_onednn(case: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN obeys the error rule and repeats bit for bit."""
    cut_blocks(monkeypatch, 64, 1, 1, step)
    sizes, tables, arguments = CALLS[case]
    inputs = make_inputs(*sizes, **tables, dtype=torch.float32, seed=5)
    golden, reference = worst_reference(inputs, **arguments)
    results, again = (compute_results("blockwise", inputs, **arguments) for _ in range(2))
    for name, result in results.items():
        assert_within_budget(name, result, golden[name], reference[name], factor=3 if name.startswith("d_") else 2)
        assert torch.equal(result, again[name]), name


@on_onednn
def test_nan_beside_rows_of_no_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows added to reach oneDNN's sizes see no key, and a key that a mask hides from all queries may hold NaN."""
    cut_blocks(monkeypatch, 64, 1, 1, 64)
    inputs = make_inputs(1, 1, 70, 70, 16, num_rows=139, dtype=torch.float32, seed=6)
    key, mask = inputs.key.clone(), torch.arange(70) != 9
    key[:, :, 9] = math.nan
    results, expected = (
        compute_results("blockwise", inputs._replace(key=keys), attn_mask=mask) for keys in (key, key.nan_to_num())
    )
    assert results["d_value"].isfinite().all() and torch.equal(results["d_value"], expected["d_value"])


@on_onednn
@pytest.mark.parametrize("case", CALLS)
def test_weights_are_dense(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN takes 200 ms instead of 0.1 for a weight with gaps between its rows, such as a part of a band."""
    cut_blocks(monkeypatch, 64, 1, 1, 64)
    are_dense, product = [], torch.ops.mkldnn._linear_pointwise

    def recorded(left: torch.Tensor, right: torch.Tensor, *others: Any) -> torch.Tensor:
        are_dense.append(right.is_contiguous() or right.t().is_contiguous())
        result: torch.Tensor = product(left, right, *others)
        return result

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", recorded)
    sizes, tables, arguments = CALLS[case]
    compute_results("blockwise", make_inputs(*sizes, **tables, dtype=torch.float32, seed=5), **arguments)
    assert are_dense and all(are_dense)


@on_onednn
def test_sizes_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN prepares and caches every new size, so 60 lengths must use few sizes."""
    cut_blocks(monkeypatch, 128, 1, 1, 64)
    sizes, linear = set(), products.linear

    def recorded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        sizes.add((*left.shape, *right.shape))
        return linear(left, right)

    monkeypatch.setattr(products, "linear", recorded)
    for length in range(401, 461):
        compute_results("blockwise", make_inputs(1, 1, length, length, 16, num_rows=2 * length - 1, dtype=torch.float32, seed=0))
    assert 0 < len(sizes) < 60, sorted(sizes)  # fewer than one per length, over all products

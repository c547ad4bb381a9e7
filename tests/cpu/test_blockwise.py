"""The linear-memory path: derivatives by finite differences, long sequences, and rounding in every precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.conftest import cut_blocks
from tests.cpu.oracle import assert_same, attend, by_hand, results_of, unlucky_reference, with_keep
from triton_relattn import RelativePositions
from triton_relattn._core.spec import DIFFERENTIABLE, TABLES
from triton_relattn._core.within import within
from triton_relattn.testing import (
    assert_gradients_close_fp32,
    assert_table_gradient,
    assert_within_budget,
    dense_gradients,
    forward_backward,
    make_inputs,
    with_different_strides,
)

LOW_PRECISION = (torch.float16, torch.bfloat16, torch.float32)
FURTHER_TABLES: dict[str, Any] = {"rel_value": True, "rel_bias": True, "rel_p2c": True}


def test_a_thousand_positions() -> None:
    inputs = make_inputs(1, 2, 1023, 1024, 4, num_rows=513, dtype=torch.float64, seed=1)
    results = forward_backward(attend, inputs, is_causal=True, query_offset=1)
    by_hand = dense_gradients(inputs, is_causal=True, query_offset=1)._asdict()
    for name, result in results.items():
        assert_same(name, result, by_hand[name])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("outside", ["clamp", "zero"])
def test_gradcheck(outside: Any, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query, key, value and one table through both results, with several blocks."""
    cut_blocks(monkeypatch, 3, 1, 2)
    inputs = make_inputs(2, 2, 5, 6, 3, 2, num_rows=4, per_head=is_causal, dtype=torch.float64, seed=1)
    leaves = [tensor.requires_grad_() for tensor in inputs[:4] if tensor is not None]
    arguments: dict[str, Any] = {"positions": RelativePositions(-2, 1, outside), "is_causal": is_causal, "query_offset": 1}
    arguments["key_lengths"] = torch.tensor([6, 4])
    assert torch.autograd.gradcheck(lambda *tensors: attend(*tensors, **arguments), leaves)


@pytest.mark.parametrize(("outside", "per_head"), [("clamp", True), ("zero", False)])
def test_gradcheck_of_all_inputs(outside: Any, per_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All eight, with shared heads, softcap, dropout, a window and a mask."""
    cut_blocks(monkeypatch, 3, 1, 2)
    inputs = make_inputs(
        1,
        2,
        4,
        5,
        2,
        2,
        num_rows=4,
        per_head=per_head,
        key_heads=1,
        rel_width=2,
        rel_value=True,
        rel_bias=True,
        rel_p2c=True,
        dtype=torch.float64,
        seed=1,
    )
    leaves = {name: getattr(inputs, name).requires_grad_() for name in DIFFERENTIABLE}
    attn_mask = torch.randn(4, 5, dtype=torch.float64)
    attn_mask[1, 2] = -math.inf
    arguments: dict[str, Any] = {"positions": RelativePositions(-2, 1, outside), "window_size": (3, 2), "softcap": 2.0}
    arguments |= {"query_offset": torch.tensor([1]), "rel_scale": 0.7, "dropout_p": 0.3, "enable_gqa": True}

    def seeded(*tensors: torch.Tensor) -> Any:
        torch.manual_seed(3)
        named: dict[str, Any] = dict(zip(leaves, tensors, strict=True))
        return attend(**named, attn_mask=attn_mask, **arguments)

    assert len(leaves) == 8
    assert torch.autograd.gradcheck(seeded, tuple(leaves.values()))


ERROR_CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    "full": ((2, 2, 97, 97, 64, 64), {"num_rows": 193}, {}),
    "causal": ((2, 2, 129, 129, 32, 48), {"num_rows": 129}, {"positions": RelativePositions(-128, 0), "is_causal": True}),
    "clamped": ((1, 3, 65, 127, 40, 40), {"num_rows": 9}, {}),
    "zero": (
        (1, 3, 113, 203, 21, 16),
        {"num_rows": 31, "per_head": True},
        {"positions": RelativePositions(-20, 10, "zero"), "query_offset": 90},
    ),
    "lengths": ((2, 2, 63, 65, 64, 64), {"num_rows": 65}, {"key_lengths": torch.tensor([33, 65])}),
    "no_table": ((2, 2, 64, 64, 64, 64), {"num_rows": None}, {"is_causal": True}),
    "value_table": ((2, 2, 97, 97, 64, 64), {"num_rows": 21, "rel_value": True}, {"dropout_p": 0.2}),
    "bias_alone": ((2, 2, 97, 97, 32, 32), {"num_rows": 193, "rel_bias": True, "rel_key": False}, {"softcap": 20.0}),
    "p2c": (
        (2, 4, 97, 65, 64, 64),
        {"num_rows": 41, "rel_p2c": True, "key_heads": 2, "per_head": True},
        {"is_causal": True, "query_offset": -3, "enable_gqa": True, "dropout_p": 0.2},
    ),
    "p2c_alone": ((2, 2, 97, 97, 32, 32), {"num_rows": 193, "rel_p2c": True, "rel_key": False}, {"rel_scale": 0.5}),
    "own_query": ((2, 2, 97, 97, 64, 64), {"num_rows": 65, "rel_width": 16}, {"rel_scale": 1.0, "window_size": (40, 30)}),
    "all_terms": (
        (2, 4, 97, 65, 32, 32),
        {"num_rows": 31, "rel_width": 16, **FURTHER_TABLES, "key_heads": 2, "per_head": True},
        {"rel_scale": 0.5, "softcap": 30.0, "window_size": (50, 9), "enable_gqa": True, "query_offset": torch.tensor([-3, 4])},
    ),
}


@pytest.mark.parametrize("sharp", [False, True], ids=["randn", "sharp"])
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", ERROR_CASES)
def test_error_rule(case: str, dtype: torch.dtype, sharp: bool, block_size: None) -> None:
    """At most twice (gradients: three times) the error of plain torch, and table gradients as good as rounding dS once.

    In float32, sharp, gradients were six times over the budget: lse, rounded at its magnitude, scales a row of P, and a
    delta that was not divided by the row's sum did not cancel against dP.
    """
    sizes, tables, arguments = ERROR_CASES[case]
    inputs = make_inputs(*sizes, **tables, dtype=dtype, seed=7, sharp=sharp)
    inputs = with_different_strides(inputs)
    golden, reference = unlucky_reference(inputs, **arguments)
    results = results_of("blockwise", inputs, **arguments)
    for name, result in results.items():
        assert result.dtype == (torch.float32 if name == "lse" else dtype)
        assert_within_budget(name, result, golden[name], reference[name], factor=3 if name.startswith("d_") else 2)
        if dtype == torch.float32 and name.startswith("d_"):
            assert_gradients_close_fp32(
                name, result, golden[name], [golden[other] for other in results if other.startswith("d_")]
            )
    for table in TABLES:
        if f"d_{table}" in results and dtype != torch.float32:
            assert_table_gradient(f"d_{table}", results[f"d_{table}"], inputs, table=table, **with_keep(inputs, arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_bias_in_float32(implementation: str, dtype: torch.dtype) -> None:
    """rel_bias may stay in float32 beside inputs of lower precision; its gradient is float32 then."""
    inputs = make_inputs(2, 2, 33, 35, 16, num_rows=21, rel_bias=True, dtype=dtype, seed=0)
    assert inputs.rel_bias is not None
    inputs = inputs._replace(rel_bias=inputs.rel_bias.float())
    results, golden = results_of(implementation, inputs), by_hand(inputs)
    assert results["d_rel_bias"].dtype == torch.float32 and results["out"].dtype == dtype
    if implementation == "blockwise":
        assert_table_gradient("d_rel_bias", results["d_rel_bias"], inputs, table="rel_bias")
        rounded = golden["d_rel_bias"].to(dtype).double() - golden["d_rel_bias"]
        error = results["d_rel_bias"].double() - golden["d_rel_bias"]
        assert error.norm() < rounded.norm(), "the gradient was rounded to the inputs' dtype"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that sum over many blocks of queries have, in norm, hardly more error than rounding the result alone makes."""
    cut_blocks(monkeypatch, 128, 1, 64)
    inputs = make_inputs(1, 1, 3000, 24, 16, num_rows=41, dtype=dtype, seed=3)
    golden = dense_gradients(inputs)._asdict()
    results = forward_backward(attend, inputs)
    for name in ("d_key", "d_value", "d_rel_key"):
        unavoidable = (golden[name].to(dtype).double() - golden[name]).norm()
        assert unavoidable > 0
        # To round twice would add as much again, in squares. Half of that is allowed.
        beyond = (results[name].double() - golden[name]).norm() - unavoidable
        within(f"{name}, beyond rounding", beyond.clamp_min(0), (2**0.5 - 1) / 2 * unavoidable)

"""What users of triton_relattn.testing need: right inputs, and assertions that fail when they should, with the numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.expected import assert_table_gradient, exact_results, table_gradient_budget
from tests.tolerance import assert_same
from triton_relattn import check
from triton_relattn.testing import (
    SHARP_FACTOR,
    SHARP_SHIFT,
    Inputs,
    assert_within_budget,
    dropout_mask,
    error_budget,
    last_place,
    make_inputs,
)

GOLDEN = torch.tensor([1.0, -3.0, 0.5], dtype=torch.float64)
REFERENCE = GOLDEN + torch.tensor([0.0, 0.01, 0.0], dtype=torch.float64)
BLIND = torch.tensor([0, 0, math.inf], dtype=torch.float64)


def inputs_of(dtype: torch.dtype = torch.float64, **changes: Any) -> Inputs:
    """Inputs with every tensor that a call can have."""
    tables = {"rel_width": 3, "rel_value": True, "rel_bias": True, "rel_p2c": True, "per_head": True, "key_heads": 2}
    return make_inputs(2, 4, 5, 7, 8, 6, **{"num_rows": 9, "dtype": dtype, "seed": 11, **tables, **changes})


def test_inputs() -> None:
    """The numbers are the same in every precision and with any other tensors; they depend only on the seed."""
    exact, sharp, state = inputs_of(), inputs_of(sharp=True), torch.get_rng_state()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for name, tensor in inputs_of(dtype)._asdict().items():
            assert torch.equal(tensor, getattr(exact, name).to(torch.float32 if name == "d_lse" else dtype))
    plain = inputs_of(rel_width=None, rel_value=False, rel_bias=False, rel_p2c=False)
    assert torch.equal(plain.query, exact.query) and torch.equal(plain.d_out, exact.d_out) and not plain.terms()
    assert not torch.equal(inputs_of(seed=12).query, exact.query) and torch.equal(state, torch.get_rng_state())
    assert torch.equal(sharp.query, exact.query * SHARP_FACTOR) and torch.equal(sharp.key, exact.key)
    assert torch.equal(sharp.value, exact.value + SHARP_SHIFT) and torch.equal(sharp.d_out, exact.d_out + SHARP_SHIFT)
    with pytest.raises(ValueError, match="rel_width=3"):
        inputs_of(num_rows=None)


def test_shapes() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs_of()._asdict().items()}
    positions = {"query": (2, 4, 5, 8), "key": (2, 2, 7, 8), "value": (2, 2, 7, 6), "rel_query": (2, 4, 5, 3)}
    tables = {"rel_key": (4, 9, 3), "rel_value": (4, 9, 6), "rel_bias": (4, 9), "rel_p2c": (4, 9, 8)}
    assert shapes == {**positions, **tables, "d_out": (2, 4, 5, 6), "d_lse": (2, 4, 5)}
    shared = inputs_of(per_head=False).terms()
    assert [tuple(shared[name].shape) for name in ("rel_value", "rel_bias", "rel_p2c")] == [(9, 6), (9,), (9, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("reference", [REFERENCE, GOLDEN], ids=["reference", "exact_reference"])
def test_a_budget_passes_and_fails_at_its_edge(dtype: torch.dtype, reference: torch.Tensor) -> None:
    """The budget is factor times the reference's error, plus two units in the last place of the largest number in dtype."""
    budget = error_budget(GOLDEN, reference, dtype, factor=2)
    assert budget == 2 * float((reference - GOLDEN).abs().max()) + 2 * last_place(3.0, dtype)
    unit = torch.tensor([0, 0, last_place(0.5, dtype)], dtype=torch.float64)  # of the third number, the only wrong one
    steps = budget // float(unit[2])
    options: dict[str, Any] = {"factor": 2, "exact_reference": reference is GOLDEN}
    assert_within_budget("out", (GOLDEN + (steps - 1) * unit).to(dtype), GOLDEN, reference, **options)
    with pytest.raises(AssertionError) as raised:
        assert_within_budget("out", (GOLDEN + (steps + 2) * unit).to(dtype), GOLDEN, reference, **options)
    for part in ("out: error ", f"budget {budget:.3e}", "of the reference", "worst at (2,)", "expected 0.5", "1 of 3 elements"):
        assert part in str(raised.value)


def test_a_budget_of_lse() -> None:
    """-inf is right where golden has it, and does not contribute to the budget elsewhere."""
    wrong = GOLDEN + torch.tensor([1, 0, 0], dtype=torch.float64)
    assert_within_budget("lse", GOLDEN - BLIND, GOLDEN - BLIND, REFERENCE - BLIND, factor=2)
    with pytest.raises(AssertionError, match=r"lse: error .* worst at \(0,\)"):
        assert_within_budget("lse", wrong - BLIND, GOLDEN - BLIND, REFERENCE - BLIND, factor=2)


NAN = torch.tensor([1, math.nan, 1])


@pytest.mark.parametrize(
    ("actual", "golden", "reference", "message"),
    [
        (GOLDEN, 0 * GOLDEN, REFERENCE, "golden result is all zero"),
        (GOLDEN, GOLDEN, GOLDEN, "the reference has no error"),
        (GOLDEN[:0], GOLDEN[:0], GOLDEN[:0], "nothing to compare"),
        (GOLDEN[:2], GOLDEN, REFERENCE, r"shape \(2,\), expected \(3,\)"),
        (GOLDEN * NAN, GOLDEN, REFERENCE, r"1 of 3 elements are not finite .* first at \(1,\): got nan"),
        (GOLDEN + BLIND, GOLDEN, REFERENCE, r"not finite .* \(2,\): got inf"),
        (GOLDEN, GOLDEN, REFERENCE * math.nan, r"\(reference\): 3 of 3 elements are not finite"),
        (GOLDEN, GOLDEN * math.nan, REFERENCE, "golden result has NaN"),
        (GOLDEN, GOLDEN - BLIND, REFERENCE, r"not -inf\) where"),
    ],
)
def test_a_budget_refuses(actual: torch.Tensor, golden: torch.Tensor, reference: torch.Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_within_budget("out", actual, golden, reference, factor=2)


@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
@pytest.mark.parametrize("table", ["rel_key", "rel_value", "rel_bias", "rel_p2c"])
def test_the_gradient_of_each_table_fails_beyond_its_budget(table: str, per_head: bool) -> None:
    """Checked with every argument that changes dS or P."""
    inputs = inputs_of(torch.bfloat16, sharp=True, per_head=per_head)
    arguments: dict[str, Any] = {"rel_scale": 0.7, "softcap": 20.0, "dropout_p": 0.3, "window_size": (3, 4)}
    golden, budget = table_gradient_budget(inputs, table=table, **arguments)
    assert_same(table, golden, exact_results(inputs, **arguments)[f"d_{table}"])
    assert 0 < budget < golden.abs().max()
    shift = torch.zeros(golden.shape, dtype=torch.float64)
    shift.view(-1)[golden.numel() // 2] = budget
    for right in (golden + 0.99 * shift, golden.to(torch.bfloat16)):
        assert_table_gradient(table, right, inputs, table=table, **arguments)
    with pytest.raises(AssertionError, match="times the allowance"):
        assert_table_gradient(table, golden + 1.01 * shift, inputs, table=table, **arguments)


def test_dropout_masks() -> None:
    state = torch.get_rng_state()
    assert dropout_mask(2, 3, 4, 5, 0.0).all() and torch.equal(state, torch.get_rng_state())
    assert dropout_mask(2, 3, 4, 5, 0.5).shape == (2, 3, 4, 5) and not torch.equal(state, torch.get_rng_state())
    assert not dropout_mask(2, 3, 4, 5, 1.0).any()
    for wrong in (-0.1, 1.5):
        with pytest.raises(ValueError, match=r"dropout_p must lie in \[0, 1\], got"):
            dropout_mask(1, 1, 2, 2, wrong)


def test_golden_results() -> None:
    """The golden results of check are those that tests expect, with every argument."""
    mask = torch.arange(7.0).masked_fill(torch.arange(7) == 4, -math.inf)
    arguments: dict[str, Any] = {"query_offset": torch.tensor([2, -1]), "window_size": (3, 2), "rel_scale": 0.7, "softcap": 2.0}
    arguments |= {"attn_mask": mask, "key_lengths": torch.tensor([7, 5])}
    expected = exact_results(inputs_of(torch.float32), **arguments)
    for name, result in check.exact_results(inputs_of(torch.float32), **arguments).items():
        assert_same(name, result, expected[name])


@pytest.mark.parametrize(
    ("dtype", "name", "rule"), [(torch.float32, "d_query", "in norm"), (torch.float16, "d_rel_key", "1.5 times")]
)
def test_check_does_not_rely_on_plain_torch_alone(dtype: torch.dtype, name: str, rule: str) -> None:
    """An error far below plain torch's is still rejected if rounding cannot explain it."""
    inputs = make_inputs(1, 2, 17, 19, 16, num_rows=7, dtype=dtype, seed=0)
    golden = check.exact_results(inputs)
    poor = {result: exact * 1.1 for result, exact in golden.items()}
    check.check_result(name, golden[name].to(dtype), golden, poor, inputs, {})
    with pytest.raises(AssertionError, match=rule):
        check.check_result(name, (golden[name] * 1.02).to(dtype), golden, poor, inputs, {})

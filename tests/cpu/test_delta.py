"""The delta of the backward: what a rounded out does to a table's gradient, and that the operator avoids it.

dS = P (dP - delta). With delta = rowsum(out * d_out) and an out rounded to the input dtype, every dS of a row carries the same
small error; the table's gradient is a sum over all rows, and the errors add up.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.check import attend
from tests.expected import assert_table_gradient
from tests.samples import with_different_strides
from triton_relattn import RelativePositions
from triton_relattn.testing import Inputs, forward_backward, make_inputs

CASES: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    # length, rows, per head, arguments
    "full": (256, 511, False, {}),
    "causal": (384, 384, True, {"positions": RelativePositions(-383, 0), "is_causal": True}),
    "clipped": (512, 33, False, {}),
}
DTYPES = (torch.bfloat16, torch.float16)


def sharp_inputs(length: int, num_rows: int, per_head: bool, dtype: torch.dtype) -> Inputs:
    inputs = make_inputs(2, 2, length, length, 64, num_rows=num_rows, per_head=per_head, dtype=dtype, seed=1, sharp=True)
    return with_different_strides(inputs)


def dense_table_gradient(
    inputs: Inputs, rounded_delta: bool, *, positions: RelativePositions | None = None, is_causal: bool = False
) -> torch.Tensor:
    """A dense float32 backward of sharp attention that differs only in how delta is computed."""
    query, key, value, table, d_out, d_lse = inputs.to(torch.float32)[:6]
    assert table is not None
    length, scale = query.shape[2], query.shape[-1] ** -0.5
    relative_position = torch.arange(length) - torch.arange(length)[:, None]
    row, _ = (positions or RelativePositions.centred(table.shape[-2])).rows(relative_position)
    tables = table.expand(query.shape[1], *table.shape[-2:])
    logits = scale * (query @ key.mT + (query @ tables.mT).gather(-1, row.expand(*query.shape[:2], -1, -1)))
    logits = logits.masked_fill((relative_position > 0) & is_causal, float("-inf"))
    probs = logits.softmax(-1)
    d_probs = d_out @ value.mT
    if rounded_delta:
        out = (probs @ value).to(inputs.value.dtype)
        delta = (out.float() * d_out).sum(-1, keepdim=True)
    else:
        delta = (probs * d_probs).sum(-1, keepdim=True)
    d_scores = probs * (d_probs - delta + d_lse[..., None])
    by_row = torch.zeros(*query.shape[:3], tables.shape[1]).scatter_add_(-1, row.expand_as(d_scores), d_scores)
    gradient = scale * by_row.mT @ query
    return (gradient.sum(0) if table.dim() == 3 else gradient.sum((0, 1))).to(inputs.query.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_table_gradient_is_as_good_as_one_rounding(case: str, dtype: torch.dtype) -> None:
    length, num_rows, per_head, arguments = CASES[case]
    inputs = sharp_inputs(length, num_rows, per_head, dtype)
    assert_table_gradient("d_rel_key", forward_backward(attend, inputs, **arguments)["d_rel_key"], inputs, **arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_delta_from_a_rounded_out_fails_the_yardstick(case: str, dtype: torch.dtype) -> None:
    """The same backward passes with the exact delta and fails with the rounded one, so the yardstick detects the difference."""
    length, num_rows, per_head, arguments = CASES[case]
    inputs = sharp_inputs(length, num_rows, per_head, dtype)
    assert_table_gradient("exact", dense_table_gradient(inputs, rounded_delta=False, **arguments), inputs, **arguments)
    with pytest.raises(AssertionError, match="times the allowance"):
        assert_table_gradient("rounded", dense_table_gradient(inputs, rounded_delta=True, **arguments), inputs, **arguments)

"""A table row belongs to one diagonal: nothing else moves with it, and nothing else gets its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import one_hot_case
from tests.tolerance import within
from tests.way import Way
from triton_relattn import RelativePositions
from triton_relattn.testing import dense_gradients, make_inputs


@pytest.mark.parametrize("r", [-9, -1, 0, 2, 11])
@pytest.mark.parametrize("query_offset", [0, 4, -3])
def test_one_table_row_moves_only_its_diagonal(r: int, query_offset: int, way: Way) -> None:
    """Values that are the identity show the probabilities: exactly the logits with j - i - query_offset = r change."""
    inputs = make_inputs(1, 2, 33, 35, 16, 35, num_rows=41, dtype=way.dtype, seed=r + 20)
    assert inputs.rel_key is not None
    table = torch.zeros_like(inputs.rel_key)
    table[r + 20] = inputs.rel_key[r + 20]
    identity = torch.eye(35, dtype=way.dtype).expand(1, 2, 35, 35)

    def logits(rel_key: torch.Tensor | None) -> torch.Tensor:
        out, lse = way.attend(inputs.query, inputs.key, identity, rel_key, query_offset=query_offset)
        found: torch.Tensor = out.double().log() + lse.double()[..., None]
        return found

    changed, plain = logits(table), logits(None)
    i, j = torch.arange(33)[:, None], torch.arange(35)
    moved = torch.where(j - i - query_offset == r, (inputs.query @ table[r + 20] / 4).double()[..., None], 0)
    # Of each of the two a handful of numbers are rounded that are at most as large as the largest logit.
    rounding = 16 * torch.finfo(way.dtype).eps * max(float(plain.abs().max()), float(changed.abs().max()))
    assert rounding < moved.abs().max()
    within("change of the logits", (changed - plain - moved).abs(), rounding)


@pytest.mark.parametrize("dtype", [torch.float16, None], ids=["float16", "exact"])
@pytest.mark.parametrize("outside", ["clamp", "zero"])
def test_one_hot_d_out_reaches_only_its_pairs(outside: Any, dtype: torch.dtype | None, way: Way) -> None:
    """The gradient of one query's output touches its own row, its visible keys and their table rows; all else is exactly zero."""
    inputs, arguments, hit = one_hot_case(outside, way.width, dtype or way.dtype)
    results = way.results(inputs, **arguments)
    way.check(results, inputs, **arguments)
    assert torch.equal(results["d_rel_key"].any(-1), hit)
    assert torch.equal(results["d_query"].any(-1).nonzero(), torch.tensor([[1, 0, 21]]))
    keys = torch.zeros(2, 2, 50, dtype=torch.bool)
    keys[1, 0, : 21 + 5 + 1] = True
    assert torch.equal(results["d_key"].any(-1), keys) and torch.equal(results["d_value"].any(-1), keys)


@pytest.mark.parametrize("r", [-33, -16, -1, 0, 13])
def test_one_table_row_reaches_only_its_diagonal(r: int, way: Way) -> None:
    """Without keys to speak of, only queries with a visible key at r get a gradient, along the only row that is not zero."""
    positions, query_offset = RelativePositions(-60, 60), -7
    inputs = make_inputs(1, 1, 45, 40, way.width, num_rows=121, dtype=way.dtype, seed=r + 60)
    assert inputs.rel_key is not None
    table = torch.zeros_like(inputs.rel_key)
    table[r + 60] = inputs.rel_key[r + 60]
    inputs = inputs._replace(rel_key=table, key=torch.zeros_like(inputs.key))
    arguments: dict[str, Any] = {"positions": positions, "query_offset": query_offset}
    results = way.results(inputs, **arguments)
    way.check(results, inputs, **arguments)
    j = torch.arange(45) + query_offset + r
    on_diagonal = (j >= 0) & (j < 40)
    assert on_diagonal.any() and torch.equal(results["d_query"][0, 0].any(-1), on_diagonal)
    assert torch.equal(dense_gradients(inputs, **arguments).d_query[0, 0].any(-1), on_diagonal)

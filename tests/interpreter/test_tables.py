"""Tables whose ends fall anywhere in a tile, with every term; tables that heads share beside tables of each head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.interpreter.launch import check_every_term
from triton_relattn import RelativePositions
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.config.selection import TileConfig
from triton_relattn.testing import make_inputs

SMALL = {name: TileConfig(32, 16, 4, 1) for name in selection.KERNELS}


@pytest.mark.parametrize(("first", "last"), [(-31, 19), (-32, 18)], ids=["past", "future"])
def test_a_table_one_row_short(first: int, last: int) -> None:
    """A clamped table that has a row for every pair of 33 queries and 20 keys but one."""
    inputs = make_inputs(1, 1, 33, 20, 16, num_rows=last - first + 1, rel_value=True, dtype=torch.float32, seed=2)
    check_every_term(inputs, SMALL, positions=RelativePositions(first, last))


@pytest.mark.parametrize("kind", ["clamp", "zero"])
@pytest.mark.parametrize("shared", ["rel_key", "rel_value", "rel_bias"])
def test_a_shared_table_beside_tables_of_heads(shared: str, kind: Any) -> None:
    """Transformer-XL's fold has such: the gradient of the shared one is summed over the heads."""
    positions = RelativePositions(-4, 6, kind)
    terms: dict[str, Any] = {"num_rows": 11, "rel_width": 12, "rel_value": True, "rel_bias": True, "dtype": torch.float32}
    inputs, others = (make_inputs(2, 2, 20, 33, 16, 12, per_head=per_head, **terms, seed=3) for per_head in (True, False))
    check_every_term(inputs._replace(**{shared: getattr(others, shared)}), SMALL, positions=positions)


@pytest.mark.thorough
@pytest.mark.parametrize("rel_width", [None, 12], ids=["query", "rel_query"])
@pytest.mark.parametrize(
    "options", [{"rel_scale": -0.3}, {"rel_scale": 0.7, "softcap": 3.0, "dropout_p": 0.3}], ids=["scale", "all"]
)
def test_far_keys(options: dict[str, Any], rel_width: int | None) -> None:
    """Most keys lie in tiles beyond a clamped table, past and future, with every term and scales of their own."""
    terms: dict[str, Any] = {"num_rows": 5, "rel_width": rel_width, "rel_value": True, "rel_bias": True}
    inputs = make_inputs(1, 2, 40, 90, 16, 12, **terms, dtype=torch.float32, seed=5)
    check_every_term(inputs, SMALL, positions=RelativePositions(-2, 2), query_offset=25, **options)

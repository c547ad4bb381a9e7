"""rel_p2c, the table whose products are with keys, in the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.expected import assert_table_gradient, exact_results, table_gradient_budget
from tests.interpreter.launch import OTHER, SMALL, all_gradients, check_forward_backward, tile
from tests.tolerance import assert_at_most
from triton_relattn import RelativePositions
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.testing import Inputs, make_inputs

REGISTERS = {
    "forward": TileConfig(32, 16, 2, 1, "scores", "registers"),
    "dkv": TileConfig(32, 32, 2, 1, "scores", "registers"),
    "dtable": tile(16, 16),
    "stored_dq": tile(32, 32),
    "dq": TileConfig(32, 16, 2, 1, "scores", "registers"),
    "dp2c": tile(32, 32),
}
TILES = (SMALL, OTHER, REGISTERS, None)


def p2c_inputs(sizes: tuple[int, int, int, int] = (2, 2, 37, 41), num_rows: int = 101, **others: Any) -> Inputs:
    given: dict[str, Any] = {"rel_p2c": True, "dtype": torch.float32, "seed": 3, **others}
    return make_inputs(*sizes, 16, 12, num_rows=num_rows, **given)


FAR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both sides": ({}, {}),
    "shared keys": ({"sizes": (1, 4, 150, 160), "key_heads": 2}, {"enable_gqa": True, "rel_scale": 0.7}),
    "window": ({"sizes": (1, 2, 150, 160), "per_head": True}, {"window_size": (120, 90)}),
    "causal": ({"rel_key": False}, {"is_causal": True, "query_offset": 9}),
    "values and bias": ({"sizes": (1, 1, 150, 160), "rel_value": True, "rel_bias": True, "per_head": True}, {}),
    "lengths": ({"sizes": (2, 1, 90, 100)}, {"key_lengths": torch.tensor([100, 61]), "query_offset": torch.tensor([0, -70])}),
    "dropout": ({"rel_bias": True}, {"dropout_p": 0.2, "softcap": 4.0}),
    "own query": ({"rel_width": 8}, {"query_offset": -80, "rel_scale": -0.5}),
}
"""Options and arguments of calls with tiles beyond the table, in the past, future or both."""
FAR_RUNS = [
    (name, outside, number % 3, "0" if number // 2 % 2 != number % 2 else "")
    for number, (name, outside) in enumerate((name, outside) for name in FAR for outside in ("clamp", "zero"))
]


def far_call(name: str, outside: Any, **others: Any) -> tuple[Inputs, dict[str, Any]]:
    positions = RelativePositions(-3, 4, outside)
    options, arguments = FAR[name]
    return p2c_inputs(**{"sizes": (1, 1, 90, 100), "num_rows": positions.num_rows, **options, **others}), {
        "positions": positions,
        **arguments,
    }


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "outside", "tiles", "limit"), FAR_RUNS)
def test_far_tiles(name: str, outside: Any, tiles: int, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles beyond a bounded table, where all pairs of a key have the same term."""
    monkeypatch.setenv("TRITON_RELATTN_WORKSPACE", limit)
    inputs, arguments = far_call(name, outside)
    check_forward_backward(inputs, TILES[tiles], **arguments)


@pytest.mark.thorough
@pytest.mark.parametrize("limit", ["0", ""])
def test_gradient_of_far_keys_in_float16(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient has the error of dS rounded once, although nearly all pairs use an end row."""
    monkeypatch.setenv("TRITON_RELATTN_WORKSPACE", limit)
    inputs, arguments = far_call("window", "clamp", dtype=torch.float16, sharp=True)
    assert_table_gradient(
        "d_rel_p2c", all_gradients(inputs, REGISTERS, **arguments)["d_rel_p2c"], inputs, table="rel_p2c", **arguments
    )


def test_sums_of_end_rows_are_float32() -> None:
    """Sums over keys for the end rows, which nearly all pairs use, may be large, and are not rounded."""
    inputs = make_inputs(1, 1, 16, 400, 16, num_rows=3, rel_p2c=True, rel_key=False, dtype=torch.float16, seed=1)
    inputs = inputs._replace(key=inputs.key.abs() + 1, d_out=inputs.d_out * 8)
    golden = exact_results(inputs)["d_rel_p2c"]
    result = all_gradients(inputs, SMALL, ("d_rel_p2c",))["d_rel_p2c"]
    assert result.dtype == torch.float16
    budgeted, budget = table_gradient_budget(inputs, table="rel_p2c")
    assert torch.equal(budgeted, golden)
    assert_at_most("d_rel_p2c", (result.double() - golden).abs(), budget)

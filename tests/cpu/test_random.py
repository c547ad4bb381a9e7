"""Random combinations of everything, in every implementation, against loops over pairs and the hand-written backward."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.cases import ALL_FEATURES, random_case
from tests.conftest import cut_blocks
from tests.oracle import assert_same, by_hand, by_loops, quick_and_slow, results_of, unlucky_reference
from triton_relattn import RelativePositions
from triton_relattn.testing import assert_gradients_close_fp32, assert_within_budget, make_inputs

# Loops over pairs are slow: short sequences, with all that lengths decide in reach of small blocks.
SHORT: dict[str, Any] = {"lengths": (1, 2, 5, 9, 15, 16, 17, 24), "uneven_lengths": ((1, 61), (61, 1), (3, 40), (40, 3))}
ALL: dict[str, Any] = {"features": ALL_FEATURES}


def draw_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block sizes of blockwise, drawn from the seed."""
    choose = random.Random(-1 - seed)
    cut_blocks(monkeypatch, *map(choose.choice, ((1, 7, 16, 64, 128), (1, 1 << 9, 1 << 13, 1 << 18), (1, 3, 8, 64))))


@pytest.mark.parametrize("seed", quick_and_slow(40, 500))
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_against_loops(implementation: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """out, lse and the gradients of all tensors, in float64, from code that shares only the definition."""
    draw_blocks(seed, monkeypatch)
    inputs, arguments = random_case(seed, **SHORT, **ALL)
    results, expected = results_of(implementation, inputs, **arguments), by_loops(inputs, **arguments)
    assert results.keys() == expected.keys()
    for name, result in results.items():
        assert_same(name, result, expected[name])


@pytest.mark.parametrize("seed", quick_and_slow(40, 500))
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_against_the_backward_by_hand(implementation: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer sequences, of many blocks, in float64."""
    draw_blocks(seed, monkeypatch)
    inputs, arguments = random_case(1000 + seed, **ALL)
    results, expected = results_of(implementation, inputs, **arguments), by_hand(inputs, **arguments)
    for name, result in results.items():
        assert_same(name, result, expected[name])


@pytest.mark.parametrize("seed", quick_and_slow(40, 500))
def test_float32(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 2e-4 in norm; where enough elements are compared, out and lse also have at most twice the reference's error."""
    draw_blocks(seed, monkeypatch)
    inputs, arguments = random_case(2000 + seed, dtype=torch.float32, **ALL)
    results = results_of("blockwise", inputs, **arguments)
    golden, reference = unlucky_reference(inputs, **arguments)
    finite = {name: golden[name].masked_fill(golden[name].isinf(), 0) for name in results}
    gradients = [finite[name] for name in results if name.startswith("d_")]
    for name, result in results.items():
        assert result.dtype == torch.float32
        others = gradients if name.startswith("d_") else [finite[name]]
        if not any(bool(other.any()) for other in others):
            assert torch.equal(result.double(), golden[name]), name
            continue
        assert_gradients_close_fp32(name, result, golden[name], others)
        if name in ("out", "lse") and result.numel() >= 64:
            assert_within_budget(name, result, golden[name], reference[name], factor=2, exact_reference=True)


TABLES: dict[str, RelativePositions] = {
    "past": RelativePositions(-30, -25),
    "future": RelativePositions(25, 27),
    "just_past": RelativePositions(-9, -1),
    "just_future": RelativePositions(1, 9),
    "one_row": RelativePositions(0, 0),
    "one_row_in_the_past": RelativePositions(-3, -3),
    "two_rows": RelativePositions(-1, 0),
}


@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
@pytest.mark.parametrize("outside", ["clamp", "zero"])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_tables_beside_and_short(implementation: str, table: str, outside: Any, per_head: bool, block_size: None) -> None:
    """Tables of all kinds that hold few or none of the relative positions."""
    positions = RelativePositions(TABLES[table].first, TABLES[table].last, outside)
    arguments: dict[str, Any] = {"positions": positions, "is_causal": table == "two_rows"}
    inputs = make_inputs(
        1,
        2,
        18,
        19,
        4,
        3,
        num_rows=positions.num_rows,
        per_head=per_head,
        rel_width=2,
        rel_value=True,
        rel_bias=True,
        rel_p2c=True,
        dtype=torch.float64,
        seed=3,
    )
    results, expected = results_of(implementation, inputs, **arguments), by_loops(inputs, **arguments)
    for name, result in results.items():
        assert_same(name, result, expected[name])

"""What masks hide: queries that see nothing, NaN that nobody sees, and NaN that somebody sees, which goes no further."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from tests.blind import BATCH, BLIND, KEYS, QUERIES
from tests.cases import assert_bit_equal
from tests.way import Way
from triton_relattn import RelativePositions
from triton_relattn.testing import Inputs, dense_gradients, make_inputs, with_different_strides

HEADS = 2
POSITIONS = {
    "full": RelativePositions(-60, 60),
    "clamp": RelativePositions(-4, 6),
    "zero": RelativePositions(-4, 6, "zero"),
}
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "softcap_dropout": {"softcap": 5.0, "dropout_p": 0.3}}


def all_terms(way: Way, positions: RelativePositions, sizes: tuple[int, ...] = (QUERIES, KEYS), **others: Any) -> Inputs:
    """Inputs with every table, and a query of its own for rel_key."""
    terms: dict[str, Any] = {"rel_width": 4, "rel_value": True, "rel_bias": True, "rel_p2c": True}
    given = {"num_rows": positions.num_rows, "dtype": way.dtype, "seed": 4, **terms, **others}
    return make_inputs(BATCH, HEADS, sizes[0], sizes[1], way.width, **given)


@pytest.mark.parametrize("dtype", [torch.float16, None], ids=["float16", "exact"])
@pytest.mark.parametrize(("kind", "options"), [("clamp", "plain"), ("zero", "softcap_dropout"), ("full", "plain")])
@pytest.mark.parametrize("case", BLIND)
def test_rows_that_see_nothing(case: str, kind: str, options: str, dtype: torch.dtype | None, way: Way) -> None:
    """out 0, lse -inf, gradients exactly 0; finite everywhere, also for rows that share a block with rows that see something."""
    arguments, blind = BLIND[case]
    inputs = all_terms(way, POSITIONS[kind], dtype=dtype or way.dtype)
    results = way.results(inputs, positions=POSITIONS[kind], **arguments, **OPTIONS[options])
    assert_blind(results, blind[:, None].expand(BATCH, HEADS, QUERIES))
    assert blind.all() or results["out"][~blind[:, None].expand(BATCH, HEADS, QUERIES)].any(-1).all() or options != "plain"


WHOLE_BLOCKS: dict[str, dict[str, Any]] = {
    "lengths": {"key_lengths": torch.tensor([0, 0])},
    "causal": {"is_causal": True, "query_offset": -17},
    "both": {"is_causal": True, "query_offset": -40, "key_lengths": torch.tensor([0, 5])},
    "all": {"is_causal": True, "query_offset": -50},
}


@pytest.mark.parametrize("dtype", [torch.float16, None], ids=["float16", "exact"])
@pytest.mark.parametrize("kind", [*POSITIONS, None])
@pytest.mark.parametrize("case", WHOLE_BLOCKS)
def test_whole_blocks_that_see_nothing(case: str, kind: str | None, dtype: torch.dtype | None, way: Way) -> None:
    """The same where a block has no query that sees a key; the others are right."""
    positions, arguments = POSITIONS[kind] if kind else None, WHOLE_BLOCKS[case]
    num_rows = positions.num_rows if positions else None
    inputs = make_inputs(2, 1, 50, 13, way.width, num_rows=num_rows, dtype=dtype or way.dtype, seed=4)
    results = way.results(inputs, positions=positions, **arguments)
    limit = arguments.get("key_lengths", torch.tensor([13, 13]))[:, None]
    sees = torch.arange(50) + arguments.get("query_offset", 0) >= 0 if "is_causal" in arguments else torch.ones(50).bool()
    assert_blind(results, ~(sees & (limit > 0))[:, None])
    way.check(results, inputs, positions=positions, **arguments)


def assert_blind(results: dict[str, torch.Tensor], blind: torch.Tensor) -> None:
    """Results are those of queries of which the blind ones (B, H, Nq) see nothing."""
    assert blind.any() and torch.equal(results["lse"] == -math.inf, blind)
    for name in ("out", "d_query", "d_rel_query"):
        assert name not in results or not results[name][blind].any(), name
    gradients = {name: result for name, result in results.items() if name.startswith("d_")}
    assert results["out"].isfinite().all() and all(gradient.isfinite().all() for gradient in gradients.values())
    assert any(gradient.any() for gradient in gradients.values()) != bool(blind.all())


# NaN that no query sees.

UNSEEN: dict[str, dict[str, Any]] = {
    "lengths": {"key_lengths": torch.tensor([7, 0])},
    "causal_offset": {"is_causal": True, "query_offset": -20},
    "window": {"window_size": (2, 1), "query_offset": 9},
    "window_left": {"window_size": (2, -1), "query_offset": 9, "key_lengths": torch.tensor([30, 30])},
    "window_right": {"window_size": (-1, 1), "query_offset": -9},
    "window_and_causal": {"window_size": (3, 7), "is_causal": True, "query_offset": 9},
    "offsets": {"window_size": (2, 1), "query_offset": torch.tensor([9, 12])},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", UNSEEN)
def test_nan_that_no_query_sees(case: str, options: str, tiled: Way) -> None:
    """Keys and values that no query sees, table rows that no visible pair has, and the storage around all tensors may hold NaN:
    no result has any, and their gradients are exactly 0."""
    positions, arguments = RelativePositions(-50, 50), {**UNSEEN[case], **OPTIONS[options]}
    inputs = all_terms(tiled, positions, (37, 41))
    pairs = dense_gradients(inputs, positions=positions, **UNSEEN[case]).probs[:, 0] > 0
    seen_keys = pairs.any(1)
    rows = torch.zeros(101, dtype=torch.bool)
    for entry, i, j in pairs.nonzero().tolist():
        offset = arguments.get("query_offset", 0)
        rows[50 + j - i - (int(offset[entry]) if isinstance(offset, torch.Tensor) else offset)] = True
    assert not seen_keys.all() and not rows.all()
    spoilt = {name: tensor.clone() for name, tensor in inputs._asdict().items() if tensor is not None}
    for name in ("rel_key", "rel_value", "rel_bias", "rel_p2c"):
        spoilt[name][~rows] = math.nan
    for name in ("key", "value"):
        spoilt[name].masked_fill_(~seen_keys[:, None, :, None], math.nan)
    results = tiled.results(with_different_strides(Inputs(**spoilt)), positions=positions, **arguments)
    tiled.check(results, inputs, positions=positions, **arguments)
    assert_bit_equal(results, tiled.results(with_different_strides(inputs), positions=positions, **arguments))
    for name in ("d_rel_key", "d_rel_value", "d_rel_bias", "d_rel_p2c"):
        assert not results[name][~rows].any() and results[name][rows].any(), name
    for name in ("d_key", "d_value"):
        assert not results[name].transpose(1, 2)[~seen_keys].any() and results[name].any(), name


UNREAD_ROWS: dict[str, tuple[RelativePositions, dict[str, Any], slice]] = {
    # table, arguments, and the rows (of 101) that a visible pair of 37 queries and 41 keys has
    "longer": (RelativePositions(-50, 50), {}, slice(50 - 36, 50 + 41)),
    "causal": (RelativePositions(-50, 50), {"is_causal": True}, slice(50 - 36, 51)),
    "causal_zero": (RelativePositions(-2, 98, "zero"), {"is_causal": True}, slice(0, 3)),
    "causal_clamp": (RelativePositions(-2, 98), {"is_causal": True}, slice(0, 3)),
    "lengths": (RelativePositions(-50, 50), {"key_lengths": torch.tensor([7])}, slice(50 - 36, 50 + 7)),
    "lengths_clamp": (RelativePositions(-9, 91), {"key_lengths": torch.tensor([7])}, slice(0, 9 + 7)),
    "lengths_zero": (RelativePositions(-9, 91, "zero"), {"key_lengths": torch.tensor([7])}, slice(0, 9 + 7)),
    "lengths_none": (RelativePositions(-9, 91), {"key_lengths": torch.tensor([0])}, slice(0, 0)),
    "offset": (RelativePositions(-50, 50), {"query_offset": 20}, slice(0, 50 + 41 - 20)),
    "past_zero": (RelativePositions(-200, -100, "zero"), {}, slice(0, 0)),
    "past_clamp": (RelativePositions(-200, -100), {}, slice(100, 101)),
    "past_none": (RelativePositions(-200, -100), {"key_lengths": torch.tensor([0])}, slice(0, 0)),
    "future_zero": (RelativePositions(100, 200, "zero"), {}, slice(0, 0)),
    "future_clamp": (RelativePositions(100, 200), {"is_causal": True}, slice(0, 1)),
    # Queries 0 to 33 see nothing: the first small block.
    "blind_block": (RelativePositions(-50, 50), {"is_causal": True, "query_offset": -34}, slice(50 - 2, 51)),
    "blind_block_zero": (RelativePositions(-1, 99, "zero"), {"is_causal": True, "query_offset": -34}, slice(0, 2)),
    "blind_block_clamp": (RelativePositions(-1, 99), {"is_causal": True, "query_offset": -34}, slice(0, 2)),
    # 37 queries divide no block: rows that only the queries beyond would have.
    "longer_past_clamp": (RelativePositions(-80, 20), {}, slice(80 - 36, 101)),
    "longer_past_zero": (RelativePositions(-80, 20, "zero"), {}, slice(80 - 36, 101)),
    "all_blind": (RelativePositions(-1, 99), {"is_causal": True, "query_offset": -40}, slice(0, 0)),
    "all_blind_future": (RelativePositions(10, 110), {"is_causal": True, "query_offset": -40}, slice(0, 0)),
}


@pytest.mark.parametrize("case", UNREAD_ROWS)
def test_rows_that_no_visible_pair_has_may_hold_nan(case: str, tiled: Way) -> None:
    """Their part of dS is 0, but 0 times NaN is NaN: they are not multiplied by it. Their own gradient is exactly 0."""
    positions, arguments, seen = UNREAD_ROWS[case]
    inputs = make_inputs(1, 2, 37, 41, tiled.width, num_rows=101, dtype=tiled.dtype, seed=3)
    assert inputs.rel_key is not None
    spoilt = torch.full_like(inputs.rel_key, math.nan)
    spoilt[seen] = inputs.rel_key[seen]
    results = tiled.results(inputs._replace(rel_key=spoilt), positions=positions, **arguments)
    tiled.check(results, inputs, positions=positions, **arguments)
    read = torch.zeros(101, dtype=torch.bool)
    read[seen] = True
    assert torch.equal(results["d_rel_key"].any(-1), read)


# NaN that a query has.

WITH_NAN = [
    *itertools.product(["query", "d_out"], POSITIONS, [{"is_causal": True}]),
    ("rel_query", "clamp", {}),
    ("query", "clamp", {"softcap": 5.0, "window_size": (20, 9)}),
]


@pytest.mark.parametrize(("name", "kind", "arguments"), WITH_NAN, ids=str)
def test_nan_in_one_query_stays_in_its_row(name: str, kind: str, arguments: dict[str, Any], tiled: Way) -> None:
    """NaN in a row of a query, or of d_out, reaches only that row and the gradients that it adds to: its head's keys, values and
    tables. All else is bit-equal."""
    inputs = all_terms(tiled, POSITIONS[kind], (40, 29), per_head=True, rel_p2c=False, dtype=torch.float32)
    spoilt = getattr(inputs, name).clone()
    spoilt[1, 1, 20] = math.nan
    results = tiled.results(inputs._replace(**{name: spoilt}), positions=POSITIONS[kind], **arguments)
    expected = tiled.results(inputs, positions=POSITIONS[kind], **arguments)
    for result in ("d_query", "d_rel_query") if name == "d_out" else ("out", "lse", "d_query", "d_rel_query"):
        assert results[result][1, 1, 20].isnan().all(), result
        results[result][1, 1, 20] = expected[result][1, 1, 20]
    for result in ("d_key", "d_value"):
        assert results[result][1, 1].isnan().any(), result
        results[result][1, 1] = expected[result][1, 1]
    for result in ("d_rel_key", "d_rel_value", "d_rel_bias"):
        assert results[result][1].isnan().any(), result
        results[result][1] = expected[result][1]
    assert_bit_equal(results, expected)

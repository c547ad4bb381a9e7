"""Edge cases: diagonals of tables, masks, queries without visible keys, extreme mask values, and NaN in hidden inputs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.check import Way, check, environment, right, run
from tests.expected import TABLES, assert_table_gradient, exact_results
from tests.samples import Sample
from tests.tolerance import assert_at_most, assert_bit_equal, dtype_tolerance
from triton_relattn import RelativePositions
from triton_relattn.testing import Inputs, make_inputs

BATCH, HEADS, QUERIES, KEYS = 2, 2, 30, 13
POSITIONS = {
    "full": RelativePositions(-60, 60),
    "clamp": RelativePositions(-4, 6),
    "zero": RelativePositions(-4, 6, "zero"),
}
PLAIN: dict[str, Any] = {}
FURTHER: dict[str, Any] = {"softcap": 5.0, "dropout_p": 0.3}


def all_terms(way: Way, positions: RelativePositions, sizes: tuple[int, ...] = (QUERIES, KEYS), **others: Any) -> Inputs:
    """Inputs with all tables and a rel_query."""
    terms: dict[str, Any] = {"rel_width": 4, "rel_value": True, "rel_bias": True, "rel_p2c": True}
    given = {"num_rows": positions.num_rows, "dtype": way.dtype, "seed": 4, **terms, **others}
    return make_inputs(BATCH, HEADS, sizes[0], sizes[1], way.width, **given)


# Table rows: each belongs to one diagonal, and changes nothing else.


@pytest.mark.parametrize(("query_offset", "r"), [(0, -9), (0, 0), (0, 2), (4, 11), (4, -1), (-3, 0)])
def test_one_table_row_moves_only_its_diagonal(query_offset: int, r: int, way: Way) -> None:
    """Changing one row changes exactly the logits with j - i - query_offset = r, which identity values show in out."""
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
    # Both sums round a few values that are at most as large as the largest logit.
    rounding = 16 * torch.finfo(way.dtype).eps * max(float(plain.abs().max()), float(changed.abs().max()))
    assert rounding < moved.abs().max()
    assert_at_most("change of the logits", (changed - plain - moved).abs(), rounding)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_bias_in_float32(dtype: torch.dtype, way: Way) -> None:
    """With inputs in 16 bits, a float32 rel_bias has a float32 gradient that was never rounded to 16 bits."""
    if way.implementation == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes bfloat16 differently")
    inputs = make_inputs(2, 2, 33, 35, 16, num_rows=21, rel_bias=True, dtype=dtype, seed=0)
    assert inputs.rel_bias is not None
    inputs = inputs._replace(rel_bias=inputs.rel_bias.float())
    results, golden = way.results(inputs), exact_results(inputs)["d_rel_bias"]
    assert results["d_rel_bias"].dtype == torch.float32 and results["out"].dtype == dtype
    if way.implementation != "reference":
        assert_table_gradient("d_rel_bias", results["d_rel_bias"], inputs, table="rel_bias")
        assert golden is not None
        rounded = (golden.to(dtype).double() - golden).norm()
        assert (results["d_rel_bias"].double() - golden).norm() < rounded


@pytest.mark.parametrize("outside", ["clamp", pytest.param("zero", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("table", TABLES)
def test_tables_about_as_long_as_the_call(table: str, outside: str, way: Way) -> None:
    """Tables whose first and last rows are within two of the most distant keys: a row more or less is one key of the far term."""
    ends = [-3, -1, 0, 2] if way.implementation == "triton" else range(-3, 3)
    for before, behind in itertools.product(ends, ends):
        sample = Sample(num_queries=10, num_keys=12, tables=(table,), positions=(-9 + before, 11 + behind, outside))
        check(replace(sample, **way.fields), way)


@pytest.mark.parametrize("mask", [None, "float32"])
@pytest.mark.parametrize(
    "of_sequences",
    [
        *({"query_offset": (0, 3, -4)}, {"key_lengths": (20, 5, 12)}, {"query_offset": (5, 5, 2), "key_lengths": (9, 20, 1)}),
        {"query_offset": (20, 0, -20), "window_size": (-1, 4), "blocks": 7},
    ],
)
def test_what_differs_by_sequence(of_sequences: dict[str, Any], mask: str | None, way: Way) -> None:
    """Lengths and offsets of sequences, with values so few that probabilities are kept for the backward."""
    sample = Sample(batch=3, num_queries=20, num_keys=20, tables=("rel_key",), positions=(-19, 19, "clamp"), **of_sequences)
    check(replace(sample, **way.fields | {"dtype": "float32"}, mask=mask, mask_shape=(3, 1, 1, 20) if mask else ()), way)


SHAPES: dict[str, dict[str, Any]] = {
    "widths": {"width": 40, "rel_width": 80},
    "a narrow query": {"width": 80, "rel_width": 12, "is_causal": True},
    "equal widths": {"width": 96, "value_width": 96, "query_offset": 4},
    "a value of 40": {"value_width": 40},
    "groups of 2": {"key_heads": 2, "group": 2},
    "groups of 3": {"group": 3, "per_head": TABLES, "is_causal": True},
    "rel_scale": {"rel_scale": -0.3},
    "rel_scale of the query": {"rel_width": None, "rel_scale": 0.7, "scale": 0.1},
    "rel_scale 0": {"rel_scale": 0.0},
    "scale 0": {"scale": 0.0, "rel_scale": 0.2},
    "a tiny scale": {"scale": 1e-39, "rel_scale": 0.2},
    "scale 0, softcap": {"scale": 0.0, "rel_scale": 0.2, "softcap": 2.0},
    "nothing but the bias": {"scale": 0.0, "rel_scale": 0.0},
    "a negative scale": {"scale": -0.4},
    "a negative scale of the query": {"rel_width": None, "scale": -0.4, "rel_scale": 0.5},
    "a negative scale, softcap": {"rel_width": None, "scale": -0.4, "softcap": 2.0},
    "scales that differ by 1e5": {
        "tables": ("rel_key",),
        "rel_width": None,
        "dtype": "float16",
        "scale": 1e-4,
        "rel_scale": 10.0,
    },
    "almost no dropout": {"dropout_p": 2**-32},
    "everything is dropped": {"dropout_p": 1.0},
    **{f"no {size}": {size: 0, "batch": 2 * (size != "batch")} for size in ("batch", "key_heads", "num_queries", "num_keys")},
    "no keys, no tables": {"num_keys": 0, "tables": (), "positions": None, "rel_width": None},
    "by the table alone": {"tables": ("rel_key",), "rel_width": None, "dtype": "float16", "scale": -1e-6, "rel_scale": 1.0},
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_and_scales(case: str, tiled: Way) -> None:
    """Widths that differ or are not powers of two, heads that share keys, and scales of any sign and ratio."""
    number = list(SHAPES).index(case)
    fields: dict[str, Any] = {"num_queries": 21, "num_keys": 35, "value_width": 12, "rel_width": 12, "tables": TABLES[:3]}
    fields |= {"positions": (-4, 6, ("clamp", "zero")[number % 2]), "seed": number, "blocks": number}
    check(Sample(**{**fields, **SHAPES[case]}), tiled)


def test_a_table_beyond_all_positions_is_used_twice(way: Way) -> None:
    """A block of old keys: all pairs have the table's end row, and the table is no less usable in another call."""
    inputs = make_inputs(1, 2, 300 if way.implementation != "triton" else 40, 40, 16, num_rows=17, dtype=way.dtype, seed=3)
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs._asdict().items() if tensor is not None}
    table = leaves["rel_key"]
    used = table.square().sum()
    for offset in (4096, -4096, 4096):
        used = used + way.attend(*(leaves[name] for name in ("query", "key", "value", "rel_key")), query_offset=offset)[0].sum()
    used.backward()
    assert table._version == 0 and table.grad is not None and table.grad.isfinite().all()


# Masks.


@pytest.mark.parametrize(
    ("dtype", "mask_dtype"),
    [(None, None), (None, torch.float32), (torch.float16, torch.float32)],
    ids=["exact", "exact_and_float32", "float16_and_float32"],
)
def test_a_mask_of_the_lowest_number(dtype: torch.dtype | None, mask_dtype: torch.dtype | None, way: Way) -> None:
    """finfo.min is finite and hides nothing: a query with it at all keys attends uniformly, and lse is that value. Keys that have
    it beside others get no weight."""
    if dtype == torch.float16 and way.implementation == "reference":
        pytest.skip("plain torch adds in float16, where that value is -inf")
    dtype, positions = dtype or way.dtype, POSITIONS["clamp"]
    mask = torch.zeros(QUERIES, KEYS, dtype=mask_dtype or dtype)
    lowest = torch.finfo(mask.dtype).min
    mask[5], mask[6, 3:] = lowest, lowest
    inputs = all_terms(way, positions, dtype=dtype)._replace(rel_value=None)
    results = way.results(inputs, positions=positions, attn_mask=mask)
    golden: Any = exact_results(inputs, positions=positions, attn_mask=mask)
    golden["out"][:, :, 5] = inputs.value.double().mean(2)
    # In 16 bits P, dS, out for delta and the result are rounded: half a unit each, with a factor of two of room.
    relative = 4 * torch.finfo(dtype).eps if dtype == torch.float16 else dtype_tolerance(dtype)
    for name, result in results.items():
        assert result.isfinite().all(), name
        error, exact = result.double() - golden[name], golden[name]
        if name == "lse":
            assert_at_most(name, (error[:, :, 5] / lowest).abs(), dtype_tolerance(result.dtype))
            error[:, :, 5], exact[:, :, 5] = 0, 0
        assert_at_most(name, error.norm(), relative * float(exact.norm()))


@pytest.mark.parametrize("table", [None, "rel_key", "rel_bias"])
def test_a_mask_broadcasts_along_any_dimension(table: str | None, way: Way) -> None:
    """Each of the mask's four sizes may be 1, also that of the keys."""
    sample = Sample(batch=BATCH, key_heads=HEADS, num_queries=QUERIES, num_keys=KEYS, **way.fields)
    sample = replace(sample, tables=(table,), positions=(-4, 6, "clamp")) if table else sample
    for shape in itertools.product(*((size, 1) for size in (BATCH, HEADS, QUERIES, KEYS))):
        mask = "bool" if shape.count(1) in (2, 3) else sample.dtype
        check(replace(sample, mask=mask, mask_shape=shape), way)


@pytest.mark.parametrize("masked", [False, True])
def test_a_bias_that_hides_keys(masked: bool, way: Way) -> None:
    """A query whose logits are all -inf, by rel_bias alone or with a mask, sees nothing; others are as with a bool mask."""
    inputs = all_terms(way, RelativePositions(-29, 39), (30, 40))._replace(rel_value=None)
    positions, mask = RelativePositions(-29, 39), torch.arange(40) > 3 if masked else torch.ones(40, dtype=torch.bool)
    assert inputs.rel_bias is not None
    bias = inputs.rel_bias.clone()
    bias[29 - 6 :] = -math.inf  # only keys more than six before the query are visible
    results = way.results(inputs._replace(rel_bias=bias), positions=positions, attn_mask=mask if masked else None)
    visible = (torch.arange(40) - torch.arange(30)[:, None] < -6) & mask
    assert not visible.any(-1).all() and not results["d_rel_bias"][29 - 6 :].any()
    way.check(results, inputs, positions=positions, attn_mask=visible)


# Queries that see nothing: out 0, lse -inf, gradients exactly 0, and no change of other queries.

HIDES_ALL = 5
"""With this seed, a mask of one element hides."""
MASK = {"mask_shape": (BATCH, 1, QUERIES, KEYS)}
BLIND: dict[str, dict[str, Any]] = {
    "bool_mask": {"mask": "bool", **MASK},
    "float_mask": {"mask": "float32", **MASK},
    "bool_mask_of_all": {"mask": "bool", "seed": HIDES_ALL},
    "float_mask_of_all": {"mask": "float32", "seed": HIDES_ALL},
    "lengths": {"key_lengths": (0, 13)},
    "causal": {"is_causal": True, "query_offset": -17},
    "causal_offsets": {"is_causal": True, "query_offset": (-17, 0)},
    "window_past": {"window_size": (2, -1)},
    "window_future": {"window_size": (-1, 3), "query_offset": -9},
    "window_beside": {"window_size": (1, 1), "query_offset": 100},
    "window_and_length": {"window_size": (2, 0), "key_lengths": (13, 5)},
    "mask_and_causal": {"is_causal": True, "mask": "bool", "mask_shape": (KEYS,), "seed": 81},
}
BLIND_RUNS = [*zip(BLIND, itertools.cycle(["clamp", "zero", "full"]), itertools.repeat(PLAIN), strict=False)]
BLIND_RUNS += zip([*BLIND][::2], itertools.cycle(["zero", "clamp"]), itertools.repeat(FURTHER), strict=False)
BLIND_RUNS += [(case, "clamp", {"dtype": "float16"}) for case in ("bool_mask", "float_mask_of_all", "lengths", "window_beside")]


def blind_sample(case: str, kind: str, way: Way, **options: Any) -> tuple[Sample, torch.Tensor]:
    """A call, and which of its queries see nothing."""
    table = POSITIONS[kind]
    fields = {**way.fields, "batch": BATCH, "key_heads": HEADS, "num_queries": QUERIES, "num_keys": KEYS, "seed": 4}
    fields |= {"tables": TABLES, "rel_width": 4, "positions": (table.first, table.last, table.outside)}
    sample = Sample(**{**fields, **BLIND[case], **options})
    blind = right(sample, way.arithmetic)[0]["lse"].golden == -math.inf
    assert blind.any()
    return sample, blind


@pytest.mark.parametrize(("case", "kind", "options"), BLIND_RUNS, ids=lambda value: "" if value == PLAIN else None)
def test_rows_that_see_nothing(case: str, kind: str, options: dict[str, Any], way: Way) -> None:
    """Queries that each kind of mask leaves without keys, also in a block with other queries, and in a forward alone."""
    if way.implementation != "reference" or "dtype" not in options:
        sample, _ = blind_sample(case, kind, way, **options)
        check(sample, way)
        check(replace(sample, mode="no_grad", return_lse=False), way)


@pytest.mark.parametrize(
    "case", ["bool_mask", "lengths", "causal_offsets", "window_future", "window_and_length", "mask_and_causal"]
)
def test_nan_in_queries_that_see_nothing(case: str, way: Way) -> None:
    """NaN in such queries reaches no result except the gradients of key and rel_key, the operands of products with queries."""
    sample, blind = blind_sample(case, "clamp", way)
    call = {**sample.call(), "implementation": way.implementation}
    spoilt = {name: call[name].masked_fill(blind[..., None], math.nan) for name in ("query", "rel_query")}
    with environment(sample, way):
        expected, results = run(sample, call), run(sample, call | spoilt)
    for name in results.keys() - {"d_key", "d_rel_key"}:
        assert torch.equal(results[name], expected[name]), name  # type: ignore[arg-type]


# NaN that no query sees.

UNSEEN: dict[str, dict[str, Any]] = {
    # Keys and values
    "lengths": {"key_lengths": (7, 0)},
    "causal_offset": {"is_causal": True, "query_offset": -20},
    "window": {"window_size": (2, 1), "query_offset": 9},
    "window_left": {"window_size": (2, -1), "query_offset": 9, "key_lengths": (30, 30)},
    "window_right": {"window_size": (-1, 1), "query_offset": -9},
    "window_and_causal": {"window_size": (3, 7), "is_causal": True, "query_offset": 9},
    "offsets": {"window_size": (2, 1), "query_offset": (9, 12)},
    # Table rows
    "causal_short": {"positions": (-2, 98, "clamp"), "is_causal": True},
    "lengths_short": {"positions": (-9, 91, "clamp"), "key_lengths": (7, 3)},
    "lengths_none": {"positions": (-9, 91, "clamp"), "key_lengths": (0, 0)},
    "past": {"positions": (-200, -100, "clamp")},
    "future": {"positions": (100, 200, "clamp"), "is_causal": True},
    "longer_past": {"positions": (-80, 20, "clamp")},  # 37 queries divide no block: rows only of those beyond
    "blind_block": {"is_causal": True, "query_offset": -34},  # queries 0 to 33 see nothing: the first small block
    "blind_block_short": {"positions": (-1, 99, "clamp"), "is_causal": True, "query_offset": -34},
    "all_blind": {"positions": (10, 110, "clamp"), "is_causal": True, "query_offset": -40},
}
RUNS = [*itertools.product(UNSEEN, [0, 1])]


@pytest.mark.parametrize(("case", "number"), RUNS)
def test_nan_that_no_query_sees(case: str, number: int, tiled: Way) -> None:
    """Keys and values that no query sees, and table rows without a visible pair, may hold NaN, although 0 times NaN is NaN. With
    one table, and with all tables, softcap, dropout and positions outside="zero"."""
    further: dict[str, Any] = {"tables": ("rel_key",)}
    if number:
        further = {"tables": TABLES, "rel_width": 4, "softcap": 5.0, "dropout_p": 0.3}
    fields = {"positions": (-50, 50, "clamp"), **UNSEEN[case], **further}
    if number:
        fields["positions"] = (*fields["positions"][:2], "zero")
    check(Sample(**tiled.fields, batch=2, num_queries=37, num_keys=41, **fields, seed=number, spoilt="nan"), tiled)


# NaN in visible inputs reaches only what depends on them.

WITH_NAN = [
    *itertools.product(["query", "d_out"], POSITIONS, [{"is_causal": True}]),
    ("rel_query", "clamp", {}),
    ("query", "clamp", {"softcap": 5.0, "window_size": (20, 9)}),
]


@pytest.mark.parametrize(("name", "kind", "arguments"), WITH_NAN, ids=str)
def test_nan_in_one_query_stays_in_its_row(name: str, kind: str, arguments: dict[str, Any], tiled: Way) -> None:
    """NaN in a row of query or d_out reaches only that row and its head's gradients of keys, values and tables. All else has the
    same bits."""
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
    for result in {"d_rel_key", "d_rel_value", "d_rel_bias"} & results.keys():
        assert results[result][1].isnan().any(), result
        results[result][1] = expected[result][1]
    assert_bit_equal(results, expected)


@pytest.mark.parametrize(
    ("masks", "hidden"),
    [
        ({"attn_mask": torch.arange(KEYS) != 4}, slice(0, QUERIES)),
        ({"is_causal": True}, slice(0, 4)),
        ({"window_size": (2, -1)}, slice(7, QUERIES)),
    ],
    ids=["mask", "causal", "window"],
)
def test_nan_in_a_key_stays_with_those_that_see_it(masks: dict[str, Any], hidden: slice, tiled: Way) -> None:
    """NaN in key 4 reaches out and lse of no query that it is hidden from."""
    inputs = all_terms(tiled, POSITIONS["clamp"])
    key = inputs.key.clone()
    key[:, :, 4] = math.nan
    results = tiled.results(inputs._replace(key=key), positions=POSITIONS["clamp"], **masks)
    expected = tiled.results(inputs, positions=POSITIONS["clamp"], **masks)
    for name in ("out", "lse"):
        assert torch.equal(results[name][:, :, hidden], expected[name][:, :, hidden]), name
    shown = [query for query in range(QUERIES) if query not in range(QUERIES)[hidden]]
    assert results["lse"][:, :, shown].isnan().all()
    if not shown:  # 0 times NaN is NaN: only gradients of the operands of products with keys have it
        for name in results.keys() - {"d_query", "d_key", "d_rel_p2c"}:
            assert torch.equal(results[name], expected[name]), name

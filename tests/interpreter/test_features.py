"""Features of a call beyond a table for the keys, in the kernels: terms, masks, windows, packing, dropout, shared heads."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from tests.expected import exact_results
from tests.interpreter.guard import recorded
from tests.interpreter.launch import (
    GRADIENTS,
    OTHER,
    SMALL,
    all_gradients,
    assert_close,
    attend,
    attend_varlen,
    check_every_term,
    count_launches,
    kept,
    needed_launches,
    run,
    run_backward,
)
from tests.samples import with_different_strides
from tests.tolerance import assert_bit_equal, assert_gradients_close_fp32, assert_near, within
from triton_relattn import RelativePositions, fused_relative_attention
from triton_relattn._core import validation
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.kernels.call import SMALLEST_SCALE
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.workspace import planning
from triton_relattn.testing import Inputs, dropout_mask, forward_backward, make_inputs

QUERIES, KEYS = 30, 13
WORKSPACES = ("", "0")
"""Limits in bytes: the usual one, and a block of keys of one head at a time."""
# Two variants, of which the normal run takes one and the other in turn.
BOTH, BOTH_NAMES = (False, pytest.param(True, marks=pytest.mark.slow)), ("", "other")
POSITIONS = {
    "full": RelativePositions(-50, 50),
    "clamp": RelativePositions(-4, 6),
    "zero": RelativePositions(-4, 6, "zero"),
}
ALL_TERMS: dict[str, Any] = {"rel_width": 12, "rel_value": True, "rel_bias": True}
"""All but rel_p2c, which test_key_terms.py has."""
OF_ALL_TERMS = tuple(name for name in GRADIENTS if name != "d_rel_p2c")


def all_terms(
    sizes: tuple[int, ...] = (2, 1, 30, 13), num_rows: int = 11, dtype: torch.dtype = torch.float32, **others: Any
) -> Inputs:
    """Inputs of (batch, heads, queries, keys) with the tables of ALL_TERMS and a query of its own for rel_key."""
    batch, heads, num_queries, num_keys = sizes
    others = {**ALL_TERMS, "seed": 4, **others}
    return make_inputs(batch, heads, num_queries, num_keys, 16, 12, num_rows=num_rows, dtype=dtype, **others)


# Combinations of everything.


@pytest.mark.parametrize("kind", POSITIONS)
def test_sharp_attention_in_float16(kind: str) -> None:
    """All tables' gradients are as good as dS (for rel_value: P) rounded once and summed exactly."""
    positions = POSITIONS[kind]
    inputs = all_terms((1, 2, 50, 45), positions.num_rows, torch.float16, sharp=True, per_head=kind == "zero")
    check_every_term(inputs, SMALL, positions=positions, is_causal=kind == "clamp", query_offset=5)


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # of make_inputs, of the call
    "width_40": ({"width": 40, "rel_width": 80}, {}),
    "width_80": ({"width": 80, "rel_width": 12}, {"is_causal": True}),
    "width_96": ({"width": 96, "value_width": 96}, {"query_offset": 4}),
    "value_width_40": ({"value_width": 40}, {}),
    "groups_of_2": ({"heads": 4, "key_heads": 2}, {"enable_gqa": True}),
    "groups_of_3": ({"heads": 3, "key_heads": 1, "per_head": True}, {"enable_gqa": True, "is_causal": True}),
    "rel_scale": ({}, {"rel_scale": -0.3}),
    "rel_scale_of_the_query": ({"rel_width": None}, {"rel_scale": 0.7, "scale": 0.1}),
    "no_rel_scale": ({}, {"rel_scale": 0.0}),
    "no_scale": ({}, {"scale": 0.0, "rel_scale": 0.2}),
    "tiny_scale": ({}, {"scale": 1e-39, "rel_scale": 0.2}),
    "no_scale_softcap": ({}, {"scale": 0.0, "rel_scale": 0.2, "softcap": 2.0}),
    "nothing_but_the_bias": ({}, {"scale": 0.0, "rel_scale": 0.0}),
    "negative_scale": ({}, {"scale": -0.4}),
    "negative_scale_of_the_query": ({"rel_width": None}, {"scale": -0.4, "rel_scale": 0.5}),
    "negative_scale_softcap": ({"rel_width": None}, {"scale": -0.4, "softcap": 2.0}),
}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("other", BOTH, ids=BOTH_NAMES)
def test_shapes_and_scales(case: str, other: bool) -> None:
    """Widths that are no power of two or differ, heads that share keys, and scales of any sign."""
    of_inputs, arguments = SHAPES[case]
    kind = ("clamp", "zero")[(list(SHAPES).index(case) + other) % 2]
    sizes = {"batch": 1, "heads": 1, "num_queries": 21, "num_keys": 35, "width": 16, "value_width": 12}
    options: dict[str, Any] = {**sizes, **ALL_TERMS, "num_rows": 11, "dtype": torch.float32, "seed": 2, **of_inputs}
    inputs = make_inputs(**options)
    results = check_every_term(inputs, SMALL, positions=POSITIONS[kind], **arguments)
    if arguments.get("scale") == 0:
        assert inputs.rel_value is not None  # |dS| sums up to at most twice the largest |dP| in each row, and |d_lse|
        d_probs = inputs.d_out.double().abs().sum() * (inputs.value.abs().max() + inputs.rel_value.abs().max())
        d_scores = 2 * d_probs + inputs.d_lse.abs().sum()
        for name, factor in (("d_key", inputs.query), ("d_query", inputs.key)):  # less that of rel_key, if it has the query
            within(name, results[name].abs().max(), SMALLEST_SCALE * d_scores * factor.double().abs().max())


@pytest.mark.parametrize("width", [1, 4, 21, 40, 59, 80, 96, 111, 192, 256])
def test_widths_of_the_relative_query(width: int) -> None:
    """Padded inside the kernels, for a narrow or a wide table; widths of query and value differ from it and each other."""
    inputs = make_inputs(
        1, 2, 18, 23, 40, 21, num_rows=11, per_head=True, rel_width=width, rel_value=True, dtype=torch.float32, seed=width
    )
    check_every_term(with_different_strides(inputs), SMALL, positions=POSITIONS["clamp" if width % 2 else "zero"])


@pytest.mark.parametrize(("scale", "rel_scale"), [(-0.4, 0.5), (1e-4, 10.0)])
def test_the_query_given_as_rel_query(scale: float, rel_scale: float) -> None:
    """It has a gradient of its own, although a launcher may separate the two roles of a query for itself."""
    inputs = make_inputs(1, 2, 20, 33, 16, num_rows=11, dtype=torch.float16, seed=3)
    same, copy = (inputs._replace(rel_query=rel_query) for rel_query in (inputs.query, inputs.query.clone()))
    results = [all_gradients(each, SMALL, scale=scale, rel_scale=rel_scale) for each in (same, copy)]
    assert_bit_equal(*results)
    assert results[0]["d_rel_query"].any()


@pytest.mark.parametrize(("scale", "rel_scale"), [(0.0, 0.25), (1e-4, 10.0), (-1e-6, 1.0)])
def test_ratio_of_scales_beyond_float16(scale: float, rel_scale: float) -> None:
    """The gradient of a query that both products share is finite, and has the error of float16 and no more."""
    inputs = make_inputs(1, 2, 20, 33, 16, num_rows=11, dtype=torch.float16, seed=3)
    check_every_term(inputs, SMALL, positions=POSITIONS["clamp"], scale=scale, rel_scale=rel_scale)


def test_vectors_with_strides() -> None:
    """key_lengths and query_offset of every second batch entry, or one for all."""
    inputs = make_inputs(3, 1, 20, 33, 16, num_rows=11, dtype=torch.float32, seed=3)
    lengths, offset = torch.tensor([[20, 7], [33, 8], [5, 9]])[:, 0], torch.tensor([4], dtype=torch.int32).expand(3)
    results = all_gradients(inputs, SMALL, key_lengths=lengths, query_offset=offset)
    assert_bit_equal(results, all_gradients(inputs, SMALL, key_lengths=lengths.clone(), query_offset=4))


@pytest.mark.parametrize("kind", ["clamp", "zero"])
def test_nan_gradient_of_an_lse_that_is_infinite(kind: str) -> None:
    """A NaN gradient of an lse of -inf is ignored: merging partial results may give one for a query that sees nothing."""
    inputs = all_terms(num_rows=11)
    arguments: dict[str, Any] = {"positions": POSITIONS[kind], "is_causal": True, "query_offset": -3}
    expected = forward_backward(attend, inputs, **arguments)
    assert (expected["lse"][:, :, :3] == -math.inf).all() and (expected["lse"][:, :, 3:] > -math.inf).all()
    d_lse = inputs.d_lse.clone()
    d_lse[:, :, :3] = math.nan
    assert_bit_equal(forward_backward(attend, inputs._replace(d_lse=d_lse), **arguments), expected)


# Packed sequences.


def check_packed(inputs: Inputs, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    results = forward_backward(attend_varlen, inputs, **arguments)
    torch.manual_seed(3)
    heads, longest = inputs.query.shape[1], max(inputs.query.shape[0], inputs.key.shape[0])
    dropout_p = arguments.get("dropout_p", 0.0)
    keep = dropout_mask(len(arguments["cu_seqlens_q"]) - 1, heads, longest, longest, dropout_p) if dropout_p else None
    assert_close(results, exact_results(inputs, **arguments, keep=keep))
    return results


def packed_inputs(total_q: int, total_k: int, **others: Any) -> Inputs:
    inputs = all_terms((1, 2, total_q, total_k), **{"key_heads": 1, **others})
    in_order = ("query", "key", "value", "d_out", "rel_query")
    given = {name: tensor for name in in_order if (tensor := getattr(inputs, name)) is not None}
    return inputs._replace(**{name: tensor[0].transpose(0, 1) for name, tensor in given.items()}, d_lse=inputs.d_lse[0])


PACKING: dict[str, Any] = {
    "cu_seqlens_q": torch.tensor([0, 0, 7, 25, 25, 30]),
    "cu_seqlens_k": torch.tensor([0, 5, 16, 36, 36, 36], dtype=torch.int32),
    "max_seqlen_q": 18,
    "max_seqlen_k": 29,
    "query_offset": torch.tensor([4, 3, -2, 0, 20], dtype=torch.int32),
    "enable_gqa": True,
}
WITHOUT_KEYS = slice(25, 30)


@pytest.mark.parametrize(
    ("kind", "dropout_p"), [("full", 0.4), ("clamp", 0.4), pytest.param("clamp", 0.0, marks=pytest.mark.slow), ("zero", 0.0)]
)
def test_packed(kind: str, dropout_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """No queries, no keys, or neither; offsets of their own, shared heads, dropout; also a maximum that no length reaches."""
    monkeypatch.setattr(selection, "select", lambda kernel, *_, **__: SMALL[kernel])
    positions = POSITIONS[kind]
    inputs = packed_inputs(30, 36, num_rows=positions.num_rows)
    results = check_packed(inputs, {**PACKING, "positions": positions, "dropout_p": dropout_p, "is_causal": kind == "zero"})
    assert (results["lse"][:, WITHOUT_KEYS] == -math.inf).all() and not results["out"][WITHOUT_KEYS].any()
    assert not results["d_query"][WITHOUT_KEYS].any() and not results["d_key"][:5].any()


@pytest.mark.usefixtures("guarded_kernels")
def test_rows_of_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed tensors that are longer than their sequences are refused where that can be seen, on a CPU. Elsewhere what the
    sequences get is right. (Deterministic algorithms fill new memory with NaN.)"""
    inputs = packed_inputs(30, 36, num_rows=11)
    starts = {"cu_seqlens_q": torch.tensor([0, 7, 20]), "cu_seqlens_k": torch.tensor([0, 16, 30])}
    arguments: dict[str, Any] = {**starts, "max_seqlen_q": 13, "max_seqlen_k": 16, "positions": POSITIONS["clamp"]}
    with pytest.raises(ValueError, match="cu_seqlens_q must rise from 0 to the total length 30"):
        attend_varlen(*inputs[:4], **inputs.terms(), **arguments, enable_gqa=True)
    short = {name: getattr(inputs, name)[:20] for name in ("query", "rel_query", "d_out")}
    short |= {name: getattr(inputs, name)[:30] for name in ("key", "value")}
    short_inputs = inputs._replace(**short, d_lse=inputs.d_lse[:, :20])
    check_integers = validation._check_integers
    for limit in WORKSPACES:
        monkeypatch.setenv(planning.VARIABLE, limit)
        monkeypatch.setattr(validation, "_check_integers", check_integers)
        expected = forward_backward(attend_varlen, short_inputs, **arguments, enable_gqa=True)
        monkeypatch.setattr(validation, "_check_integers", lambda _, tensor, *rest: (tensor, None))
        torch.use_deterministic_algorithms(True)
        try:
            results = forward_backward(attend_varlen, inputs, **arguments, enable_gqa=True)
        finally:
            torch.use_deterministic_algorithms(False)
        for name, result in results.items():
            rows = {"out": 20, "d_query": 20, "d_rel_query": 20, "d_key": 30, "d_value": 30}.get(name)
            part = result[:, :20] if name == "lse" else result[:rows]
            assert torch.equal(part, expected[name]), (limit, name)


@pytest.mark.parametrize("starts", [[0], [0, 0], [0, 0, 0]], ids=["no_sequence", "one_empty", "two_empty"])
def test_packed_nothing(starts: list[int]) -> None:
    """Right shapes and zero gradients."""
    bounds = torch.tensor(starts)
    packing: dict[str, Any] = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 0, "max_seqlen_k": 0}
    inputs = packed_inputs(0, 0)
    results = forward_backward(attend_varlen, inputs, enable_gqa=True, **packing)
    assert results["out"].shape == (0, 2, 12) and results["lse"].shape == (2, 0)
    for name in set(DIFFERENTIABLE) - {"rel_p2c"}:
        assert results[f"d_{name}"].shape == getattr(inputs, name).shape and not results[f"d_{name}"].any()


# Dropout.


def identity(batch: int, rows: int) -> torch.Tensor:
    return torch.eye(rows).expand(batch, 2, rows, rows)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_every_implementation_drops_the_same(dropout_p: float) -> None:
    """Values that are the identity show the mask; it is the one that testing.dropout_mask shows."""
    inputs = make_inputs(2, 2, 35, 21, 16, num_rows=9, dtype=torch.float32, seed=4)
    torch.manual_seed(5)
    expected = dropout_mask(2, 2, 35, 21, dropout_p)
    assert 0 < expected.double().mean() < 1
    for implementation in ("triton", "blockwise", "reference"):
        torch.manual_seed(5)
        out = fused_relative_attention(
            inputs.query, inputs.key, identity(2, 21), inputs.rel_key, dropout_p=dropout_p, implementation=implementation
        )
        assert isinstance(out, torch.Tensor) and torch.equal(out != 0, expected), implementation


@pytest.mark.parametrize(
    ("kind", "tiles"),
    [("full", SMALL), ("full", OTHER), ("full", None), ("clamp", SMALL), ("zero", OTHER)],
    ids=["small", "other", "default", "clamp", "zero"],
)
def test_every_kernel_drops_the_same(kind: str, tiles: Any) -> None:
    """Whatever the tiles: out shows the mask for values that are the identity, d_value for such a d_out, and d_rel_value, too,
    along its diagonals; d_query by what it is."""
    positions = POSITIONS[kind]
    inputs = make_inputs(
        1, 2, 35, 35, 16, 35, num_rows=positions.num_rows, rel_value=True, per_head=True, dtype=torch.float32, seed=4
    )
    inputs = inputs._replace(value=identity(1, 35), d_out=identity(1, 35), rel_value=torch.zeros(2, positions.num_rows, 35))
    expected = kept(1, 2, 35, 35, dropout_p=0.4)
    assert 0.5 < expected.double().mean() < 0.7
    results = check_every_term(inputs, tiles, positions=positions, dropout_p=0.4)
    assert torch.equal(results["out"] != 0, expected)
    assert torch.equal(results["d_value"].mT != 0, expected)
    if kind == "full":  # d_rel_value[h, r, i] is P of pair (i, i + r), if it is kept
        i, j = torch.arange(35)[:, None], torch.arange(35)
        assert torch.equal(results["d_rel_value"][:, j - i + 50, i] != 0, expected[0])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["clamp", "zero"])
def test_dropout_does_not_depend_on_the_tiles(kind: str) -> None:
    """All results are the same but for rounding."""
    inputs = all_terms((1, 1, 45, 38), POSITIONS[kind].num_rows)
    arguments: dict[str, Any] = {"positions": POSITIONS[kind], "dropout_p": 0.3}
    assert_close(all_gradients(inputs, SMALL, **arguments), all_gradients(inputs, OTHER, **arguments))


def test_lowest_probability_of_dropping() -> None:
    """2 / 2**32, whose threshold is 1, and 1 / 2**32: next to nothing is dropped."""
    inputs = all_terms((1, 1, 5, 6))
    for dropout_p in (2**-31, 2**-32):
        check_every_term(inputs, SMALL, dropout_p=dropout_p)


def test_everything_dropped() -> None:
    """out is 0 and lse that without dropout; what is left of the gradients comes through lse."""
    inputs = all_terms()
    results = check_every_term(inputs, SMALL, dropout_p=1.0)
    assert not results["out"].any() and not results["d_value"].any() and not results["d_rel_value"].any()
    assert results["d_query"].any() and results["d_rel_bias"].any()
    assert torch.equal(results["lse"], run(inputs, SMALL["forward"])[1])


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_only_dropout_moves_the_generator(dropout_p: float) -> None:
    """The same seed gives the same call, and the state stays where it is without dropout."""
    inputs = all_terms((1, 1, 5, 6))
    calls = []
    for _ in range(2):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        calls.append(forward_backward(attend, inputs, dropout_p=dropout_p))
        assert torch.equal(torch.get_rng_state(), before) == (dropout_p == 0)
    assert_bit_equal(*calls)
    again = forward_backward(attend, inputs, dropout_p=dropout_p)
    assert torch.equal(again["out"], calls[0]["out"]) == (dropout_p == 0)


# Rows that see nothing, or nothing in particular.


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("full", torch.float32), ("clamp", torch.float16), ("clamp", torch.float32), ("zero", torch.float16)],
    ids=str,
)
def test_mask_of_finfo_min(kind: str, dtype: torch.dtype) -> None:
    """A finite mask hides nothing: a row of finfo.min, beside which all logits vanish, is uniform, as softmax has it."""
    positions = POSITIONS[kind]
    inputs = all_terms(num_rows=positions.num_rows, dtype=dtype)
    inputs.d_lse[:, :, 5] = 0  # of a number so large that float32 has no digits left for its derivatives' check
    mask = torch.zeros(QUERIES, KEYS)
    mask[5] = torch.finfo(torch.float32).min
    mask[6, 3:] = torch.finfo(torch.float32).min
    arguments: dict[str, Any] = {"positions": positions, "attn_mask": mask}
    results = all_gradients(inputs, SMALL, **arguments)
    golden = exact_results(inputs, **arguments)
    assert results["lse"].isfinite().all() and (results["lse"][:, :, 5] < -1e38).all()
    for name in ("out", *OF_ALL_TERMS):
        result, exact = results[name], golden[name]
        if dtype == torch.float32:
            assert_gradients_close_fp32(name, result, exact, [golden[other] for other in OF_ALL_TERMS])
        else:
            # P, dS, out for delta and the result are rounded: half a unit each, with a factor of two to spare.
            within(name, (result.double() - exact).norm(), 4 * torch.finfo(dtype).eps * exact.norm())


@pytest.mark.parametrize("kind", ["clamp", "zero"])
def test_mask_of_minus_1e9(kind: str) -> None:
    """Such a number hides keys as a bool mask does; where all have it, the result is finite, and the mean of what is seen."""
    inputs = all_terms(num_rows=POSITIONS[kind].num_rows)._replace(rel_value=None)
    visible = torch.arange(KEYS) % 3 != torch.arange(QUERIES)[:, None] % 4
    arguments: dict[str, Any] = {"positions": POSITIONS[kind], "softcap": 20.0}
    mask = torch.zeros(QUERIES, KEYS).masked_fill(~visible, -1e9)
    assert_close(
        all_gradients(inputs, SMALL, attn_mask=mask, **arguments), all_gradients(inputs, SMALL, attn_mask=visible, **arguments)
    )
    mask[20] = -1e9
    results = all_gradients(inputs, SMALL, attn_mask=mask, **arguments)
    assert all(result.isfinite().all() for result in results.values())
    assert_near("out", results["out"][:, :, 20], inputs.value.mean(2))


# NaN.


@pytest.mark.parametrize("kind", ["clamp", "zero"])
def test_nan_behind_a_mask(kind: str) -> None:
    """A key that a bool mask hides from everybody: its value is multiplied by 0, and only NaN in key is harmless."""
    inputs = all_terms(num_rows=11)
    key = inputs.key.clone()
    key[:, :, 4] = math.nan
    arguments: dict[str, Any] = {"positions": POSITIONS[kind], "attn_mask": torch.arange(KEYS) != 4}
    results = all_gradients(inputs._replace(key=key), SMALL, **arguments)
    expected = all_gradients(inputs, SMALL, **arguments)
    for name in ("out", "lse", "d_value", "d_rel_key", "d_rel_value", "d_rel_bias"):
        assert torch.equal(results[name], expected[name]), name


@pytest.mark.thorough
@pytest.mark.parametrize("limit", WORKSPACES)
@pytest.mark.parametrize(
    ("name", "options"), [("query", {"softcap": 5.0, "window_size": (20, 9)}), ("rel_query", {})], ids=["query", "rel_query"]
)
def test_nan_in_one_query_stays_in_its_row(
    name: str, options: dict[str, Any], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in a query reaches only its own row of the results and the gradients that queries share; other rows, heads and batch
    entries are bit-equal, also those that come later in the same workspace."""
    monkeypatch.setenv(planning.VARIABLE, limit)
    inputs = all_terms((2, 2, 18, 13), per_head=True)
    tensor = getattr(inputs, name).clone()
    tensor[1, 0, 11] = math.nan
    results = all_gradients(inputs._replace(**{name: tensor}), SMALL, **options)
    expected = all_gradients(inputs, SMALL, **options)
    for result in ("out", "lse", "d_query", "d_rel_query"):
        assert results[result][1, 0, 11].isnan().all(), result
        results[result][1, 0, 11] = expected[result][1, 0, 11]
    for result in ("d_key", "d_value"):
        assert results[result][1, 0].isnan().any(), result
        results[result][1, 0] = expected[result][1, 0]
    for result in ("d_rel_key", "d_rel_value", "d_rel_bias"):
        assert results[result][0].isnan().any(), result
        results[result][0] = expected[result][0]
    assert_bit_equal(results, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("limit", WORKSPACES)
def test_nan_in_one_sequence_stays_there(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other sequences of a packed batch are bit-equal, but for the gradients that all share."""
    monkeypatch.setenv(planning.VARIABLE, limit)
    starts = torch.tensor([0, 10, 27, 30])
    packing: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 17, "max_seqlen_k": 17}
    inputs = packed_inputs(30, 30)
    spoilt = {name: getattr(inputs, name).clone() for name in ("query", "key", "value")}
    for tensor in spoilt.values():
        tensor[10:27] = math.nan
    results, expected = (
        forward_backward(attend_varlen, each, enable_gqa=True, **packing) for each in (inputs._replace(**spoilt), inputs)
    )
    for name in ("out", "d_query", "d_key", "d_value", "d_rel_query"):
        assert results[name][10:27].isnan().any(), name
        results[name][10:27] = expected[name][10:27]
        assert torch.equal(results[name], expected[name]), name


# Launches.


@pytest.mark.parametrize("kind", ["full", "clamp", pytest.param("zero", marks=pytest.mark.slow), None])
def test_windows_skip_tiles(kind: str | None) -> None:
    """With a fixed window, a longer call loads as much more for each of its queries, in every kernel: no tiles outside are
    computed. Without a window it is more."""

    def loads(length: int, window: tuple[int, int]) -> Counter[str]:
        positions = None if kind is None else RelativePositions(-100, 100) if kind == "full" else POSITIONS[kind]
        num_rows = None if positions is None else positions.num_rows
        options: dict[str, Any] = {"rel_value": True, "rel_bias": True} if kind else {}
        inputs = make_inputs(1, 1, length, length, 16, num_rows=num_rows, dtype=torch.float32, seed=1, **options)
        with recorded() as launches:
            all_gradients(inputs, OTHER, positions=positions, window_size=window)
        counted: Counter[str] = Counter()
        for launch in launches:  # of the dtable kernel there are two, from dS and from P
            counted[launch.kernel] += launch.loads
        return counted

    short, middle, long, unbounded = (loads(*call) for call in ((32, (9, 5)), (64, (9, 5)), (96, (9, 5)), (96, (-1, -1))))
    assert set(short) == {"forward_kernel", "delta_kernel", "dkv_kernel", "dq_kernel", *["dtable_kernel"] * (kind is not None)}
    for kernel in set(short) - {"delta_kernel"}:  # which sees no keys
        assert 0 < long[kernel] - middle[kernel] <= 1.05 * (middle[kernel] - short[kernel]), kernel
    assert unbounded["forward_kernel"] > 1.2 * long["forward_kernel"]
    assert unbounded["dkv_kernel"] > 1.2 * long["dkv_kernel"]


@pytest.mark.parametrize("limit", WORKSPACES)
@pytest.mark.parametrize("kind", [*POSITIONS, None])
def test_only_the_wanted_gradients_are_computed(kind: str | None, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-equal to those of the call for all, the others None, and no kernel runs that none of them needs."""
    monkeypatch.setenv(planning.VARIABLE, limit)
    counted = count_launches(monkeypatch)
    arguments: dict[str, Any] = {}
    inputs = make_inputs(1, 1, 17, 18, 16, num_rows=None, dtype=torch.float32, seed=8)
    if kind is not None:
        inputs, arguments = all_terms((1, 1, 17, 18), POSITIONS[kind].num_rows), {"positions": POSITIONS[kind], "dropout_p": 0.2}
    complete = run_backward(inputs, SMALL, **arguments)
    there = [name for name in GRADIENTS if complete[name] is not None]
    parts, is_clamped = (2 if limit else 1), kind == "clamp"
    assert counted == needed_launches(there, is_clamped, parts)
    pairs = ("d_rel_key", "d_rel_value"), ("d_rel_value", "d_rel_bias"), ("d_query", "d_rel_value"), ("d_key", "d_query")
    for wanted in (*((name,) for name in there), *(pair for pair in pairs if set(pair) <= set(there))):
        counted.clear()
        results = run_backward(inputs, SMALL, wanted, **arguments)
        for name in GRADIENTS:
            result, expected = results[name], complete[name]
            assert (result is None) == (name not in wanted), (wanted, name)
            assert result is None or (expected is not None and torch.equal(result, expected)), (wanted, name)
        assert counted == needed_launches(wanted, is_clamped, parts), wanted


@pytest.mark.parametrize("name", ["query", "value", "rel_key"])
def test_gradients_that_nothing_asks_for_are_not_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public function passes on what requires a gradient."""
    counted = count_launches(monkeypatch)
    inputs = make_inputs(1, 1, 20, 20, 8, num_rows=39, dtype=torch.float32, seed=8)
    leaf = getattr(inputs, name).clone().requires_grad_()
    out, _ = attend(*inputs._replace(**{name: leaf})[:4])
    out.sum().backward()
    assert leaf.grad.any() and counted == needed_launches([f"d_{name}"], False)


@pytest.mark.parametrize("only", ["rel_bias", "rel_value"])
@pytest.mark.parametrize("kind", POSITIONS)
def test_one_table_alone(only: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias or a table for the values without any other; trained alone through the public function, or with everything."""
    positions = POSITIONS[kind]
    tables: dict[str, Any] = {"rel_key": False, "rel_value": False, "rel_bias": False, only: True}
    inputs = make_inputs(1, 2, 37, 33, 16, num_rows=positions.num_rows, **tables, dtype=torch.float32, seed=3)
    expected = check_every_term(inputs, positions=positions)[f"d_{only}"]
    counted = count_launches(monkeypatch)
    leaf = getattr(inputs, only).clone().requires_grad_()
    results = attend(*inputs[:3], positions=positions, **{only: leaf})
    (gradient,) = torch.autograd.grad(results, leaf, (inputs.d_out, inputs.d_lse))
    assert torch.equal(gradient, expected)
    assert counted == needed_launches([f"d_{only}"], kind == "clamp")

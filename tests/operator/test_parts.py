"""Several sequences in one call, and one call in several parts: packed sequences, parts as ranks have them, and their merging."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.cases import by_sequence, unpacked
from tests.oracle import assert_same
from tests.parts import at_place, attend_on_a_grid, attend_resolved, in_parts, resolved
from tests.tolerance import assert_near
from tests.way import Way
from triton_relattn import RelativePositions, fused_relative_attention_varlen, merge_attention
from triton_relattn.testing import (
    Inputs,
    assert_gradients_close_fp32,
    dense_gradients,
    dropout_mask,
    forward_backward,
    make_inputs,
)

TABLES = ("rel_key", "rel_value", "rel_bias", "rel_p2c")
LONGEST = 40


# Packed sequences: each as if it were alone.

PACKINGS: dict[str, tuple[tuple[int, ...], tuple[int, ...], RelativePositions, dict[str, Any]]] = {
    # queries and keys of each sequence, table, arguments
    "empty_ones": (
        (0, 7, 18, 0, 5),
        (5, 11, 20, 0, 0),
        RelativePositions(-60, 60),
        {"query_offset": torch.tensor([4, 3, -2, 0, 20], dtype=torch.int32), "dropout_p": 0.4},
    ),
    "clamped": ((7, 18, 9), (11, 40, 9), RelativePositions(-4, 6), {"query_offset": torch.tensor([4, 3, -2]), "softcap": 3.0}),
    "causal": ((3, 18, 3, 1), (3, 18, 3, 1), RelativePositions(-4, 6, "zero"), {"is_causal": True, "dropout_p": 0.4}),
    "window": ((1, 4, 4, 2), (5, 30, 9, 17), RelativePositions(-30, 30), {"window_size": (3, 2), "query_offset": 4}),
    "window_beside": (
        (2, 4, 3),
        (3, 9, 5),
        RelativePositions(-4, 6),
        {"window_size": (1, 0), "query_offset": torch.tensor([9, 0, -9])},
    ),
    "decoding": ((1, 1, 1), (30, 17, 18), RelativePositions(-30, 0), {"query_offset": torch.tensor([29, 16, 17])}),
    # One needs rows 0 to 2 of the table, and the other 20 to 22.
    "far_apart": ((1, 1), (3, 3), RelativePositions(-22, 0), {"query_offset": torch.tensor([22, 2])}),
}


def attend_varlen(way: Way, inputs: Inputs, **arguments: Any) -> dict[str, torch.Tensor]:
    def attend(*tensors: Any, **given: Any) -> Any:
        return fused_relative_attention_varlen(*tensors, **given, return_lse=True, implementation=way.implementation)

    torch.manual_seed(0)
    return forward_backward(attend, inputs, enable_gqa=True, **arguments)


def packed(way: Way, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], **options: Any) -> tuple[Inputs, dict[str, Any]]:
    """Inputs of packed sequences, (total, heads, width), and where they begin."""
    terms: dict[str, Any] = {"rel_width": 4, **dict.fromkeys(TABLES, True), "key_heads": 1, "seed": 4, **options}
    inputs = make_inputs(1, 2, sum(lengths_q), sum(lengths_k), way.width, dtype=way.dtype, **terms)
    rows = {name: getattr(inputs, name)[0].transpose(0, 1) for name in ("query", "key", "value", "d_out", "rel_query")}
    starts = {f"cu_seqlens_{name}": torch.tensor([0, *each]).cumsum(0) for name, each in (("q", lengths_q), ("k", lengths_k))}
    longest = {f"max_seqlen_{name}": max(each, default=0) for name, each in (("q", lengths_q), ("k", lengths_k))}
    return inputs._replace(**rows, d_lse=inputs.d_lse[0]), {**starts, **longest}


def without_the_unseen(inputs: Inputs, arguments: dict[str, Any]) -> Inputs:
    """Inputs with NaN in all keys and values that no query sees, and in table rows of no visible pair."""
    spoilt = {name: getattr(inputs, name).clone() for name in ("key", "value", *TABLES)}
    positions, used = arguments["positions"], torch.zeros(len(spoilt["rel_bias"]), dtype=torch.bool)
    for part in unpacked(inputs, arguments):
        num_queries, num_keys, offset = part.inputs.query.shape[2], part.inputs.key.shape[2], part.arguments["query_offset"]
        masks = {name: each for name, each in part.arguments.items() if name not in ("dropout_p", "softcap")}
        seen = (dense_gradients(part.inputs, **masks).probs > 0)[0].any(0)
        for name in ("key", "value"):
            spoilt[name][part.keys][~seen.any(0)] = math.nan
        rows, applies = positions.rows(torch.arange(num_keys) - torch.arange(num_queries)[:, None] - offset)
        used[rows[seen & applies]] = True
    for name in TABLES:
        spoilt[name][~used] = math.nan
    return inputs._replace(**spoilt)


@pytest.mark.parametrize("case", PACKINGS)
def test_packed_sequences(case: str, way: Way) -> None:
    """Results are those of each sequence by itself; those without keys get zeros, and NaN that none of its queries sees does not
    reach them."""
    lengths_q, lengths_k, positions, arguments = PACKINGS[case]
    inputs, packing = packed(way, lengths_q, lengths_k, num_rows=positions.num_rows)
    arguments = {"query_offset": 0, **arguments, **packing, "positions": positions}
    dropout_p = arguments.get("dropout_p", 0.0)
    torch.manual_seed(0)
    keep = dropout_mask(len(lengths_q), 2, LONGEST, LONGEST, dropout_p) if dropout_p else None
    expected = by_sequence(inputs, arguments, keep)
    spoilt = inputs if way.implementation == "reference" else without_the_unseen(inputs, arguments)
    results = attend_varlen(way, spoilt, **arguments)
    finite = {name: exact.masked_fill(exact == -math.inf, 0) for name, exact in expected.items()}
    for name, result in results.items():
        if way.dtype == torch.float64:
            assert_same(name, result, expected[name])
        else:
            others = [each for each in finite if each[:2] == "d_"] if name[:2] == "d_" else [name]
            assert_gradients_close_fp32(name, result, expected[name], [finite[other] for other in others])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_packed_sequences_of_nothing(count: int, way: Way) -> None:
    """Right shapes and zero gradients."""
    inputs, packing = packed(way, (0,) * count, (0,) * count, num_rows=9)
    results = attend_varlen(way, inputs, **packing)
    assert results["out"].shape == (0, 2, way.width) and results["lse"].shape == (2, 0)
    for name in ("query", "key", "value", "rel_query", *TABLES):
        assert results[f"d_{name}"].shape == getattr(inputs, name).shape and not results[f"d_{name}"].any()


def test_nan_in_one_sequence_stays_there(tiled: Way) -> None:
    """The other sequences of a packed batch are bit-equal, but for the gradients that all share."""
    lengths, spoilt_rows = (4, 5, 7), slice(4, 9)
    inputs, packing = packed(tiled, lengths, lengths, num_rows=9)
    spoilt = {name: getattr(inputs, name).clone() for name in ("query", "key", "value")}
    for tensor in spoilt.values():
        tensor[spoilt_rows] = math.nan
    results, expected = (attend_varlen(tiled, each, **packing) for each in (inputs._replace(**spoilt), inputs))
    for name in ("out", "d_query", "d_key", "d_value", "d_rel_query"):
        assert results[name][spoilt_rows].isnan().any(), name
        results[name][spoilt_rows] = expected[name][spoilt_rows]
        assert torch.equal(results[name], expected[name]), name


# Parts of a call, as ranks have them.

IN_PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clamp": ({"num_rows": 9, "rel_width": 8}, {"dropout_p": 0.3, "softcap": 2.0, "query_offset": 3}),
    "zero": ({"num_rows": 9, "per_head": True}, {"positions": RelativePositions(-3, 5, "zero"), "window_size": (30, 11)}),
    "full": ({"num_rows": 99}, {"is_causal": True, "query_offset": torch.tensor([5, -20]), "scale": -0.2, "rel_scale": 0.3}),
    "lowest_mask": (
        {"num_rows": 9},
        {"attn_mask": torch.zeros(2, 1, 40, 50).index_fill(2, torch.tensor([3, 38]), torch.finfo(torch.float32).min)},
    ),
    "lengths": ({"num_rows": None}, {"key_lengths": torch.tensor([21, 0]), "dropout_p": 0.2}),
}


@pytest.mark.parametrize("case", IN_PARTS)
def test_parts_add_up(case: str, tiled: Way) -> None:
    """out, lse and gradients of parts that have some of the queries and some of the keys each are those of the whole."""
    options, arguments = IN_PARTS[case]
    tables: dict[str, Any] = {} if case in ("full", "lengths") else {"rel_value": True, "rel_bias": True}
    inputs = make_inputs(2, 2, 40, 50, tiled.width, **options, **tables, dtype=tiled.dtype, seed=1)
    call, spec = resolved(*inputs[:4], **inputs.terms(), **arguments)
    if spec.dropout_p > 0:
        call = at_place(call, slice(0, 2), slice(0, 2), 0, 0)
    if case == "lowest_mask":  # of which lse has no digits left for what it is differentiated by
        inputs.d_lse[:, :, [3, 38]] = 0
    tiled.check(in_parts(call, spec, tiled.implementation, inputs.d_out, inputs.d_lse, 2), inputs, **arguments)


BATCH, OF_HEADS, LENGTH, DROPOUT_P = slice(1, 3), slice(2, 5), 33, 0.4


def kept(first_query: int, first_key: int) -> torch.Tensor:
    """What is kept of the whole call's probabilities, in a part with these of its sequences and heads."""
    torch.manual_seed(0)
    whole = dropout_mask(3, 5, LENGTH + first_query, LENGTH + first_key, DROPOUT_P)
    return whole[BATCH, OF_HEADS, first_query:, first_key:]


def of_a_part(way: Way) -> list[torch.Tensor]:
    """Query, key, and values that are the identity."""
    query, key = make_inputs(2, 3, LENGTH, LENGTH, way.width, num_rows=None, dtype=way.dtype, seed=0)[:2]
    return [query, key, torch.eye(LENGTH, dtype=way.dtype).expand(2, 3, LENGTH, LENGTH).contiguous()]


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_part_drops_what_the_whole_drops(is_packed: bool, way: Way) -> None:
    """Sequences, heads, queries and keys that are not the first: out shows what is kept for values that are the identity, and
    their gradient for such a d_out."""
    tensors, packing = of_a_part(way), {}
    if is_packed:
        tensors = [each.transpose(1, 2).flatten(0, 1) for each in tensors]
        packing = {"cu_seqlens": dict.fromkeys("qk", torch.arange(3) * LENGTH), "max_seqlens": dict.fromkeys("qk", LENGTH)}
    call, spec = resolved(*tensors, dropout_p=DROPOUT_P, **packing)
    value = call.value.clone().requires_grad_()
    part = at_place(call._replace(value=value), BATCH, OF_HEADS, 7, 5)
    out, _ = attend_resolved(part, spec, way.implementation)
    (d_value,) = torch.autograd.grad(out, value, call.value)
    by_pair = [each.unflatten(2, (2, LENGTH))[0].transpose(0, 1) if is_packed else each for each in (out, d_value)]
    assert torch.equal(by_pair[0] != 0, kept(7, 5)) and torch.equal(by_pair[1].mT != 0, kept(7, 5))


def test_a_part_on_a_grid_drops_what_the_whole_drops(tiled: Way) -> None:
    """The same of sequences and heads of a call on a grid."""
    query, _, identity = of_a_part(tiled)
    value = identity.clone().requires_grad_()
    call, _ = resolved(query, query, value, dropout_p=DROPOUT_P)
    rel_h, rel_w = (torch.randn(side, side, tiled.width, dtype=tiled.dtype) for side in (3, 11))
    out = attend_on_a_grid(at_place(call, BATCH, OF_HEADS, 0, 0), rel_h, rel_w, DROPOUT_P, tiled.implementation)
    (d_value,) = torch.autograd.grad(out, value, identity)
    assert torch.equal(out != 0, kept(0, 0)) and torch.equal(d_value.mT != 0, kept(0, 0))


def test_wide_tables(tiled: Way) -> None:
    """Gradients that ranks will add up are not rounded: of tables in float32 beside a query in float16 they are float32, and
    once they are rounded, they and out are those of float16."""
    options: dict[str, Any] = {"num_rows": 9, "dtype": torch.float16, "seed": 0, **dict.fromkeys(TABLES, True)}
    inputs = make_inputs(1, 2, LENGTH, LENGTH, tiled.width, **options)
    call, spec = resolved(*inputs[:4], **inputs.terms())
    results = []
    for dtype in (torch.float16, torch.float32):
        leaves: dict[str, Any] = {name: getattr(call, name).to(dtype).requires_grad_() for name in TABLES}
        out, _ = attend_resolved(call._replace(**leaves), spec, tiled.implementation)
        results.append([out.detach(), *torch.autograd.grad(out, list(leaves.values()), inputs.d_out)])
    assert all(wide.dtype == torch.float32 for wide in results[1][1:])
    for narrow, wide in zip(*results, strict=True):
        assert torch.equal(wide.half(), narrow)


@pytest.mark.parametrize("num_rows", [None, 9])
def test_lengths_beyond_the_keys_are_limited(num_rows: int | None, way: Way) -> None:
    """Elsewhere than on a CPU key_lengths are not checked: they are limited to [0, Nk]."""
    inputs = make_inputs(2, 1, 40, 21, way.width, num_rows=num_rows, dtype=way.dtype, seed=4)
    call, spec = resolved(*inputs[:4], key_lengths=torch.tensor([21, 0]))

    def results(*lengths: int) -> list[torch.Tensor]:
        leaves: dict[str, Any] = {name: getattr(call, name) for name in ("query", "key", "value", "rel_key")}
        leaves = {name: each.clone().requires_grad_() for name, each in leaves.items() if each is not None}
        limited = call._replace(key_lengths=torch.tensor(lengths), **leaves)
        out, lse = attend_resolved(limited, spec, way.implementation)
        return [out, lse, *torch.autograd.grad((out, lse), list(leaves.values()), (inputs.d_out, inputs.d_lse))]

    for result, expected in zip(results(1000, -7), results(21, 0), strict=True):
        assert torch.equal(result, expected)


# Attention over parts of the keys, merged.


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_merged_in_any_order(order: tuple[int, ...], is_causal: bool, way: Way) -> None:
    """Three blocks of keys, some of which some queries do not see: out, lse and all gradients, also through lse."""
    inputs = make_inputs(2, 2, 17, 17, way.width, num_rows=9, dtype=way.dtype, seed=0)
    options: dict[str, Any] = {"is_causal": is_causal, "positions": RelativePositions(-4, 4, "zero")}

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, **_: Any) -> Any:
        parts = []
        for start, stop in ((0, 6), (6, 7), (7, 17)):
            rows = slice(start, stop)
            parts.append(way.attend(query, key[:, :, rows], value[:, :, rows], table, query_offset=-start, **options))
        merged = parts[order[0]]
        for index in order[1:]:
            merged = merge_attention(*merged, *parts[index])
        return merged

    way.check(forward_backward(attend, inputs), inputs, query_offset=0, **options)


def test_merged_where_nobody_sees_anything() -> None:
    """Queries that see nothing in one part, or in both: no NaN, in results and gradients."""
    out1, out2 = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    lse1 = torch.tensor([0.3, -torch.inf, -torch.inf], requires_grad=True)
    lse2 = torch.tensor([-torch.inf, 1000.0, -torch.inf], requires_grad=True)
    out, lse = merge_attention(out1, lse1, out2, lse2)
    assert torch.equal(out, torch.stack([out1[0], out2[1], torch.zeros(4)]))
    assert_near("lse", lse[:1], lse1[:1])
    assert lse.tolist()[1:] == [1000.0, -torch.inf]
    for gradient in torch.autograd.grad((out.sum(), lse[:2].sum()), (out1, lse1, out2, lse2)):
        assert gradient.isfinite().all()
    for gradient in torch.autograd.grad(merge_attention(out1, lse1, out2, lse2)[0].sum(), (out1, out2)):
        assert not gradient[2].any()


def test_merged_nan_that_has_no_weight() -> None:
    """Others return NaN for a query that sees nothing."""
    out, lse = torch.randn(2, 4), torch.zeros(2)
    merged, _ = merge_attention(out, lse, torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf))
    assert torch.equal(merged, out)


def test_merged_weights_that_overflowed() -> None:
    """A result with lse = +inf has all of the weight; two of them share it, as two equal results of any lse do."""
    out1, out2 = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    lse1 = torch.tensor([torch.inf, 0.5, torch.inf], requires_grad=True)
    lse2 = torch.tensor([0.5, torch.inf, torch.inf], requires_grad=True)
    out, lse = merge_attention(out1, lse1, out2, lse2)
    assert torch.equal(out, torch.stack([out1[0], out2[1], (out1[2] + out2[2]) / 2]))
    assert lse.tolist() == [torch.inf] * 3
    for gradient in torch.autograd.grad(out.sum() + lse.sum(), (out1, out2, lse1, lse2)):
        assert gradient.isfinite().all()


def test_merged_dtypes_and_shapes() -> None:
    out, lse = torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 3)
    merged = merge_attention(out, lse, out, lse)
    assert [tensor.dtype for tensor in merged] == [torch.bfloat16, torch.float32]
    assert_near("out", merged[0], out)
    assert_near("lse", merged[1], lse + torch.log(torch.tensor(2.0)))
    with pytest.raises(ValueError, match="lse1 and lse2"):
        merge_attention(out, lse[:1], out, lse)

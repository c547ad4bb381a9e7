"""Several sequences in one call, and one call in several parts: packed sequences, parts as ranks have them, and their merging."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.check import WAYS, Way, check
from tests.expected import TABLES
from tests.samples import Sample
from tests.tolerance import assert_near
from triton_relattn import RelativePositions, merge_attention
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.dropout import draw_seed, whole_origins
from triton_relattn._core.spec import AttentionSpec, AttentionTensors, GridSpec, GridTensors
from triton_relattn._core.validation import resolve
from triton_relattn._implementations import IMPLEMENTATIONS
from triton_relattn._operators import grid_attention, relative_attention
from triton_relattn.testing import dropout_mask, forward_backward, make_inputs

# Packed sequences: the same as separate ones, with NaN in keys and values that no query sees.

SEQUENCES = Sample(group=2, tables=TABLES, rel_width=4, spoilt="nan")
CLAMPED, PAST = (-4, 6, "clamp"), (-30, 0, "clamp")
PACKINGS: dict[str, dict[str, Any]] = {
    "empty_ones": {
        "sequences": ((0, 5), (7, 11), (18, 20), (0, 0), (5, 0)),
        "positions": (-60, 60, "clamp"),
        "query_offset": (4, 3, -2, 0, 20),
        "dropout_p": 0.4,
    },
    "clamped": {"sequences": ((7, 11), (18, 40), (9, 9)), "positions": CLAMPED, "query_offset": (4, 3, -2), "softcap": 3.0},
    "causal": {"sequences": ((3, 3), (18, 18), (1, 1)), "positions": (-4, 6, "zero"), "is_causal": True, "dropout_p": 0.4},
    "window": {
        "sequences": ((1, 5), (4, 30), (4, 9), (2, 17)),
        "positions": (-30, 30, "clamp"),
        "window_size": (3, 2),
        "query_offset": 4,
    },
    "window_beside": {
        "sequences": ((2, 3), (4, 9), (3, 5)),
        "positions": CLAMPED,
        "window_size": (1, 0),
        "query_offset": (9, 0, -9),
    },
    "decoding": {"sequences": ((1, 30), (1, 17), (1, 18)), "positions": PAST, "query_offset": (29, 16, 17)},
    # One needs rows 0 to 2 of the table, and the other 20 to 22.
    "far_apart": {"sequences": ((1, 3), (1, 3)), "positions": (-22, 0, "clamp"), "query_offset": (22, 2)},
    "nothing": {"sequences": ((0, 0), (0, 0)), "positions": CLAMPED},
    "no_sequences": {"sequences": (), "positions": CLAMPED},
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("case", PACKINGS)
def test_packed_sequences(case: str, way: Way) -> None:
    check(replace(SEQUENCES, dtype=way.fields["dtype"], **PACKINGS[case]), way)


# Parts of a call as ranks compute them, by private functions: in one process there is no public one.

BATCH, HEADS, LENGTH, DROPOUT_P = slice(1, 3), slice(2, 5), 33, 0.4


def resolved(*tensors: torch.Tensor | None, **arguments: Any) -> tuple[AttentionTensors, AttentionSpec]:
    """A validated call, with a dropout seed drawn after torch.manual_seed(0)."""
    call, spec = resolve(Arguments(*tensors, **arguments))  # type: ignore[arg-type]
    if spec.dropout_p > 0:
        torch.manual_seed(0)
        call = call._replace(dropout_seed=draw_seed())
    return call, spec


def part(call: AttentionTensors, first_query: int, first_key: int) -> AttentionTensors:
    """The call as a part of a larger one: sequences BATCH, heads HEADS, and queries and keys from these on."""
    origins = whole_origins(BATCH.stop, HEADS.stop, call.query.device)[BATCH, HEADS]
    return call._replace(dropout_origins=origins + torch.tensor([0, 0, first_query, first_key]))


def whole_mask(first_query: int, first_key: int) -> torch.Tensor:
    """The part of the whole call's dropout mask that belongs to :func:`part`."""
    torch.manual_seed(0)
    whole = dropout_mask(3, 5, LENGTH + first_query, LENGTH + first_key, DROPOUT_P)
    return whole[BATCH, HEADS, first_query:, first_key:]


def identity_values(way: Way) -> list[torch.Tensor]:
    """Query, key and an identity matrix as values."""
    query, key = make_inputs(2, 3, LENGTH, LENGTH, way.width, num_rows=None, dtype=way.dtype, seed=0)[:2]
    return [query, key, torch.eye(LENGTH, dtype=way.dtype).expand(2, 3, LENGTH, LENGTH).contiguous()]


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_part_drops_what_the_whole_drops(is_packed: bool, way: Way) -> None:
    """A part that starts at later sequences, heads, queries and keys has the whole call's mask: out of identity values shows it,
    and the gradient of values for an identity d_out."""
    tensors, packing = identity_values(way), dict[str, Any]()
    if is_packed:
        tensors = [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]
        packing = {"is_packed": True, "max_seqlen_q": LENGTH, "max_seqlen_k": LENGTH}
        packing |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.arange(3) * LENGTH)
    call, spec = resolved(*tensors, dropout_p=DROPOUT_P, **packing)
    value = call.value.clone().requires_grad_()
    out, _ = relative_attention(part(call._replace(value=value), 7, 5), spec, IMPLEMENTATIONS[way.implementation])
    (d_value,) = torch.autograd.grad(out, value, call.value)
    by_pair = [result.unflatten(2, (2, LENGTH))[0].transpose(0, 1) if is_packed else result for result in (out, d_value)]
    assert torch.equal(by_pair[0] != 0, whole_mask(7, 5)) and torch.equal(by_pair[1].mT != 0, whole_mask(7, 5))


def test_a_part_on_a_grid_drops_what_the_whole_drops(tiled: Way) -> None:
    """The same for sequences and heads of a call on a grid."""
    query, _, identity = identity_values(tiled)
    value = identity.clone().requires_grad_()
    call, _ = resolved(query, query, value, dropout_p=DROPOUT_P)
    rel_h, rel_w = (torch.randn(side, side, tiled.width, dtype=tiled.dtype) for side in (3, 11))
    call = part(call, 0, 0)
    on_grid = GridTensors(query, query, value, rel_h, rel_w, call.dropout_seed, call.dropout_origins)
    out = grid_attention(on_grid, GridSpec(0.3, DROPOUT_P), IMPLEMENTATIONS[tiled.implementation])
    (d_value,) = torch.autograd.grad(out, value, identity)
    assert torch.equal(out != 0, whole_mask(0, 0)) and torch.equal(d_value.mT != 0, whole_mask(0, 0))


def test_wide_tables(tiled: Way) -> None:
    """Gradients that ranks add up are not rounded: float32 tables with float16 queries have float32 gradients, which equal those
    of float16 tables once they are rounded."""
    options: dict[str, Any] = {"num_rows": 9, "dtype": torch.float16, "seed": 0, **dict.fromkeys(TABLES, True)}
    inputs = make_inputs(1, 2, LENGTH, LENGTH, tiled.width, **options)
    call, spec = resolved(*inputs[:4], **inputs.terms())
    results = []
    for dtype in (torch.float16, torch.float32):
        leaves: dict[str, Any] = {name: getattr(call, name).to(dtype).requires_grad_() for name in TABLES}
        out, _ = relative_attention(call._replace(**leaves), spec, IMPLEMENTATIONS[tiled.implementation])
        results.append([out.detach(), *torch.autograd.grad(out, list(leaves.values()), inputs.d_out)])
    assert all(wide.dtype == torch.float32 for wide in results[1][1:])
    for narrow, wide in zip(*results, strict=True):
        assert torch.equal(wide.half(), narrow)


@pytest.mark.parametrize("num_rows", [None, 9])
def test_lengths_beyond_the_keys_are_limited(num_rows: int | None, way: Way) -> None:
    """key_lengths, which are not checked on a GPU, are limited to [0, Nk]."""
    inputs = make_inputs(2, 1, 40, 21, way.width, num_rows=num_rows, dtype=way.dtype, seed=4)
    call, spec = resolved(*inputs[:4], key_lengths=torch.tensor([21, 0]))

    def results(*lengths: int) -> list[torch.Tensor]:
        leaves: dict[str, Any] = {name: getattr(call, name) for name in ("query", "key", "value", "rel_key")}
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in leaves.items() if tensor is not None}
        limited = call._replace(key_lengths=torch.tensor(lengths), **leaves)
        out, lse = relative_attention(limited, spec, IMPLEMENTATIONS[way.implementation])
        return [out, lse, *torch.autograd.grad((out, lse), list(leaves.values()), (inputs.d_out, inputs.d_lse))]

    for result, expected in zip(results(1000, -7), results(21, 0), strict=True):
        assert torch.equal(result, expected)


# Attention over parts of the keys, merged.


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_merged_in_any_order(order: tuple[int, ...], is_causal: bool, way: Way) -> None:
    """Three blocks of keys, some hidden from some queries: out, lse and all gradients, also through lse."""
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


INF = math.inf
EXTREMES = (
    # lse of two parts, their shares of out, lse of both.
    (0.3, -INF, 1.0, 0.0, 0.3),
    (-INF, 1000.0, 0.0, 1.0, 1000.0),
    (-INF, -INF, 0.0, 0.0, -INF),
    (INF, 0.5, 1.0, 0.0, INF),
    (0.5, INF, 0.0, 1.0, INF),
    (INF, INF, 0.5, 0.5, INF),
)


def test_merged_extremes() -> None:
    """Queries without keys in one part, or in both, give no NaN; NaN in out of other libraries gets no weight. A result with
    lse = +inf has all of the weight; two such results have equal weights."""
    out1, out2 = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
    lse1, lse2, *shares, right = torch.tensor(EXTREMES).unbind(1)
    leaves = (out1, lse1.requires_grad_(), out2, lse2.requires_grad_())
    out, lse = merge_attention(*leaves)
    assert torch.equal(out, (shares[0] * out1.T + shares[1] * out2.T).T)
    assert_near("lse", lse, right)
    gradients = torch.autograd.grad(out.sum() + lse[right > -INF].sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients) and not gradients[0][2].any() and not gradients[2][2].any()
    nan = torch.full((1, 4), torch.nan)
    assert torch.equal(merge_attention(out1[:1], lse1[:1], nan, lse2[:1])[0], out1[:1])


def test_merged_dtypes_and_shapes() -> None:
    out, lse = torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 3)
    merged = merge_attention(out, lse, out, lse)
    assert [tensor.dtype for tensor in merged] == [torch.bfloat16, torch.float32]
    assert_near("out", merged[0], out)
    assert_near("lse", merged[1], lse + torch.log(torch.tensor(2.0)))
    with pytest.raises(ValueError, match="lse1 and lse2"):
        merge_attention(out, lse[:1], out, lse)

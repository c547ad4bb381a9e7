"""Attention on a grid, backward. Two kernels, both of which compute P and dS of a tile again:

1. dq: a program owns a block of queries and loops over all keys, as the forward does. It gives d_query, and sums of dS over the
   rows and over the columns of the grid: the gradients of the queries' terms. It stores the exact delta of each query for
2. dkv: a program owns a tile of keys and loops over all queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import triton
import triton.language as tl

from ..._core.dtypes import without_autocast
from ..._core.grids import GridTensors
from ..call import PerQuery, aligned, cdiv
from ..config.tile_config import TileConfig
from ..delta import row_products
from ..draft import Draft, strided
from ..plan import Key, Template, find
from ..tile.blocks import head_matrix, keep_mask, load_rows, locate, locate_queries, row_vector, store_rows
from ..tile.logits import (
    LN_2,
    exponent_scale,
    lane_consistent,
    load_softmax_stats,
    probabilities,
    score_gradients,
    settled,
    tile_scores,
)
from .call import GridCall, Sums
from .tile import (
    block_at,
    column_mask,
    column_pointers,
    first_strip,
    key_blocks,
    lane_consistent_columns,
    load_column_terms,
    load_row_terms,
    on_grid,
    row_mask,
    row_pointers,
    strip_at,
    sums_by_place,
    tile_keys,
    with_terms,
)


@triton.jit(do_not_specialize=["num_heads"])
def grid_dq_kernel(
    inputs,
    outs,
    d_outs,
    d_queries,
    sums,
    per_query,
    common,
    key_grid,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    CUT: tl.constexpr,
):
    """Compute d_query, sums and per_query.deltas (``sum_j P dP``) for BLOCK_M queries of one head. d_queries or sums may be None.

    sums: call.Sums. Those of dS are as the rounded delta leaves them; less ``corrections`` times those of P they are exact.
    Grid: (query blocks * batch * heads,), query blocks fastest.
    """
    # The block's queries [M, D]; out and dO [M, Dv], and delta = rowsum(out * dO) [M] from them
    row_start, head, place = locate_queries(common.sequences, common.window, num_heads, TILE.block_m)
    tile_m = tl.arange(0, TILE.block_m)
    offs_m = row_start + tile_m
    valid_m = offs_m < place.num_queries
    keys = head_matrix(inputs.key, place.entry, head, 0, SHAPE.wide_index)
    values = head_matrix(inputs.value, place.entry, head, 0, SHAPE.wide_index)
    queries = head_matrix(inputs.query, place.entry, head, 0, SHAPE.wide_index)
    query = load_rows(queries, row_start, tile_m, valid_m, SHAPE.head_dim, SHAPE.block_d)
    d_outs = head_matrix(d_outs, place.entry, head, 0, SHAPE.wide_index)
    d_out = load_rows(d_outs, row_start, tile_m, valid_m, SHAPE.value_dim, SHAPE.block_dv)
    outs = head_matrix(outs, place.entry, head, 0, SHAPE.wide_index)
    out = load_rows(outs, row_start, tile_m, valid_m, SHAPE.value_dim, SHAPE.block_dv)
    delta = row_products(out.to(tl.float32), d_out, tile_m, TILE)
    row_max, log_sum = load_softmax_stats(per_query.softmax_stats, place, head, offs_m, valid_m)
    # Where the queries lie on the grid; those before it have no terms
    places, exist = on_grid(offs_m, valid_m, key_grid)

    # Sums of dS [M] and of dS K [M, D]
    total = tl.full([TILE.block_m], 0.0, tl.float32)
    acc = tl.full([TILE.block_m, SHAPE.block_d], 0.0, tl.float32)
    nothing = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
    scale = exponent_scale(common.scaling, None)

    # Strip by strip, tile by tile, as the forward
    for number in range(first_strip(key_grid), key_grid.strips):
        strip = strip_at(number, key_grid, place.num_keys, CUT)
        column_terms = load_column_terms(key_grid, place.entry, head, strip, offs_m, valid_m, CUT)  # [M, columns]
        if sums is not None:
            d_columns = tl.full([TILE.block_m, CUT.columns], 0.0, tl.float32)
            p_columns = tl.full([TILE.block_m, CUT.columns], 0.0, sums.p_columns[0].dtype.element_ty)
        for line in tl.range(0, strip.lines, CUT.lines):
            row_terms = load_row_terms(key_grid, place.entry, head, strip, line, offs_m, valid_m, CUT)  # [M, lines]
            start, rows, valid_n = tile_keys(strip, line, CUT)
            key = load_rows(keys, start, rows, valid_n, SHAPE.head_dim, SHAPE.block_d)  # [N, D]
            # P = exp(S - lse), dP = dO V^T, dS = P (dP - delta): all [M, N]
            scores = tile_scores(query, key, nothing, TILE)
            scores = with_terms(scores, row_terms, column_terms, CUT)
            probs = probabilities(scores, None, valid_n[None, :], scale, row_max, log_sum)
            value = load_rows(values, start, rows, valid_n, SHAPE.value_dim, SHAPE.block_dv)  # [N, Dv]
            d_probs = tile_scores(d_out, value, nothing, TILE)
            keep = None
            if common.dropout.seed is not None:
                offs_n = start + rows
                keep = keep_mask(common.dropout, place.batch, head, offs_m[:, None], offs_n[None, :])
            d_scores = score_gradients(probs, d_probs, delta, None, keep, common, False)
            # The gradients of the terms: sums of dS over columns [M, lines], to be stored, and over rows [M, columns], so far
            d_rows, d_tile = sums_by_place(d_scores, CUT)
            total += tl.sum(d_rows, axis=1)
            if sums is not None:
                p_rows, p_tile = sums_by_place(probs, CUT)
                d_columns += d_tile
                p_columns += p_tile.to(p_columns.dtype)
                wanted = row_mask(strip, line, exist, CUT)
                row = number * key_grid.height + line
                tl.store(row_pointers(sums.d_rows, place.entry, head, row, places, CUT), d_rows, mask=wanted)
                tl.store(row_pointers(sums.p_rows, place.entry, head, row, places, CUT), p_rows, mask=wanted)
            # dQ += dS K
            if d_queries is not None:
                # [M, N] @ [N, D] -> [M, D]
                acc = settled(tl.dot(d_scores.to(key.dtype), key, acc, input_precision=TILE.precision))

        # The strip's sums by column [M, columns], of dS and of P
        if sums is not None:
            wanted = column_mask(strip, exist, CUT)
            d_columns = lane_consistent_columns(d_columns, CUT)
            tl.store(column_pointers(sums.d_columns, place.entry, head, strip, places, CUT), d_columns, mask=wanted)
            tl.store(column_pointers(sums.p_columns, place.entry, head, strip, places, CUT), p_columns, mask=wanted)

    correction = lane_consistent(total, TILE.block_n)  # exact delta - delta
    tl.store(row_vector(per_query.deltas, place.entry, head, 0) + offs_m, delta + correction, mask=valid_m)
    if sums is not None:
        tl.store(row_vector(sums.corrections, place.entry, head, 0) + offs_m, correction, mask=valid_m)
    if d_queries is not None:
        unit = tl.cast(common.scaling.base_2_scale, tl.float32) * LN_2
        d_queries = head_matrix(d_queries, place.entry, head, 0, SHAPE.wide_index)
        store_rows(d_queries, row_start, tile_m, valid_m, acc * unit, SHAPE.head_dim, SHAPE.block_d)


@triton.jit(do_not_specialize=["num_heads"])
def grid_dkv_kernel(
    inputs,
    d_outs,
    d_keys,
    d_values,
    per_query,
    common,
    key_grid,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    CUT: tl.constexpr,
):
    """Compute d_key and d_value of a tile of keys of one head. d_keys or d_values may be None.

    Grid: (tiles of keys * batch * heads,), tiles fastest.
    """
    # This program's tile of keys [N, D] and values [N, Dv], and their gradients
    num_blocks = key_blocks(key_grid, CUT)
    head = tl.program_id(0) // num_blocks % num_heads
    place = locate(common.sequences, common.window, tl.program_id(0) // num_blocks // num_heads)
    number, line = block_at(tl.program_id(0) % num_blocks, key_grid, CUT)
    strip = strip_at(number, key_grid, place.num_keys, CUT)
    start, rows, valid_n = tile_keys(strip, line, CUT)
    offs_n = start + rows

    tile_m = tl.arange(0, TILE.block_m)
    keys = head_matrix(inputs.key, place.entry, head, 0, SHAPE.wide_index)
    key = load_rows(keys, start, rows, valid_n, SHAPE.head_dim, SHAPE.block_d)
    queries = head_matrix(inputs.query, place.entry, head, 0, SHAPE.wide_index)
    d_outs = head_matrix(d_outs, place.entry, head, 0, SHAPE.wide_index)
    deltas = row_vector(per_query.deltas, place.entry, head, 0)
    if d_keys is not None:
        values = head_matrix(inputs.value, place.entry, head, 0, SHAPE.wide_index)
        value = load_rows(values, start, rows, valid_n, SHAPE.value_dim, SHAPE.block_dv)
        d_key = tl.full([TILE.block_n, SHAPE.block_d], 0.0, tl.float32)
    if d_values is not None:
        d_value = tl.full([TILE.block_n, SHAPE.block_dv], 0.0, tl.float32)
    nothing = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
    scale = exponent_scale(common.scaling, None)

    for row_start in tl.range(0, place.num_queries, TILE.block_m):
        offs_m = row_start + tile_m
        valid_m = offs_m < place.num_queries
        query = load_rows(queries, row_start, tile_m, valid_m, SHAPE.head_dim, SHAPE.block_d)  # [M, D]
        # Terms by column [M, columns] and by row [M, lines]
        column_terms = load_column_terms(key_grid, place.entry, head, strip, offs_m, valid_m, CUT)
        row_terms = load_row_terms(key_grid, place.entry, head, strip, line, offs_m, valid_m, CUT)
        row_max, log_sum = load_softmax_stats(per_query.softmax_stats, place, head, offs_m, valid_m)
        # P = exp(S - lse) [M, N], as in the dq kernel
        scores = tile_scores(query, key, nothing, TILE)
        scores = with_terms(scores, row_terms, column_terms, CUT)
        probs = probabilities(scores, None, valid_m[:, None] & valid_n[None, :], scale, row_max, log_sum)
        keep = None
        if common.dropout.seed is not None:
            keep = keep_mask(common.dropout, place.batch, head, offs_m[:, None], offs_n[None, :])
        # dP = dO V^T [M, N]
        d_out = load_rows(d_outs, row_start, tile_m, valid_m, SHAPE.value_dim, SHAPE.block_dv)  # [M, Dv]
        if d_keys is not None:
            d_probs = tile_scores(d_out, value, nothing, TILE)
        # dV += P^T dO. This product stands between those of dP and dK: the matrix units have work while dS is computed.
        if d_values is not None:
            kept_probs = probs if common.dropout.seed is None else tl.where(keep, probs, 0.0)
            # [N, M] @ [M, Dv] -> [N, Dv]
            d_value = tl.dot(tl.trans(kept_probs.to(d_out.dtype)), d_out, d_value, input_precision=TILE.precision)
        if d_keys is not None:
            # dS = P (dP - delta), dK += dS^T Q
            delta = tl.load(deltas + offs_m, mask=valid_m, other=0.0)  # [M]
            d_scores = score_gradients(probs, d_probs, delta, None, keep, common, False).to(query.dtype)
            # [N, M] @ [M, D] -> [N, D]
            d_key = tl.dot(tl.trans(d_scores), query, d_key, input_precision=TILE.precision)

    # Units, and store dK [N, D] and dV [N, Dv].
    if d_keys is not None:
        unit = tl.cast(common.scaling.base_2_scale, tl.float32) * LN_2
        d_keys = head_matrix(d_keys, place.entry, head, 0, SHAPE.wide_index)
        store_rows(d_keys, start, rows, valid_n, d_key * unit, SHAPE.head_dim, SHAPE.block_d)
    if d_values is not None:
        if common.dropout.seed is not None:
            d_value *= tl.cast(common.dropout.keep_scale, tl.float32)
        d_values = head_matrix(d_values, place.entry, head, 0, SHAPE.wide_index)
        store_rows(d_values, start, rows, valid_n, d_value, SHAPE.value_dim, SHAPE.block_dv)


def backward(
    d_out: torch.Tensor,
    out: torch.Tensor,
    softmax_stats: torch.Tensor,
    tensors: GridTensors,
    scale: float,
    dropout_p: float,
    needs_grad: Sequence[bool] = (True,) * 5,
    tiles: Mapping[str, TileConfig] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of query, key, value, rel_h and rel_w; None for those that are not wanted. tiles: configurations by
    kernel. Memory beside them: per query two numbers, d_query in float32, its terms, and twice as many sums."""
    given = (d_out, out, softmax_stats, *tensors)
    options = scale, dropout_p, tuple(needs_grad), frozenset(tiles.items()) if tiles else None
    return tuple(find(plan_backward, given, options)(*given))


def plan_backward(key: Key) -> Template:
    """Decide how to compute what backward returns."""
    draft = Draft(key)
    (d_out, out, softmax_stats), tensors = draft.given[:3], GridTensors(*draft.given[3:])
    scale, dropout_p, needs_grad, tiles = key.options
    assert d_out is not None and out is not None and softmax_stats is not None
    query = tensors.query
    gradients = [
        draft.new(tensor.shape, tensor.dtype) if needed else None for tensor, needed in zip(tensors, needs_grad, strict=False)
    ]
    d_query, d_key, d_value, d_rel_h, d_rel_w = gradients
    if d_out.numel() == 0:
        for gradient in gradients:
            if gradient is not None:
                draft.end(torch.Tensor.zero_, gradient)
        return draft.compile(*gradients)
    wide_d_query = None if d_query is None else draft.new(query.shape, torch.float32)  # gradients of the terms are added
    d_out = aligned(draft, d_out, query.dtype)
    call = GridCall(draft, tensors, scale, dropout_p, (out, d_out, wide_d_query))
    dq_tile, dkv_tile = (call.tile(kernel, dict(tiles or ()).get(kernel)) for kernel in ("dq", "dkv"))
    deltas = draft.temporary(query.shape[:3])
    per_query = PerQuery(strided(draft.contiguous(softmax_stats)), deltas.strided)  # type: ignore[arg-type]
    sums = call.new_sums(dq_tile.block_n) if needs_grad[0] or needs_grad[3] or needs_grad[4] else None
    if sums is not None or d_key is not None:
        call.launch(
            "dq",
            grid_dq_kernel,
            dq_tile,
            (cdiv(query.shape[2], dq_tile.block_m) * call.num_sequences * call.heads,),
            outs=out.strided,
            d_outs=d_out.strided,
            d_queries=strided(wide_d_query),
            sums=None if sums is None else Sums(*map(strided, sums)),
            per_query=per_query,
        )
    if d_key is not None or d_value is not None:
        call.launch(
            "dkv",
            grid_dkv_kernel,
            dkv_tile,
            (call.key_tiles(dkv_tile.block_n) * call.num_sequences * call.heads,),
            d_outs=d_out.strided,
            d_keys=strided(d_key),
            d_values=strided(d_value),
            per_query=per_query,
        )
    if wide_d_query is not None and scale < 0:  # the kernels had the query negated
        draft.end(torch.Tensor.neg_, wide_d_query)
    if sums is not None:
        wanted = [slot for slot in (d_query, wide_d_query, d_rel_h, d_rel_w) if slot is not None]
        which = needs_grad[0], needs_grad[3], needs_grad[4]
        draft.end(partial(store_term_gradients, which), *sums, query, tensors.rel_h, tensors.rel_w, *wanted)
    return draft.compile(*gradients)


def store_term_gradients(needs_grad: Sequence[bool], *tensors: torch.Tensor) -> None:
    """Add the part of the terms to the gradient of the query, and store it in query's dtype; store the gradients of both tables.

    needs_grad: of query and tables. tensors: Sums, query, rel_h, rel_w, then of the gradients those that are wanted: of query, of
    query in float32 so far, of rel_h, of rel_w.
    """
    sums, (query, rel_h, rel_w), gradients = Sums(*tensors[:5]), tensors[5:8], list(tensors[8:])
    on_grid = GridTensors(query, query, query, rel_h, rel_w)
    with torch.no_grad(), without_autocast(query.device):
        by_place = on_grid.by_place(query).float()
        height, corrections = rel_h.shape[1], sums.corrections[:, :, on_grid.prefix :]
        by_strip = (rows.unflatten(2, (-1, height)) for rows in (sums.d_rows, sums.p_rows))
        d_rows, p_rows = (rows[:, :, 0] if rows.shape[2] == 1 else rows.sum(2) for rows in by_strip)
        d_rows = d_rows.addcmul_(corrections[:, :, None], p_rows, value=-1).unflatten(3, by_place.shape[2:4])
        d_columns = sums.d_columns.addcmul_(corrections[..., None], sums.p_columns, value=-1).unflatten(2, by_place.shape[2:4])
        if needs_grad[0]:
            d_query, wide_d_query = gradients[:2]
            of_terms = on_grid.by_place(wide_d_query)
            of_terms += torch.einsum("bgkyx,ykd->bgyxd", d_rows, rel_h)
            of_terms += torch.einsum("bgyxk,xkd->bgyxd", d_columns, rel_w)
            d_query.copy_(wide_d_query)
            del gradients[:2]
        if needs_grad[1]:
            gradients.pop(0).copy_(torch.einsum("bgkyx,bgyxd->ykd", d_rows, by_place))
        if needs_grad[2]:
            gradients.pop(0).copy_(torch.einsum("bgyxk,bgyxd->xkd", d_columns, by_place))

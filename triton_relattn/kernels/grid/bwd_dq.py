"""Backward on a grid, first kernel: a program owns a block of queries and loops over all keys, as the forward does.

It computes d_query, and sums of dS over the rows and over the columns of the grid: the gradients of the queries' terms. It stores
the exact delta of each query for the other kernel.
"""

import torch
import triton
import triton.language as tl

from ..bwd_dq import rounded_delta
from ..call import PerQuery, cdiv, strided
from ..config.selection import TileConfig
from ..tile.addressing import head_matrix, load_rows, row_vector, store_rows
from ..tile.dropout import keep_mask
from ..tile.masking import locate_queries
from ..tile.scores import LN_2, exponent_scale, lane_consistent, load_softmax_stats, probabilities, score_gradients, tile_scores
from .call import GridCall, Sums
from .tile import (
    column_mask,
    column_pointers,
    first_strip,
    load_column_terms,
    load_row_terms,
    on_grid,
    row_mask,
    row_pointers,
    settled_columns,
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
    call,
    key_grid,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    CUT: tl.constexpr,
):
    """Compute d_query, sums and per_query.deltas (``sum_j P dP``) for BLOCK_M queries of one head. d_queries or sums may be None.

    sums: grid_call.Sums. Those of dS are as the rounded delta leaves them; less ``corrections`` times those of P they are exact.
    Grid: (query blocks * batch * heads,), query blocks fastest.
    """
    row_start, head, place = locate_queries(call.sequences, call.window, num_heads, TILE.block_m)
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
    delta = rounded_delta(out, d_out, tile_m, TILE)
    row_max, log_sum = load_softmax_stats(per_query.softmax_stats, place, head, offs_m, valid_m)
    places, exist = on_grid(offs_m, valid_m, key_grid)

    total = tl.full([TILE.block_m], 0.0, tl.float32)
    acc = tl.full([TILE.block_m, SHAPE.block_d], 0.0, tl.float32)
    nothing = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
    scale = exponent_scale(call.scaling, None)

    for number in range(first_strip(key_grid), key_grid.strips):
        strip = strip_at(number, key_grid, place.num_keys, CUT)
        of_columns = load_column_terms(key_grid, place.entry, head, strip, offs_m, valid_m, CUT)
        if sums is not None:
            d_columns = tl.full([TILE.block_m, CUT.columns], 0.0, tl.float32)
            p_columns = tl.full([TILE.block_m, CUT.columns], 0.0, sums.p_columns[0].dtype.element_ty)
        for line in tl.range(0, strip.lines, CUT.lines):
            of_rows = load_row_terms(key_grid, place.entry, head, strip, line, offs_m, valid_m, CUT)
            start, rows, valid_n = tile_keys(strip, line, CUT)
            key = load_rows(keys, start, rows, valid_n, SHAPE.head_dim, SHAPE.block_d)
            scores = tile_scores(query, key, nothing, TILE)
            scores = with_terms(scores, of_rows, of_columns, CUT)
            probs = probabilities(scores, valid_n[None, :], scale, row_max, log_sum)
            value = load_rows(values, start, rows, valid_n, SHAPE.value_dim, SHAPE.block_dv)
            d_probs = tile_scores(d_out, value, nothing, TILE)
            keep = None
            if call.dropout.seed is not None:
                offs_n = start + rows
                keep = keep_mask(call.dropout, place.batch, head, offs_m[:, None], offs_n[None, :])
            d_scores = score_gradients(probs, d_probs, delta, None, keep, call, False)
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
            if d_queries is not None:
                # [M, N] @ [N, D] -> [M, D]
                acc = tl.dot(d_scores.to(key.dtype), key, acc, input_precision=TILE.precision)

        if sums is not None:
            wanted = column_mask(strip, exist, CUT)
            d_columns = settled_columns(d_columns, CUT)
            tl.store(column_pointers(sums.d_columns, place.entry, head, strip, places, CUT), d_columns, mask=wanted)
            tl.store(column_pointers(sums.p_columns, place.entry, head, strip, places, CUT), p_columns, mask=wanted)

    correction = lane_consistent(total, TILE.block_n)  # exact delta - delta
    tl.store(row_vector(per_query.deltas, place.entry, head, 0) + offs_m, delta + correction, mask=valid_m)
    if sums is not None:
        tl.store(row_vector(sums.corrections, place.entry, head, 0) + offs_m, correction, mask=valid_m)
    if d_queries is not None:
        unit = tl.cast(call.scaling.base_2_scale, tl.float32) * LN_2
        d_queries = head_matrix(d_queries, place.entry, head, 0, SHAPE.wide_index)
        store_rows(d_queries, row_start, tile_m, valid_m, acc * unit, SHAPE.head_dim, SHAPE.block_d)


def launch_grid_dq(
    call: GridCall,
    tile: TileConfig,
    per_query: PerQuery,
    out: torch.Tensor,
    d_out: torch.Tensor,
    d_query: torch.Tensor | None,
    sums: Sums | None,
) -> None:
    """Launch grid_dq_kernel for all queries; see there."""
    programs = cdiv(call.common.sequences.max_seqlen_q, tile.block_m) * call.num_sequences * call.heads
    call.launch(
        "dq",
        grid_dq_kernel,
        tile,
        (programs,),
        outs=strided(out),
        d_outs=strided(d_out),
        d_queries=strided(d_query),
        sums=None if sums is None else Sums(*map(strided, sums)),
        per_query=per_query,
    )

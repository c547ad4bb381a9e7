"""Backward, sixth kernel, unless a table has a row for every pair: the gradient of the query from recomputed dS.

    P = exp(logits - lse)     dP = dO V^T     dS = P (dP - delta)     dQ = scale dS K

A program owns a block of queries and loops over their keys, as the forward does, and recomputes P and dS, as FlashAttention
does. What the table adds to dQ, stored_dq_kernel has computed from dS near the table. Keys beyond a clamped table have its first
or last row: their dS, and with rel_value their P, are summed per query, for the gradient of the query and those of the tables.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tile.band import add_end_rows, add_far_tile, blocks_before, next_terms, reached_positions
from .tile.blocks import (
    FAR,
    NEAR,
    exists,
    first_part,
    head_matrix,
    keep_mask,
    key_order,
    key_range,
    load_past_future,
    load_queries,
    load_rows,
    locate_queries,
    loop_position,
    part_range,
    row_vector,
    stop_part,
    store_end_rows,
    store_rows,
)
from .tile.key_terms import natural_keys
from .tile.logits import (
    LN_2,
    Keys,
    Queries,
    exponent_scale,
    is_linear,
    key_table,
    lane_consistent,
    load_softmax_stats,
    probabilities,
    rel_unit,
    relative_terms,
    score_gradients,
    score_table,
    settled,
    tile_logits,
    tile_scores,
    value_table,
)


class EndRows(NamedTuple):
    """Sums over the queries of each block, (H, sequences, blocks, 2, width), of the gradients of a clamped table's first and last
    row; None: not wanted."""

    rel_key: Any = None
    rel_bias: Any = None
    rel_value: Any = None


@triton.jit
def add_beyond(past, future, tile, offs_m, offs_n, is_past, first, last, place, PART: tl.constexpr):
    """Add the sums of a tile [M, N] over keys before the table, and over keys behind it, to past and future [M]."""
    if PART == FAR:  # all keys of the tile are beyond the table, on one side
        return add_far_tile(past, future, tile, is_past)
    else:
        position = offs_n[None, :] - place.query_offset - offs_m[:, None]  # [M, N]
        past += tl.sum(tl.where(position < first, tile, 0.0), axis=1)
        return past, future + tl.sum(tl.where(position > last, tile, 0.0), axis=1)


@triton.jit(do_not_specialize=["first", "last", "num_heads"])
def dq_kernel(
    inputs,
    d_outs,
    d_queries,
    d_rel_queries,
    table_parts,
    end_rows,
    per_query,
    common,
    first,
    last,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute d_query and d_rel_query of BLOCK_M queries of one head, and end_rows, EndRows: what the keys before and behind a
    clamped table add to the gradients of its first and its last row. d_query is always computed, so that the layouts of the
    others, and their bits, do not depend on it; each of the others may be None.

    table_parts [B, H, Nq, Dr]: what stored_dq_kernel has computed; added to d_rel_query, or without rel_query to d_query.
    per_query is as delta_kernel left it.

    Grid: (query blocks * batch * heads,), query blocks fastest.
    """
    VALUE_TILE: tl.constexpr = TILE.value_tile
    # This program's block of queries; in a pack, sequences that are shorter than the longest have fewer
    row_start, head, place = locate_queries(common.sequences, common.window, num_heads, TILE.block_m)
    if common.sequences.cu_seqlens_q is not None:
        if row_start >= place.num_queries:
            return

    # The block's queries [M, D], what rel_key meets [M, Dr], and dO [M, Dv]
    tile_m = tl.arange(0, TILE.block_m)
    offs_m = row_start + tile_m
    tile_n = key_order(TILE)
    valid_m = offs_m < place.num_queries
    keys = head_matrix(inputs.key, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
    values = head_matrix(inputs.value, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
    query, rel_query = load_queries(inputs, place, head, row_start, tile_m, valid_m, SHAPE)
    d_outs = head_matrix(d_outs, place.entry, head, place.query_start, SHAPE.wide_index)
    d_out = load_rows(d_outs, row_start, tile_m, valid_m, SHAPE.value_dim, SHAPE.block_dv)
    mask = None if inputs.attn_mask is None else head_matrix(inputs.attn_mask, place.entry, head, 0, True)
    # What the forward and the delta kernel left of each query, [M] each
    row_max, log_sum = load_softmax_stats(per_query.softmax_stats, place, head, offs_m, valid_m)
    delta = tl.load(row_vector(per_query.deltas, place.entry, head, place.query_start) + offs_m, mask=valid_m, other=0.0)

    # The keys that they see, and of these the near ones, for which the table has rows
    last_query = tl.minimum(row_start + TILE.block_m, place.num_queries) - 1
    key_first, key_stop, near_start, near_stop = key_range(row_start, last_query, first, last, place, common.window, TILE)

    # The head's tables, and what keys beyond a clamped one add to scores and to dP
    HAS_TERM: tl.constexpr = TILE.has_matrix or TILE.has_bias
    IS_CLAMPED: tl.constexpr = TILE.coverage == "clamp"
    table = score_table(inputs, common, head, first, last, SHAPE, TILE)
    keys_table = key_table(inputs, common, head, first, last, SHAPE, TILE)
    if HAS_TERM and IS_CLAMPED:
        far_past, far_future = load_past_future(per_query.far_scores, place.entry, head, place.query_start, offs_m, valid_m)
    if inputs.rel_value is not None:
        values_table = value_table(inputs, head, first, last, SHAPE)
        if IS_CLAMPED:
            past_value, future_value = load_past_future(
                per_query.far_values, place.entry, head, place.query_start, offs_m, valid_m
            )

    # dQ [M, D]; sums of dS and of P over the keys beyond a clamped table [M]
    acc = tl.full([TILE.block_m, SHAPE.block_d], 0.0, tl.float32)
    past = tl.full([TILE.block_m], 0.0, tl.float32)
    future, past_probs, future_probs = past, past, past
    scale = exponent_scale(common.scaling, mask)

    # The far tiles, then the near ones
    for PART in tl.static_range(first_part(TILE), stop_part(TILE)):
        start, stop = part_range(PART, key_first, key_stop, near_start, near_stop)
        relative = start - row_start - place.query_offset
        # From tile to tile goes what the next one needs of the table blocks so far (band.py).
        carried, keys_carried, values_carried = 0, 0, 0
        if PART == NEAR and TILE.has_matrix and TILE.carry is not None:
            carried = blocks_before(rel_query, table, relative, TILE)
        if PART == NEAR and inputs.rel_value is not None and TILE.carry is not None:
            values_carried = blocks_before(d_out, values_table, relative, VALUE_TILE)

        for position in tl.range(start, stop, TILE.block_n):
            key_start = loop_position(PART, position, near_start, near_stop, TILE)
            offs_n = key_start + tile_n
            valid_n = exists(offs_n, place, common.window)
            relative = key_start - row_start - place.query_offset  # of the tile's first key to its first query
            is_past = key_start < near_start  # of a far tile: before the table, or behind it
            natural, far_term = query, None
            if PART == NEAR and inputs.rel_p2c is not None:
                natural = natural_keys(keys, key_start, place, common.window, TILE, SHAPE)  # [N, D]
            if PART == FAR and HAS_TERM and IS_CLAMPED:
                far_term = tl.where(is_past, far_past, far_future)  # [M]
            # P = exp(S - lse) [M, N], S the forward's logits: the relative terms, and Q K^T added to them
            tile_queries = Queries(rel_query, table, far_term, offs_m, valid_m)
            tile_keys = Keys(natural, keys_table, inputs.far_keys, offs_n, valid_n)
            terms, carried, keys_carried = relative_terms(
                tile_queries, tile_keys, carried, keys_carried, relative, is_past, place, head, PART, TILE
            )
            key = load_rows(keys, key_start, tile_n, valid_n, SHAPE.head_dim, SHAPE.block_d)  # [N, D]
            scores, is_visible, slope = tile_logits(
                query, key, terms, tile_queries, tile_keys, relative, mask, place, common, False, PART, TILE
            )
            beyond = far_term if is_linear(common.scaling.softcap, mask) else None
            probs = probabilities(scores, beyond, is_visible, scale, row_max, log_sum)
            keep = None
            if common.dropout.seed is not None:
                keep = keep_mask(common.dropout, place.batch, head, offs_m[:, None], offs_n[None, :])
            # dP = dO V^T [M, N], and dO times the rows of rel_value along the diagonals
            if PART == NEAR and inputs.rel_value is not None:
                d_probs, values_carried = next_terms(d_out, values_table, values_carried, relative, VALUE_TILE)
            elif inputs.rel_value is not None and IS_CLAMPED:
                far_value = tl.where(is_past, past_value, future_value)  # [M]
                d_probs = tl.broadcast_to(far_value[:, None], (TILE.block_m, TILE.block_n))
            else:
                d_probs = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
            value = load_rows(values, key_start, tile_n, valid_n, SHAPE.value_dim, SHAPE.block_dv)  # [N, Dv]
            d_probs = tile_scores(d_out, value, d_probs, TILE)
            # [M, N]: dS = P (dP - delta)
            d_scores = score_gradients(probs, d_probs, delta, is_visible, keep, common, inputs.rel_value is not None)
            if common.scaling.softcap is not None:  # through c tanh(x / c)
                d_scores *= slope
            # Sums over the keys beyond a clamped table
            if HAS_TERM and IS_CLAMPED:
                past, future = add_beyond(past, future, d_scores, offs_m, offs_n, is_past, first, last, place, PART)
            if end_rows.rel_value is not None:
                kept_probs = probs if common.dropout.seed is None else tl.where(keep, probs, 0.0)
                past_probs, future_probs = add_beyond(
                    past_probs, future_probs, kept_probs, offs_m, offs_n, is_past, first, last, place, PART
                )
            # dQ += dS K: [M, N] @ [N, D] -> [M, D]
            acc = settled(tl.dot(d_scores.to(key.dtype), key, acc, input_precision=TILE.precision))

    # Keys beyond a clamped table have its first or last row. Its gradient, the table's part, units, and store.
    block = row_start // TILE.block_m
    if HAS_TERM and IS_CLAMPED:
        past, future = lane_consistent(past, TILE.block_n), lane_consistent(future, TILE.block_n)
        if end_rows.rel_bias is not None:
            store_end_rows(end_rows.rel_bias, head, place.batch, block, valid_m, past, future, None, 1, 1)
        if end_rows.rel_key is not None:
            unit = rel_unit(common.scaling)
            rows, width = end_rows.rel_key, SHAPE.rel_dim
            of_past, of_future = past * unit, future * unit
            store_end_rows(rows, head, place.batch, block, valid_m, of_past, of_future, rel_query, width, SHAPE.block_dr)
    if end_rows.rel_value is not None:
        if common.dropout.seed is not None:
            past_probs *= tl.cast(common.dropout.keep_scale, tl.float32)
            future_probs *= tl.cast(common.dropout.keep_scale, tl.float32)
        rows, width = end_rows.rel_value, SHAPE.value_dim
        store_end_rows(rows, head, place.batch, block, valid_m, past_probs, future_probs, d_out, width, SHAPE.block_dv)
    acc *= tl.cast(common.scaling.base_2_scale, tl.float32) * LN_2
    if table_parts is not None:
        parts = head_matrix(table_parts, place.entry, head, place.query_start, SHAPE.wide_index)
        rel_acc = load_rows(parts, row_start, tile_m, valid_m, SHAPE.rel_dim, SHAPE.block_dr)  # [M, Dr]
        if IS_CLAMPED:
            lowest, highest = reached_positions(row_start, last_query, place, common.window)
            unit = rel_unit(common.scaling)
            # += sum of dS over far keys [M, 1] * end row [1, Dr]
            rel_acc = add_end_rows(rel_acc, past * unit, future * unit, table, lowest, highest, TILE)
        if d_rel_queries is None:
            acc += rel_acc
        else:
            d_rel_queries = head_matrix(d_rel_queries, place.entry, head, place.query_start, SHAPE.wide_index)
            store_rows(d_rel_queries, row_start, tile_m, valid_m, rel_acc, SHAPE.rel_dim, SHAPE.block_dr)
    d_queries = head_matrix(d_queries, place.entry, head, place.query_start, SHAPE.wide_index)
    store_rows(d_queries, row_start, tile_m, valid_m, acc, SHAPE.head_dim, SHAPE.block_d)

"""Backward, first kernel: a program owns a block of queries and loops over their keys, as the forward does.

It computes d_query and d_rel_query. For the other kernels it stores the exact delta of each query and, for clamped tables, the
terms of the keys beyond the table and sums over these keys.
"""

import torch
import triton
import triton.language as tl

from .call import Call, PerQuery, cdiv, strided
from .config.selection import TileConfig
from .logits import Vectors, key_table, relative_terms, score_table, tile_logits, value_table
from .tile.addressing import head_matrix, key_order, load_queries, load_rows, row_vector, store_rows, store_sides
from .tile.band import add_tile, blocks_before, next_terms
from .tile.dropout import keep_mask
from .tile.key_terms import natural_keys
from .tile.masking import FAR, NEAR, exists, first_part, key_range, locate_queries, loop_position, part_range, stop_part
from .tile.scores import (
    LN_2,
    exponent_scale,
    lane_consistent,
    load_softmax_stats,
    probabilities,
    rel_unit,
    score_gradients,
    tile_scores,
)
from .tile.table import add_end_rows, add_far_tile, far_terms, reached_positions, reached_table


@triton.jit
def rounded_delta(out, d_out, tile_m, TILE: tl.constexpr):
    """Compute rowsum(out * d_out) [M]. out was rounded, so this delta is off by some amount for each query; the sum of dS will
    tell by how much."""
    if out.dtype == tl.float32:
        # Rounded as dP is: if a query sees one key, out is that key's value, and dP - delta is 0, not rounding noise.
        # [M, Dv] @ [Dv, M] -> [M, M]
        products = tl.dot(d_out, tl.trans(out), input_precision=TILE.precision)
        delta = tl.sum(tl.where(tile_m[:, None] == tile_m[None, :], products, 0.0), axis=1)
    else:
        # The sum along axis 0 of the transposed: a sum along axis 1 has a layout that took up to 20 more registers in the loop.
        delta = tl.sum(tl.trans(out.to(tl.float32) * d_out.to(tl.float32)), axis=0)
    return delta


@triton.jit
def first_delta(outs, d_out, d_lses, deltas, place, head, row_start, tile_m, valid_m, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Return the delta [M] to start from: that of the rounded outs, or, if outs is None, the one that deltas hold already."""
    offs_m = row_start + tile_m
    if outs is None:
        return tl.load(deltas + offs_m, mask=valid_m, other=0.0)
    else:
        outs = head_matrix(outs, place.entry, head, place.query_start, SHAPE.wide_index)
        out = load_rows(outs, row_start, tile_m, valid_m, SHAPE.value_dim, SHAPE.block_dv)
        delta = rounded_delta(out, d_out, tile_m, TILE)
        if d_lses is not None:
            delta -= tl.load(d_lses + offs_m, mask=valid_m, other=0.0)
        return delta


@triton.jit(do_not_specialize=["first", "last", "num_heads"])
def dq_kernel(
    inputs,
    outs,
    d_outs,
    d_queries,
    d_rel_queries,
    d_lses,
    per_query,
    call,
    first,
    last,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute d_query, d_rel_query and per_query for BLOCK_M queries of one head. d_queries, d_rel_queries and d_lses (zeros) may
    be None.

    per_query.deltas [B, H, Nq] gets ``sum_j P dP - d_lse``; if outs is None, it has the delta to start from already. The far_*
    tensors of per_query, [B, H, 2, Nq], are about keys in tiles wholly beyond a clamped table, past and future: far_scores and
    far_values are the terms that the tables' end rows add to scores and dP; far_sums are the sums of dS, far_kept those of the
    probabilities that dropout keeps.
    Grid: (query blocks * batch * heads,), query blocks fastest.
    """
    VALUE_TILE: tl.constexpr = TILE.value_tile
    row_start, head, place = locate_queries(call.sequences, call.window, num_heads, TILE.block_m)
    if call.sequences.cu_seqlens_q is not None:
        if row_start >= place.num_queries:
            return

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
    row_max, log_sum = load_softmax_stats(per_query.softmax_stats, place, head, offs_m, valid_m)
    deltas = row_vector(per_query.deltas, place.entry, head, place.query_start)
    if d_lses is not None:
        d_lses = row_vector(d_lses, place.entry, head, place.query_start)
    delta = first_delta(outs, d_out, d_lses, deltas, place, head, row_start, tile_m, valid_m, SHAPE, TILE)

    last_query = tl.minimum(row_start + TILE.block_m, place.num_queries) - 1
    key_first, key_stop, near_start, near_stop = key_range(row_start, last_query, first, last, place, call.window, TILE)

    HAS_TERM: tl.constexpr = TILE.has_matrix or TILE.has_bias
    table = score_table(inputs, call, head, first, last, SHAPE, TILE)
    keys_table = key_table(inputs, call, head, first, last, SHAPE, TILE)
    zeros = tl.full([TILE.block_m], 0.0, tl.float32)
    past, past_sum, past_kept, future, future_sum, future_kept = zeros, zeros, zeros, zeros, zeros, zeros  # of far keys
    if HAS_TERM and TILE.coverage == "clamp":
        far_past, far_future = far_terms(rel_query, table, TILE)
        store_sides(per_query.far_scores, place, head, offs_m, valid_m, far_past, far_future)
    if inputs.rel_key is not None:  # its rows make the gradient of the query
        lowest, highest = reached_positions(row_start, last_query, place, call.window)
        reached = reached_table(table, lowest, highest, TILE)
    if inputs.rel_value is not None:
        values_table = value_table(inputs, head, first, last, SHAPE)
    if inputs.rel_value is not None and TILE.coverage == "clamp":
        past_value, future_value = far_terms(d_out, values_table, VALUE_TILE)
        store_sides(per_query.far_values, place, head, offs_m, valid_m, past_value, future_value)

    WANTS_BAND: tl.constexpr = (
        inputs.rel_key is not None and (d_queries if inputs.rel_query is None else d_rel_queries) is not None
    )
    total = zeros
    acc = tl.full([TILE.block_m, SHAPE.block_d], 0.0, tl.float32)
    if inputs.rel_query is not None:
        rel_acc = tl.full([TILE.block_m, SHAPE.block_dr], 0.0, tl.float32)
    scale = exponent_scale(call.scaling, mask)
    queries = Vectors(rel_query, offs_m, valid_m)

    for PART in tl.static_range(first_part(TILE), stop_part(TILE)):
        start, stop = part_range(PART, key_first, key_stop, near_start, near_stop)
        relative = start - row_start - place.query_offset
        carried, keys_carried = 0, 0
        if PART == NEAR and TILE.has_matrix and TILE.carry is not None:
            carried = blocks_before(rel_query, table, relative, TILE)
        values_carried = 0
        if PART == NEAR and inputs.rel_value is not None and TILE.carry is not None:
            values_carried = blocks_before(d_out, values_table, relative, VALUE_TILE)

        for position in tl.range(start, stop, TILE.block_n, disable_licm=TILE.rotation != "gather" and SHAPE.block_d > 64):
            key_start = loop_position(PART, position, near_start, near_stop, TILE)
            offs_n = key_start + tile_n
            valid_n = exists(offs_n, place, call.window)
            relative = key_start - row_start - place.query_offset
            is_past = key_start < near_start
            natural, far_term = query, 0
            if PART == NEAR and inputs.rel_p2c is not None:
                natural = natural_keys(keys, key_start, place, call.window, TILE, SHAPE)
            if PART == FAR and HAS_TERM and TILE.coverage == "clamp":
                far_term = tl.where(is_past, far_past, far_future)
            of_keys = Vectors(natural, offs_n, valid_n)
            terms, carried, keys_carried = relative_terms(
                queries,
                of_keys,
                table,
                keys_table,
                carried,
                keys_carried,
                far_term,
                is_past,
                relative,
                place,
                head,
                inputs,
                PART,
                TILE,
            )
            key = load_rows(keys, key_start, tile_n, valid_n, SHAPE.head_dim, SHAPE.block_d)
            scores, seen, slope = tile_logits(query, key, terms, queries, of_keys, mask, place, call, False, TILE)
            probs = probabilities(scores, seen, scale, row_max, log_sum)

            if PART == NEAR and inputs.rel_value is not None:
                d_probs, values_carried = next_terms(d_out, values_table, values_carried, relative, VALUE_TILE)
            elif inputs.rel_value is not None and TILE.coverage == "clamp":
                far_value = tl.where(is_past, past_value, future_value)
                d_probs = tl.broadcast_to(far_value[:, None], (TILE.block_m, TILE.block_n))
            else:
                d_probs = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
            value = load_rows(values, key_start, tile_n, valid_n, SHAPE.value_dim, SHAPE.block_dv)
            d_probs = tile_scores(d_out, value, d_probs, TILE)
            keep = None
            if call.dropout.seed is not None:
                keep = keep_mask(call.dropout, place.batch, head, offs_m[:, None], offs_n[None, :])
            d_scores = score_gradients(probs, d_probs, delta, seen, keep, call, inputs.rel_value is not None)
            total += tl.sum(d_scores, axis=1)
            if call.scaling.softcap is not None:
                d_scores *= slope

            if PART == FAR and TILE.coverage == "clamp":
                if HAS_TERM:
                    past, future = add_far_tile(past, future, d_scores, is_past)
                    slopes = probs * slope if call.scaling.softcap is not None else probs
                    past_sum, future_sum = add_far_tile(past_sum, future_sum, slopes, is_past)
                if inputs.rel_value is not None:
                    kept_probs = probs if call.dropout.seed is None else tl.where(keep, probs, 0.0)
                    past_kept, future_kept = add_far_tile(past_kept, future_kept, kept_probs, is_past)
            if d_queries is not None:
                # [M, N] @ [N, D] -> [M, D]
                acc = tl.dot(d_scores.to(key.dtype), key, acc, input_precision=TILE.precision)
            if PART == NEAR and WANTS_BAND:
                if inputs.rel_query is not None:
                    rel_acc = add_tile(rel_acc, d_scores, reached, relative, TILE)
                else:  # acc is d_query, whose unit is scale
                    if call.scaling.rel_scale is not None:
                        d_scores *= tl.cast(call.scaling.rel_scale, tl.float32)
                    acc = add_tile(acc, d_scores, reached, relative, TILE)

    correction = lane_consistent(total, TILE.block_n)  # exact delta - delta
    if d_lses is not None:  # loaded again, which is cheaper than to keep it in registers all the way
        correction -= tl.load(d_lses + offs_m, mask=valid_m, other=0.0)
    tl.store(deltas + offs_m, delta + correction, mask=valid_m)
    if HAS_TERM and TILE.coverage == "clamp":
        past = lane_consistent(past - correction * past_sum, TILE.block_n)
        future = lane_consistent(future - correction * future_sum, TILE.block_n)
        store_sides(per_query.far_sums, place, head, offs_m, valid_m, past, future)
    if inputs.rel_value is not None and TILE.coverage == "clamp":
        past_kept, future_kept = lane_consistent(past_kept, TILE.block_n), lane_consistent(future_kept, TILE.block_n)
        store_sides(per_query.far_kept, place, head, offs_m, valid_m, past_kept, future_kept)
    unit = tl.cast(call.scaling.base_2_scale, tl.float32) * LN_2
    if d_rel_queries is not None:
        if TILE.coverage == "clamp":
            rel_acc = add_end_rows(rel_acc, past, future, table, lowest, highest, TILE)
        d_rel_queries = head_matrix(d_rel_queries, place.entry, head, place.query_start, SHAPE.wide_index)
        rel_acc *= rel_unit(call.scaling)
        store_rows(d_rel_queries, row_start, tile_m, valid_m, rel_acc, SHAPE.rel_dim, SHAPE.block_dr)
    if d_queries is not None:
        if TILE.coverage == "clamp" and inputs.rel_key is not None and inputs.rel_query is None:
            if call.scaling.rel_scale is not None:
                past *= tl.cast(call.scaling.rel_scale, tl.float32)
                future *= tl.cast(call.scaling.rel_scale, tl.float32)
            acc = add_end_rows(acc, past, future, table, lowest, highest, TILE)
        d_queries = head_matrix(d_queries, place.entry, head, place.query_start, SHAPE.wide_index)
        store_rows(d_queries, row_start, tile_m, valid_m, acc * unit, SHAPE.head_dim, SHAPE.block_d)


def launch_dq(
    call: Call,
    tile: TileConfig,
    per_query: PerQuery,
    out: torch.Tensor | None,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    d_query: torch.Tensor | None,
    d_rel_query: torch.Tensor | None,
) -> None:
    """Launch dq_kernel for all queries; see there."""
    programs = cdiv(call.common.sequences.max_seqlen_q, tile.block_m) * call.num_sequences * call.heads
    call.launch(
        "dq",
        dq_kernel,
        tile,
        (programs,),
        outs=strided(out),
        d_outs=strided(d_out),
        d_queries=strided(d_query),
        d_rel_queries=strided(d_rel_query),
        d_lses=strided(d_lse),
        per_query=per_query,
    )

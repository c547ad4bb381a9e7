"""Backward, first kernel: a program owns a block of queries and walks their keys, as the forward does.

It gives d_query and d_rel_query, and what the other two kernels need of each query: the exact delta and, for clamped tables,
the terms of the keys beyond the table and sums over these keys.
"""

import triton
import triton.language as tl

from .band import add_terms, blocks_before, empty_band, for_values, next_terms, waiting_dtype
from .dropout import kept
from .masking import exists, first_key, last_key, locate, visible
from .scores import LN_2, exponent_scale, finished, load_normaliser, probabilities, settled, tile_scores
from .table import Table, add_end_rows, far_terms, reached_positions, reached_rows
from .tiles import head_matrix, head_vector, key_order, load_rows, row_vector, side_vector, store_rows
from .walk import FAR, NEAR, near_keys, part_range, walk_position


@triton.jit(do_not_specialize=["first", "last", "num_heads"])
def rows_kernel(
    queries,
    keys,
    values,
    rel_queries,
    rel_keys,
    rel_values,
    rel_bias,
    attn_mask,
    outs,
    d_outs,
    d_queries,
    d_rel_queries,
    statistics,
    d_lses,
    deltas,
    far_scores,
    far_values,
    far_sums,
    far_kept,
    sequences,
    window,
    dropout,
    scaling,
    first,
    last,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    REL_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_DR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROTATION: tl.constexpr,
    WARPS: tl.constexpr,
    CARRY: tl.constexpr,
    OUTSIDE: tl.constexpr,
    ROUND_TERMS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDE_INDEX: tl.constexpr,
):
    """d_query, d_rel_query and more of BLOCK_M queries of one head. d_queries, d_rel_queries and d_lses (zeros) may be None.

    deltas [B, H, Nq] is ``sum_j P dP - d_lse``; without outs the delta to begin with is there already. The others,
    [B, H, 2, Nq], are about far keys, those in tiles wholly beyond a clamped table, past and future: far_scores and far_values
    are what the tables' end rows add to all their scores and dP; far_sums is their sum of dS and far_kept of what is kept of P.
    Grid: (query blocks * batch * heads,), query blocks fastest.
    """
    num_blocks = tl.cdiv(sequences.max_seqlen_q, BLOCK_M)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % num_heads
    place = locate(sequences, window, tl.program_id(0) // num_blocks // num_heads)
    if window[1] is not None:
        block = num_blocks - 1 - block  # the longest walks first
    row_start = block * BLOCK_M
    if sequences.cu_seqlens_q is not None:
        if row_start >= place.num_queries:
            return

    TILE: tl.constexpr = (BLOCK_M, BLOCK_N, ROTATION, WARPS, ROUND_TERMS)
    VALUE_TILE: tl.constexpr = for_values(TILE)
    tile_m = tl.arange(0, BLOCK_M)
    offs_m = row_start + tile_m
    tile_n = key_order(TILE)
    valid_m = offs_m < place.num_queries
    keys = head_matrix(keys, place.entry, head // GROUP, place.key_start, WIDE_INDEX)
    values = head_matrix(values, place.entry, head // GROUP, place.key_start, WIDE_INDEX)
    queries = head_matrix(queries, place.entry, head, place.query_start, WIDE_INDEX)
    query = load_rows(queries, row_start, tile_m, valid_m, HEAD_DIM, BLOCK_D)
    d_outs = head_matrix(d_outs, place.entry, head, place.query_start, WIDE_INDEX)
    d_out = load_rows(d_outs, row_start, tile_m, valid_m, VALUE_DIM, BLOCK_DV)
    mask = None if attn_mask is None else head_matrix(attn_mask, place.entry, head, 0, True)
    row_max, log_sum = load_normaliser(statistics, place, head, offs_m, valid_m)
    deltas = row_vector(deltas, place.entry, head, place.query_start)
    if d_lses is not None:
        d_lses = row_vector(d_lses, place.entry, head, place.query_start)
    if outs is None:
        delta = tl.load(deltas + offs_m, mask=valid_m, other=0.0)
    else:
        # out was rounded, so this is off by the same amount for all keys of a query; the sum of dS will tell by how much.
        outs = head_matrix(outs, place.entry, head, place.query_start, WIDE_INDEX)
        out = load_rows(outs, row_start, tile_m, valid_m, VALUE_DIM, BLOCK_DV)
        if out.dtype == tl.float32:
            # Rounded as dP is: of a query that sees one key, whose out is that key's value, dP - delta is 0, not rounding noise.
            # [M, Dv] @ [Dv, M] -> [M, M]
            products = tl.dot(d_out, tl.trans(out), input_precision=INPUT_PRECISION)
            delta = tl.sum(tl.where(tile_m[:, None] == tile_m[None, :], products, 0.0), axis=1)
        else:
            # Of the transposed along axis 0: the sum along axis 1 has a layout that took up to 20 more registers in the loop.
            delta = tl.sum(tl.trans(out.to(tl.float32) * d_out.to(tl.float32)), axis=0)
        if d_lses is not None:
            delta -= tl.load(d_lses + offs_m, mask=valid_m, other=0.0)

    last_query = tl.minimum(row_start + BLOCK_M, place.num_queries) - 1
    key_first = first_key(row_start, place, window, BLOCK_N)
    key_stop = last_key(last_query, place, window)
    near_start = key_first
    near_stop = key_first if OUTSIDE is None else key_stop
    if OUTSIDE == "clamp" or OUTSIDE == "zero":
        near_start, near_stop = near_keys(row_start, first, last, place.query_offset, BLOCK_M, BLOCK_N, OUTSIDE)
        near_start, near_stop = tl.maximum(near_start, key_first), tl.maximum(near_stop, key_first)

    HAS_TERM: tl.constexpr = rel_keys is not None or rel_bias is not None
    rel_query = query
    if rel_queries is not None:
        rel_queries = head_matrix(rel_queries, place.entry, head, place.query_start, WIDE_INDEX)
        rel_query = load_rows(rel_queries, row_start, tile_m, valid_m, REL_DIM, BLOCK_DR)
    term = Table(
        None if rel_keys is None else head_matrix(rel_keys, 0, head, 0, WIDE_INDEX),
        scaling.rel_scale,
        None if rel_bias is None else head_vector(rel_bias, head),
        scaling.bias_scale,
        first,
        last,
    )
    if OUTSIDE == "clamp":
        zeros = tl.zeros([BLOCK_M], tl.float32)
        past, past_sum, future, future_sum = zeros, zeros, zeros, zeros
        past_kept, future_kept = zeros, zeros
    if HAS_TERM and OUTSIDE == "clamp":
        far_past, far_future = far_terms(rel_query, term, REL_DIM, BLOCK_DR, BLOCK_M, ROUND_TERMS, INPUT_PRECISION)
        tl.store(side_vector(far_scores, place.entry, head, 0, place.query_start) + offs_m, far_past, mask=valid_m)
        tl.store(side_vector(far_scores, place.entry, head, 1, place.query_start) + offs_m, far_future, mask=valid_m)
    if rel_keys is not None:  # its rows make the gradient of the query
        lowest, highest = reached_positions(row_start, last_query, place, window)
        reached = reached_rows(term, lowest, highest, OUTSIDE)
    if rel_values is not None:
        value_table = Table(head_matrix(rel_values, 0, head, 0, WIDE_INDEX), None, None, None, first, last)
    if rel_values is not None and OUTSIDE == "clamp":
        past_value, future_value = far_terms(d_out, value_table, VALUE_DIM, BLOCK_DV, BLOCK_M, False, INPUT_PRECISION)
        tl.store(side_vector(far_values, place.entry, head, 0, place.query_start) + offs_m, past_value, mask=valid_m)
        tl.store(side_vector(far_values, place.entry, head, 1, place.query_start) + offs_m, future_value, mask=valid_m)

    WANTS_BAND: tl.constexpr = rel_keys is not None and (d_queries if rel_queries is None else d_rel_queries) is not None
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if rel_queries is not None:
        rel_acc = tl.zeros([BLOCK_M, BLOCK_DR], tl.float32)
    scale = exponent_scale(scaling, mask)

    for PART in tl.static_range(NEAR if OUTSIDE == "none" else FAR, FAR + 1 if OUTSIDE is None else NEAR + 1):
        start, stop = part_range(PART, key_first, key_stop, near_start, near_stop)
        relative = start - row_start - place.query_offset
        if PART == NEAR and HAS_TERM:
            carried = blocks_before(rel_query, term, relative, REL_DIM, BLOCK_DR, TILE, OUTSIDE, INPUT_PRECISION, CARRY)
        if PART == NEAR and rel_values is not None:
            values_carried = blocks_before(
                d_out, value_table, relative, VALUE_DIM, BLOCK_DV, VALUE_TILE, OUTSIDE, INPUT_PRECISION, CARRY
            )
        if PART == NEAR and WANTS_BAND:
            waiting = empty_band(TILE, waiting_dtype(TILE, rel_keys[0].dtype.element_ty))

        for position in tl.range(start, stop, BLOCK_N, disable_licm=ROTATION != "gather" and BLOCK_D > 64):
            key_start = walk_position(PART, position, near_start, near_stop, OUTSIDE)
            offs_n = key_start + tile_n
            valid_n = exists(offs_n, place, window)
            relative = key_start - row_start - place.query_offset
            if PART == NEAR and HAS_TERM:
                scores, carried = next_terms(
                    rel_query, term, carried, relative, REL_DIM, BLOCK_DR, TILE, OUTSIDE, INPUT_PRECISION, CARRY
                )
            else:
                scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if PART == FAR and HAS_TERM and OUTSIDE == "clamp":
                far = tl.where(key_start < near_start, far_past, far_future)
                scores = tl.broadcast_to(far[:, None], (BLOCK_M, BLOCK_N))
            key = load_rows(keys, key_start, tile_n, valid_n, HEAD_DIM, BLOCK_D)
            scores = tile_scores(query, key, scores, INPUT_PRECISION)
            seen = visible(offs_m[:, None], offs_n[None, :], place, window)
            if mask is not None:
                seen = seen & valid_m[:, None]
            scores, seen, slope = finished(scores, seen, offs_m[:, None], offs_n[None, :], mask, scaling)
            probs = probabilities(scores, seen, scale, row_max, log_sum)

            if PART == NEAR and rel_values is not None:
                d_probs, values_carried = next_terms(
                    d_out,
                    value_table,
                    values_carried,
                    relative,
                    VALUE_DIM,
                    BLOCK_DV,
                    VALUE_TILE,
                    OUTSIDE,
                    INPUT_PRECISION,
                    CARRY,
                )
            elif rel_values is not None and OUTSIDE == "clamp":
                far = tl.where(key_start < near_start, past_value, future_value)
                d_probs = tl.broadcast_to(far[:, None], (BLOCK_M, BLOCK_N))
            else:
                d_probs = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            value = load_rows(values, key_start, tile_n, valid_n, VALUE_DIM, BLOCK_DV)
            d_probs = tile_scores(d_out, value, d_probs, INPUT_PRECISION)
            if dropout is not None:
                stays = kept(dropout, place.batch, head, offs_m[:, None], offs_n[None, :])
                d_probs = tl.where(stays, d_probs * tl.cast(dropout.keep_scale, tl.float32), 0.0)
            if rel_values is not None:
                d_probs = tl.where(seen, d_probs, 0.0)  # the row of a pair that nobody sees may be NaN
            d_scores = probs * (d_probs - delta[:, None])
            total += tl.sum(d_scores, axis=1)
            if scaling.softcap is not None:
                d_scores *= slope

            if PART == FAR and OUTSIDE == "clamp":
                is_past = key_start < near_start
                if HAS_TERM:
                    d_sum = tl.sum(d_scores, axis=1)
                    sum = tl.sum(probs * slope if scaling.softcap is not None else probs, axis=1)
                    past += tl.where(is_past, d_sum, 0.0)
                    past_sum += tl.where(is_past, sum, 0.0)
                    future += tl.where(is_past, 0.0, d_sum)
                    future_sum += tl.where(is_past, 0.0, sum)
                if rel_values is not None:
                    kept_sum = tl.sum(probs if dropout is None else tl.where(stays, probs, 0.0), axis=1)
                    past_kept += tl.where(is_past, kept_sum, 0.0)
                    future_kept += tl.where(is_past, 0.0, kept_sum)
            if d_queries is not None:
                # [M, N] @ [N, D] -> [M, D]
                acc = tl.dot(d_scores.to(key.dtype), key, acc, input_precision=INPUT_PRECISION)
            if PART == NEAR and WANTS_BAND:
                band_acc = acc if rel_queries is None else rel_acc
                if rel_queries is None and scaling.rel_scale is not None:
                    d_scores *= tl.cast(scaling.rel_scale, tl.float32)
                band_acc, waiting = add_terms(
                    band_acc,
                    d_scores,
                    waiting,
                    reached,
                    relative,
                    REL_DIM,
                    BLOCK_DR,
                    TILE,
                    OUTSIDE,
                    INPUT_PRECISION,
                    CARRY,
                )
                if rel_queries is None:
                    acc = band_acc
                else:
                    rel_acc = band_acc

        if PART == NEAR and WANTS_BAND and CARRY == "both":
            band_acc = acc if rel_queries is None else rel_acc
            nothing = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            behind = start + tl.cdiv(tl.maximum(stop - start, 0), BLOCK_N) * BLOCK_N - row_start - place.query_offset
            for ahead in tl.static_range(BLOCK_M // BLOCK_N):
                relative = behind + ahead * BLOCK_N
                band_acc, waiting = add_terms(
                    band_acc,
                    nothing,
                    waiting,
                    reached,
                    relative,
                    REL_DIM,
                    BLOCK_DR,
                    TILE,
                    OUTSIDE,
                    INPUT_PRECISION,
                    CARRY,
                )
            if rel_queries is None:
                acc = band_acc
            else:
                rel_acc = band_acc

    correction = settled(total, BLOCK_N)  # the exact delta less delta
    if d_lses is not None:  # loaded again, which is cheaper than to keep it in registers all the way
        correction -= tl.load(d_lses + offs_m, mask=valid_m, other=0.0)
    tl.store(deltas + offs_m, delta + correction, mask=valid_m)
    if HAS_TERM and OUTSIDE == "clamp":
        past = settled(past - correction * past_sum, BLOCK_N)
        future = settled(future - correction * future_sum, BLOCK_N)
        tl.store(side_vector(far_sums, place.entry, head, 0, place.query_start) + offs_m, past, mask=valid_m)
        tl.store(side_vector(far_sums, place.entry, head, 1, place.query_start) + offs_m, future, mask=valid_m)
    if rel_values is not None and OUTSIDE == "clamp":
        past_kept, future_kept = settled(past_kept, BLOCK_N), settled(future_kept, BLOCK_N)
        tl.store(side_vector(far_kept, place.entry, head, 0, place.query_start) + offs_m, past_kept, mask=valid_m)
        tl.store(side_vector(far_kept, place.entry, head, 1, place.query_start) + offs_m, future_kept, mask=valid_m)
    unit = tl.cast(scaling.base_2_scale, tl.float32) * LN_2
    rel_unit = unit if scaling.rel_scale is None else unit * tl.cast(scaling.rel_scale, tl.float32)
    if d_rel_queries is not None:
        if OUTSIDE == "clamp":
            rel_acc = add_end_rows(rel_acc, past, future, term, lowest, highest, REL_DIM, BLOCK_DR)
        d_rel_queries = head_matrix(d_rel_queries, place.entry, head, place.query_start, WIDE_INDEX)
        store_rows(d_rel_queries, row_start, tile_m, valid_m, rel_acc * rel_unit, REL_DIM, BLOCK_DR)
    if d_queries is not None:
        if OUTSIDE == "clamp" and rel_keys is not None and rel_queries is None:
            if scaling.rel_scale is not None:
                past *= tl.cast(scaling.rel_scale, tl.float32)
                future *= tl.cast(scaling.rel_scale, tl.float32)
            acc = add_end_rows(acc, past, future, term, lowest, highest, HEAD_DIM, BLOCK_D)
        d_queries = head_matrix(d_queries, place.entry, head, place.query_start, WIDE_INDEX)
        store_rows(d_queries, row_start, tile_m, valid_m, acc * unit, HEAD_DIM, BLOCK_D)

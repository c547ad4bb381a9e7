"""Backward, first kernel: a program owns a block of queries and walks their keys, as the forward does.

It gives d_query and what the other two kernels need of each query: the exact delta and, for a clamped table, sums over the
keys beyond the table and log-sum-exps to use there.
"""

import triton
import triton.language as tl

from .band import (
    FAR,
    NEAR,
    empty_band,
    end_row,
    far_scores,
    near_keys,
    next_tile,
    part_range,
    previous_block,
    reached_rows,
    table_block,
    table_rows,
    walk_position,
)
from .masking import key_length, last_key, visible
from .scores import LN_2, LOG2_E, probabilities, tile_scores
from .tiles import head_matrix, key_order, load_rows, row_vector, store_rows


@triton.jit
def rows_kernel(
    queries,
    keys,
    values,
    table,
    outs,
    d_outs,
    d_queries,
    key_lengths_ptr,
    lse_ptr,
    d_lse_ptr,
    delta_ptr,
    far_lse_ptr,
    far_sums_ptr,
    num_heads,
    seqlen_q,
    seqlen_k,
    base_2_scale,
    first,
    last,
    query_offset,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OUTSIDE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDE_INDEX: tl.constexpr,
):
    """d_query, delta, far_lse and far_sums of BLOCK_M queries of one head. d_queries may be None, far_* are for "clamp" only.

    delta [B, H, Nq] is ``sum_j P dP - d_lse``. The others, [B, H, 2, Nq], are about far keys, those in tiles wholly beyond the
    table, past and future: far_lse is the log-sum-exp, in base 2, less the term that they all have; far_sums is their sum of dS.
    Grid: (query blocks * batch * heads,), query blocks fastest.
    """
    num_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % num_heads
    batch = tl.program_id(0) // num_blocks // num_heads
    if IS_CAUSAL:
        block = num_blocks - 1 - block  # the longest walks first

    row_start = block * BLOCK_M
    tile_m = tl.arange(0, BLOCK_M)
    offs_m = row_start + tile_m
    tile_n = key_order(BLOCK_N)
    valid_m = offs_m < seqlen_q
    keys = head_matrix(keys, batch, head, WIDE_INDEX)
    values = head_matrix(values, batch, head, WIDE_INDEX)
    query = load_rows(head_matrix(queries, batch, head, WIDE_INDEX), row_start, tile_m, valid_m, HEAD_DIM, BLOCK_D)
    d_out = load_rows(head_matrix(d_outs, batch, head, WIDE_INDEX), row_start, tile_m, valid_m, VALUE_DIM, BLOCK_DV)
    out = load_rows(head_matrix(outs, batch, head, WIDE_INDEX), row_start, tile_m, valid_m, VALUE_DIM, BLOCK_DV)
    head_index = batch * num_heads + head
    d_lse = tl.load(row_vector(d_lse_ptr, head_index, seqlen_q) + offs_m, mask=valid_m, other=0.0)
    base_2_lse = tl.load(row_vector(lse_ptr, head_index, seqlen_q) + offs_m, mask=valid_m, other=0.0) * LOG2_E
    # out was rounded, so this is off by the same amount for all keys of a query; the sum of dS will tell by how much.
    if out.dtype == tl.float32:
        # Rounded as dP is: of a query that sees one key, whose out is that key's value, dP - delta is 0, not rounding noise.
        # [M, Dv] @ [Dv, M] -> [M, M]
        products = tl.dot(d_out, tl.trans(out), input_precision=INPUT_PRECISION)
        delta = tl.sum(tl.where(tile_m[:, None] == tile_m[None, :], products, 0.0), axis=1) - d_lse
    else:
        delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), axis=1) - d_lse
    base_2_scale = tl.cast(base_2_scale, tl.float32)

    last_query = tl.minimum(row_start + BLOCK_M, seqlen_q) - 1
    num_keys = key_length(key_lengths_ptr, batch, seqlen_k)
    key_stop = last_key(last_query, num_keys, query_offset, IS_CAUSAL)
    near_start = 0
    near_stop = 0 if OUTSIDE is None else key_stop
    if OUTSIDE is not None:
        table = head_matrix(table, batch, head, WIDE_INDEX)
        # Relative positions that some of the queries have to some key they see; their rows make the gradient of the query.
        lowest = -last_query - query_offset
        highest = tl.where(num_keys > 0, num_keys - 1 - row_start - query_offset, lowest - 1)
        if IS_CAUSAL:
            highest = tl.minimum(highest, 0)
        reached, reached_first, reached_last = reached_rows(table, first, last, lowest, highest, OUTSIDE)
    if OUTSIDE == "clamp" or OUTSIDE == "zero":
        near_start, near_stop = near_keys(row_start, first, last, query_offset, BLOCK_M, BLOCK_N, OUTSIDE)
    if OUTSIDE == "clamp":
        far_past, far_future = far_scores(query, table, first, last, HEAD_DIM, BLOCK_D, INPUT_PRECISION)
        # The term is one number for all far keys of a query, so it can go to the other side of the exponent.
        past_lse = base_2_lse - far_past * base_2_scale
        future_lse = base_2_lse - far_future * base_2_scale
        tl.store(row_vector(far_lse_ptr, 2 * head_index, seqlen_q) + offs_m, past_lse, mask=valid_m)
        tl.store(row_vector(far_lse_ptr, 2 * head_index + 1, seqlen_q) + offs_m, future_lse, mask=valid_m)

    total = tl.zeros([BLOCK_M], tl.float32)
    past, past_sum, future, future_sum = total, total, total, total
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    for PART in tl.static_range(NEAR if OUTSIDE == "none" else FAR, FAR + 1 if OUTSIDE is None else NEAR + 1):
        start, stop = part_range(PART, 0, key_stop, near_start, near_stop)
        if PART == NEAR:
            carried = empty_band(BLOCK_M, BLOCK_N)
            d_carried = empty_band(BLOCK_M, BLOCK_N)
            for ago in tl.static_range(BLOCK_M // BLOCK_N, 0, -1):
                relative = start - ago * BLOCK_N - row_start - query_offset
                band = table_block(query, table, relative, first, last, HEAD_DIM, BLOCK_D, BLOCK_N, OUTSIDE, INPUT_PRECISION)
                _, carried = next_tile(band, carried, BLOCK_M, BLOCK_N)

        for position in tl.range(start, stop, BLOCK_N):
            key_start = walk_position(PART, position, near_start, near_stop, OUTSIDE)
            offs_n = key_start + tile_n
            valid_n = offs_n < num_keys
            relative = key_start - row_start - query_offset
            if PART == NEAR:
                band = table_block(query, table, relative, first, last, HEAD_DIM, BLOCK_D, BLOCK_N, OUTSIDE, INPUT_PRECISION)
                scores, carried = next_tile(band, carried, BLOCK_M, BLOCK_N)
            else:
                scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if PART == FAR and OUTSIDE == "clamp":
                part_lse = tl.where(key_start < near_start, past_lse, future_lse)
            else:
                part_lse = base_2_lse
            key = load_rows(keys, key_start, tile_n, valid_n, HEAD_DIM, BLOCK_D)
            scores = tile_scores(query, key, scores, INPUT_PRECISION)
            seen = visible(offs_m[:, None], offs_n[None, :], num_keys, query_offset, IS_CAUSAL)
            probs = probabilities(scores, seen, base_2_scale, part_lse)
            value = load_rows(values, key_start, tile_n, valid_n, VALUE_DIM, BLOCK_DV)
            # [M, Dv] @ [Dv, N] -> [M, N]
            d_probs = tl.dot(d_out, tl.trans(value), input_precision=INPUT_PRECISION)
            d_scores = probs * (d_probs - delta[:, None])
            d_sum = tl.sum(d_scores, axis=1)
            total += d_sum
            if PART == FAR and OUTSIDE == "clamp":
                sum = tl.sum(probs, axis=1)
                past += tl.where(key_start < near_start, d_sum, 0.0)
                past_sum += tl.where(key_start < near_start, sum, 0.0)
                future += tl.where(key_start < near_start, 0.0, d_sum)
                future_sum += tl.where(key_start < near_start, 0.0, sum)
            if d_queries is not None:
                # [M, N] @ [N, D] -> [M, D]
                acc = tl.dot(d_scores.to(key.dtype), key, acc, input_precision=INPUT_PRECISION)
                if PART == NEAR:
                    d_block, d_carried = previous_block(d_scores, d_carried, BLOCK_M, BLOCK_N)
                    behind = relative - BLOCK_M
                    # [M, N] @ [N, D] -> [M, D]
                    rows = table_rows(reached, behind, reached_first, reached_last, HEAD_DIM, BLOCK_D, BLOCK_N, OUTSIDE)
                    acc = tl.dot(d_block.to(query.dtype), rows, acc, input_precision=INPUT_PRECISION)

        if PART == NEAR and d_queries is not None:  # the blocks that wait for tiles which do not come
            for ahead in tl.static_range(BLOCK_M // BLOCK_N):
                no_scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                d_block, d_carried = previous_block(no_scores, d_carried, BLOCK_M, BLOCK_N)
                behind = start + tl.cdiv(tl.maximum(stop - start, 0), BLOCK_N) * BLOCK_N + ahead * BLOCK_N - BLOCK_M
                behind -= row_start + query_offset
                rows = table_rows(reached, behind, reached_first, reached_last, HEAD_DIM, BLOCK_D, BLOCK_N, OUTSIDE)
                acc = tl.dot(d_block.to(query.dtype), rows, acc, input_precision=INPUT_PRECISION)

    # The exact delta less delta. d_lse is loaded again, which is cheaper than to keep it in registers all the way.
    correction = total - tl.load(row_vector(d_lse_ptr, head_index, seqlen_q) + offs_m, mask=valid_m, other=0.0)
    tl.store(row_vector(delta_ptr, head_index, seqlen_q) + offs_m, delta + correction, mask=valid_m)
    if OUTSIDE == "clamp":
        past -= correction * past_sum
        future -= correction * future_sum
        tl.store(row_vector(far_sums_ptr, 2 * head_index, seqlen_q) + offs_m, past, mask=valid_m)
        tl.store(row_vector(far_sums_ptr, 2 * head_index + 1, seqlen_q) + offs_m, future, mask=valid_m)
    if d_queries is not None:
        if OUTSIDE == "clamp":
            acc += past[:, None] * end_row(table, 0, lowest <= tl.minimum(first, highest), HEAD_DIM, BLOCK_D)[None, :]
            acc += future[:, None] * end_row(table, last - first, highest >= tl.maximum(last, lowest), HEAD_DIM, BLOCK_D)[None, :]
        d_queries = head_matrix(d_queries, batch, head, WIDE_INDEX)
        store_rows(d_queries, row_start, tile_m, valid_m, acc * base_2_scale * LN_2, HEAD_DIM, BLOCK_D)

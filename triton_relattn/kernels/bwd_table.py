"""Backward, third kernel: a program owns a block of table rows and walks the diagonal band of pairs that use them.

No two programs add to the same number, so there are no atomics and the result repeats bit for bit. Where there are fewer
blocks of rows than a GPU can work on, several programs share one, each with a partial sum of its own.
"""

import triton
import triton.language as tl

from .band import band_column, empty_band, from_tiles, rotate
from .masking import key_length, visible
from .scores import LN_2, LOG2_E, probabilities, tile_scores
from .tiles import head_matrix, key_order, load_rows, row_vector, store_rows


@triton.jit
def table_kernel(
    queries,
    keys,
    values,
    table,
    d_outs,
    d_tables,
    key_lengths_ptr,
    lse_ptr,
    delta_ptr,
    num_batches,
    num_heads,
    num_splits,
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
    PER_HEAD: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDE_INDEX: tl.constexpr,
):
    """Partial sums d_tables [splits, heads or 1, R, D] of BLOCK_N table rows; a clamped table's end rows are not touched.

    Grid: (row blocks * splits * table heads,), row blocks fastest. A program takes every splits-th batch entry; with a table
    that the heads share (PER_HEAD is false), every splits-th pair of batch entry and head.
    """
    INNER: tl.constexpr = 1 if OUTSIDE == "clamp" else 0
    num_blocks = tl.cdiv(last - first + 1 - 2 * INNER, BLOCK_N)
    block = tl.program_id(0) % num_blocks
    split = tl.program_id(0) // num_blocks % num_splits
    table_head = tl.program_id(0) // num_blocks // num_splits

    tile_m = tl.arange(0, BLOCK_M)
    tile_n = key_order(BLOCK_N)
    row = INNER + block * BLOCK_N
    relative = first + row
    exists = row + tile_n <= last - first - INNER
    table = head_matrix(table, 0, table_head, WIDE_INDEX)
    table_rows = load_rows(table, row, tile_n, exists, HEAD_DIM, BLOCK_D)
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    base_2_scale = tl.cast(base_2_scale, tl.float32)

    num_units = num_batches if PER_HEAD else num_batches * num_heads
    for unit in range(split, num_units, num_splits):
        batch = unit if PER_HEAD else unit // num_heads
        head = table_head if PER_HEAD else unit % num_heads
        num_keys = key_length(key_lengths_ptr, batch, seqlen_k)
        head_queries = head_matrix(queries, batch, head, WIDE_INDEX)
        head_keys = head_matrix(keys, batch, head, WIDE_INDEX)
        head_values = head_matrix(values, batch, head, WIDE_INDEX)
        head_d_outs = head_matrix(d_outs, batch, head, WIDE_INDEX)
        head_index = batch * num_heads + head

        # Queries that have a key at one of these distances.
        start = tl.maximum(-query_offset - relative - (BLOCK_N - 1), 0) // BLOCK_M * BLOCK_M
        stop = tl.minimum(seqlen_q, num_keys - query_offset - relative)
        if IS_CAUSAL:
            stop = tl.where(relative > 0, 0, stop)
        for row_start in tl.range(start, stop, BLOCK_M):
            offs_m = row_start + tile_m
            valid_m = offs_m < seqlen_q
            query = load_rows(head_queries, row_start, tile_m, valid_m, HEAD_DIM, BLOCK_D)
            d_out = load_rows(head_d_outs, row_start, tile_m, valid_m, VALUE_DIM, BLOCK_DV)
            key_start = row_start + query_offset + relative
            scores_carried, d_probs_carried = empty_band(BLOCK_M, BLOCK_N), empty_band(BLOCK_M, BLOCK_N)
            for ahead in tl.static_range(BLOCK_M // BLOCK_N + 1):
                valid_n = (key_start + ahead * BLOCK_N + tile_n).to(tl.uint32) < num_keys.to(tl.uint32)
                key = load_rows(head_keys, key_start + ahead * BLOCK_N, tile_n, valid_n, HEAD_DIM, BLOCK_D)
                scores = tile_scores(query, key, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), INPUT_PRECISION)
                scores, scores_carried = from_tiles(scores, scores_carried, BLOCK_M, BLOCK_N)
                value = load_rows(head_values, key_start + ahead * BLOCK_N, tile_n, valid_n, VALUE_DIM, BLOCK_DV)
                # [M, Dv] @ [Dv, N] -> [M, N]
                d_probs = tl.dot(d_out, tl.trans(value), input_precision=INPUT_PRECISION)
                d_probs, d_probs_carried = from_tiles(d_probs, d_probs_carried, BLOCK_M, BLOCK_N)
            # [M, D] @ [D, N] -> [M, N]
            scores += rotate(tl.dot(query, tl.trans(table_rows), input_precision=INPUT_PRECISION), BLOCK_M, BLOCK_N)
            offs_n = (offs_m + query_offset + relative)[:, None] + band_column(BLOCK_M, BLOCK_N)
            seen = visible(offs_m[:, None], offs_n, num_keys, query_offset, IS_CAUSAL)
            # For a query that does not exist, lse = inf makes the probabilities 0.
            base_2_lse = tl.load(row_vector(lse_ptr, head_index, seqlen_q) + offs_m, mask=valid_m, other=float("inf")) * LOG2_E
            probs = probabilities(scores, seen, base_2_scale, base_2_lse)

            delta = tl.load(row_vector(delta_ptr, head_index, seqlen_q) + offs_m, mask=valid_m, other=0.0)
            d_scores = (probs * (d_probs - delta[:, None])).to(query.dtype)
            # [N, M] @ [M, D] -> [N, D]
            d_band = rotate(d_scores, BLOCK_M, BLOCK_N, BACK=True)
            acc = tl.dot(tl.trans(d_band), query, acc, input_precision=INPUT_PRECISION)

    d_table = head_matrix(d_tables, split, table_head, WIDE_INDEX)
    store_rows(d_table, row, tile_n, exists, acc * base_2_scale * LN_2, HEAD_DIM, BLOCK_D)


@triton.jit
def table_ends_kernel(
    queries,
    d_tables,
    far_sums_ptr,
    num_batches,
    num_heads,
    num_splits,
    num_rows,
    seqlen_q,
    base_2_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PER_HEAD: tl.constexpr,
    WIDE_INDEX: tl.constexpr,
):
    """The first and the last row of d_tables for a clamped table, from far_sums [B, H, 2, Nq] of rows_kernel.

    Grid: (splits * table heads,), divided as in table_kernel.
    """
    split = tl.program_id(0) % num_splits
    table_head = tl.program_id(0) // num_splits
    tile_m = tl.arange(0, BLOCK_M)
    past = tl.zeros([BLOCK_D], tl.float32)
    future = tl.zeros([BLOCK_D], tl.float32)
    num_units = num_batches if PER_HEAD else num_batches * num_heads
    for unit in range(split, num_units, num_splits):
        batch = unit if PER_HEAD else unit // num_heads
        head = table_head if PER_HEAD else unit % num_heads
        head_queries = head_matrix(queries, batch, head, WIDE_INDEX)
        past_sums = row_vector(far_sums_ptr, 2 * (batch * num_heads + head), seqlen_q)
        for row_start in tl.range(0, seqlen_q, BLOCK_M):
            valid_m = row_start + tile_m < seqlen_q
            query = load_rows(head_queries, row_start, tile_m, valid_m, HEAD_DIM, BLOCK_D).to(tl.float32)
            past_sum = tl.load(past_sums + row_start + tile_m, mask=valid_m, other=0.0)
            future_sum = tl.load(past_sums + seqlen_q + row_start + tile_m, mask=valid_m, other=0.0)
            past += tl.sum(query * past_sum[:, None], axis=0)
            future += tl.sum(query * future_sum[:, None], axis=0)

    scale = tl.cast(base_2_scale, tl.float32) * LN_2
    d_table = head_matrix(d_tables, split, table_head, WIDE_INDEX)
    columns = tl.arange(0, BLOCK_D)
    if num_rows == 1:
        past += future
    else:
        last_row = d_table[0] + tl.cast(num_rows - 1, tl.int64) * d_table[1] + columns * d_table[2]
        tl.store(last_row, future * scale, mask=columns < HEAD_DIM)
    tl.store(d_table[0] + columns * d_table[2], past * scale, mask=columns < HEAD_DIM)

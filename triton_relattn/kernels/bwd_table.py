"""Backward, third kernel: a program owns a block of table rows and walks the diagonal band of pairs that use them.

No two programs add to the same number, so there are no atomics and the result repeats bit for bit. Where there are fewer
blocks of rows than a GPU can work on, several programs share one, each with a partial sum of its own.
"""

import triton
import triton.language as tl

from .band import band_column, clamp_margin, empty_band, from_tiles, near_keys, rotate, table_rows
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
    ROWS_BLOCK_M: tl.constexpr,
    ROWS_BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDE_INDEX: tl.constexpr,
):
    """Partial sums d_tables [splits, heads or 1, R, D] of BLOCK_N table rows.

    Beyond a clamped table there are keys that rows_kernel, with tiles of ROWS_BLOCK_M and ROWS_BLOCK_N, does not count as far.
    They are summed by distance in rows of their own: d_tables has clamp_margin more rows on either side, and then one more
    for table_ends_kernel.

    Grid: (row blocks * splits * table heads,), row blocks fastest. A program takes every splits-th batch entry; with a table
    that the heads share (PER_HEAD is false), every splits-th pair of batch entry and head.
    """
    MARGIN: tl.constexpr = clamp_margin(ROWS_BLOCK_M, ROWS_BLOCK_N) if OUTSIDE == "clamp" else 0
    num_blocks = tl.cdiv(last - first + 1 + 2 * MARGIN, BLOCK_N)
    block = tl.program_id(0) % num_blocks
    split = tl.program_id(0) // num_blocks % num_splits
    table_head = tl.program_id(0) // num_blocks // num_splits

    tile_m = tl.arange(0, BLOCK_M)
    tile_n = key_order(BLOCK_N)
    relative = first - MARGIN + block * BLOCK_N
    rows = table_rows(head_matrix(table, 0, table_head, WIDE_INDEX), relative, first, last, HEAD_DIM, BLOCK_D, BLOCK_N, OUTSIDE)
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
            scores += rotate(tl.dot(query, tl.trans(rows), input_precision=INPUT_PRECISION), BLOCK_M, BLOCK_N)
            offs_n = (offs_m + query_offset + relative)[:, None] + band_column(BLOCK_M, BLOCK_N)
            # A query that does not exist is zeros, which a table row of NaN would turn into NaN for all rows.
            seen = valid_m[:, None] & visible(offs_m[:, None], offs_n, num_keys, query_offset, IS_CAUSAL)
            if OUTSIDE == "clamp":
                rows_start = offs_m // ROWS_BLOCK_M * ROWS_BLOCK_M
                near_start, near_stop = near_keys(rows_start, first, last, query_offset, ROWS_BLOCK_M, ROWS_BLOCK_N, OUTSIDE)
                seen = seen & (offs_n >= near_start[:, None]) & (offs_n < near_stop[:, None])
            base_2_lse = tl.load(row_vector(lse_ptr, head_index, seqlen_q) + offs_m, mask=valid_m, other=0.0) * LOG2_E
            probs = probabilities(scores, seen, base_2_scale, base_2_lse)

            delta = tl.load(row_vector(delta_ptr, head_index, seqlen_q) + offs_m, mask=valid_m, other=0.0)
            d_scores = (probs * (d_probs - delta[:, None])).to(query.dtype)
            # [N, M] @ [M, D] -> [N, D]
            d_band = rotate(d_scores, BLOCK_M, BLOCK_N, BACK=True)
            acc = tl.dot(tl.trans(d_band), query, acc, input_precision=INPUT_PRECISION)

    d_table = head_matrix(d_tables, split, table_head, WIDE_INDEX)
    row = block * BLOCK_N
    exists = row + tile_n <= last - first + 2 * MARGIN
    store_rows(d_table, row + 1 if OUTSIDE == "clamp" else row, tile_n, exists, acc * base_2_scale * LN_2, HEAD_DIM, BLOCK_D)


@triton.jit
def table_ends_kernel(
    queries,
    d_tables,
    far_sums_ptr,
    num_batches,
    num_heads,
    num_splits,
    seqlen_q,
    base_2_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PER_HEAD: tl.constexpr,
    WIDE_INDEX: tl.constexpr,
):
    """The first and the last row of d_tables for a clamped table: the far keys, from far_sums [B, H, 2, Nq] of rows_kernel.

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
    columns = tl.arange(0, BLOCK_D)
    first_row = head_matrix(d_tables, split, table_head, WIDE_INDEX)[0] + columns
    last_row = head_matrix(d_tables, split, table_head + 1, WIDE_INDEX)[0] - HEAD_DIM + columns
    tl.store(first_row, past * scale, mask=columns < HEAD_DIM)
    tl.store(last_row, future * scale, mask=columns < HEAD_DIM)

"""Backward, instead of the third kernel: the gradient of a table as a product of what the columns kernel has left in a workspace.

A program owns a block of table rows and walks the queries, as in the table kernel, but scores are not computed again: it reads
their gradients, words.py, and multiplies them with the queries. No two programs add to the same number.
"""

import triton
import triton.language as tl

from .masking import locate
from .scores import LN_2
from .tiles import head_matrix, load_rows, row_vector, store_rows
from .walk import clamp_margin, near_keys
from .words import key_of_column, load_words


@triton.jit(do_not_specialize=["first_item", "stop_item", "first_key", "stop_key", "lowest", "first", "last", "num_heads"])
def diagonals_kernel(
    rel_queries,
    words,
    d_rel_keys,
    d_rel_bias,
    first_item,
    stop_item,
    first_key,
    stop_key,
    lowest,
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
    OUTSIDE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    SKEW: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS_BLOCK_M: tl.constexpr,
    ROWS_BLOCK_N: tl.constexpr,
    ROUND_TERMS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDE_INDEX: tl.constexpr,
):
    """Partial sums as of table_kernel, of the words [1, items, Nq, columns] of some keys; ADDS: on top of what they are.

    An item is a batch entry and head, counted through; the workspace has those from first_item to stop_item, and of them the keys
    from first_key to stop_key. Grid: (row blocks * table heads, splits), row blocks fastest; a program takes every splits-th
    block of queries of all items that use its table.
    """
    MARGIN: tl.constexpr = clamp_margin(ROWS_BLOCK_M, ROWS_BLOCK_N) if OUTSIDE == "clamp" else 0
    num_blocks = tl.cdiv(last - first + 1 + 2 * MARGIN, BLOCK_N)
    block = tl.program_id(0) % num_blocks
    table_head = tl.program_id(0) // num_blocks if PER_HEAD else 0
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    relative = first - MARGIN + block * BLOCK_N
    tile_m = tl.arange(0, BLOCK_M)
    tile_n = tl.arange(0, BLOCK_N)
    if d_rel_keys is not None:
        acc = tl.zeros([BLOCK_N, BLOCK_DR], tl.float32)
    if d_rel_bias is not None:
        bias_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # summed over the queries at the end: across warps, that is dear

    # Relative positions that the table, with its margins, and the window have.
    position = relative + tile_n
    valid_n = position <= last + MARGIN
    if window[1] is not None:
        valid_n = valid_n & (position <= window[1])
    if window[0] is not None:
        valid_n = valid_n & (position >= -window[0])

    item_start, item_step = first_item, 1
    if PER_HEAD:
        item_start = first_item + (table_head + num_heads - first_item % num_heads) % num_heads
        item_step = num_heads
    for item in tl.range(item_start, stop_item, item_step):
        entry = item // num_heads
        head = item % num_heads
        place = locate(sequences, window, entry)
        matrix = head_matrix(words, 0, item - first_item, 0, False)
        if d_rel_keys is not None:
            head_queries = head_matrix(rel_queries, place.entry, head, place.query_start, WIDE_INDEX)
        # Queries that have a key of the workspace at one of these distances, and see it.
        shift = place.query_offset + relative
        start = tl.maximum(first_key - shift - (BLOCK_N - 1), 0) // BLOCK_M * BLOCK_M
        stop = tl.minimum(place.num_queries, tl.minimum(place.num_keys, stop_key) - shift)
        if window[1] is not None:
            stop = tl.where(relative > window[1], 0, stop)
        if window[0] is not None:
            stop = tl.where(relative + (BLOCK_N - 1) < -window[0], 0, stop)
        for row_start in tl.range(start + split * BLOCK_M, stop, num_splits * BLOCK_M):
            valid_m = row_start + tile_m < place.num_queries
            # Words of pairs that nobody sees may never have been written, and those of far keys do not count.
            key_low, key_high = first_key, tl.minimum(place.num_keys, stop_key)
            if OUTSIDE == "clamp":
                rows_start = row_start // ROWS_BLOCK_M * ROWS_BLOCK_M
                if ROWS_BLOCK_M < BLOCK_M:
                    rows_start = ((row_start + tile_m) // ROWS_BLOCK_M * ROWS_BLOCK_M)[None, :]
                near_start, near_stop = near_keys(
                    rows_start, first, last, place.query_offset, ROWS_BLOCK_M, ROWS_BLOCK_N, OUTSIDE
                )
                key_low, key_high = tl.maximum(near_start, key_low), tl.minimum(near_stop, key_high)
            column = row_start + shift - key_of_column(row_start, place.query_offset, first_key, lowest, SKEW)
            keys = (row_start + shift) + (tile_n[:, None] + tile_m[None, :])
            within = (keys - key_low).to(tl.uint32) < tl.maximum(key_high - key_low, 0).to(tl.uint32)
            within = within & valid_m[None, :] & valid_n[:, None]
            d_band = load_words(matrix, row_start, tile_m, column, within, BLOCK_N)
            if d_rel_bias is not None:
                bias_acc += d_band.to(tl.float32)
            if d_rel_keys is not None:
                rel_query = load_rows(head_queries, row_start, tile_m, valid_m, REL_DIM, BLOCK_DR)
                # [N, M] @ [M, Dr] -> [N, Dr]
                acc = tl.dot(d_band, rel_query, acc, input_precision=INPUT_PRECISION)

    row = relative - first + MARGIN
    valid = relative + tile_n <= last + MARGIN
    row = row + 1 if OUTSIDE == "clamp" else row
    if d_rel_keys is not None:
        unit = tl.cast(scaling.base_2_scale, tl.float32) * LN_2
        if scaling.rel_scale is not None:
            unit *= tl.cast(scaling.rel_scale, tl.float32)
        acc *= unit
        d_rel_keys = head_matrix(d_rel_keys, split, table_head, 0, WIDE_INDEX)
        if ADDS:
            acc += load_rows(d_rel_keys, row, tile_n, valid, REL_DIM, BLOCK_DR)
        store_rows(d_rel_keys, row, tile_n, valid, acc, REL_DIM, BLOCK_DR)
    if d_rel_bias is not None:
        bias = tl.sum(bias_acc, axis=1)
        pointers = row_vector(d_rel_bias, split, table_head, row) + tile_n
        if ADDS:
            bias += tl.load(pointers, mask=valid, other=0.0)
        tl.store(pointers, bias, mask=valid)

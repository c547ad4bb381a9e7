"""Backward, fifth kernel: the gradient of the table that meets the keys, from the dS that the dkv kernel has stored.

    d_rel_p2c[r] = sum_j dS[j - r, j] k_j

A program owns a block of the table's rows and loops over the keys: the dtable kernel with queries and keys exchanged. A block of
M rows and a block of N keys meet in queries of two tiles; of either it takes the half that does. No two programs add to the same
number.
"""

import triton
import triton.language as tl

from .tile.blocks import exists, head_matrix, key_order, load_rows, locate, near_keys, store_rows, visible
from .tile.logits import rel_unit
from .workspace.stored import first_column_key, stored_part, table_bh_range, table_share, window_in_table


@triton.jit
def keys_at(highest, first_key, stop_key, place, window, TILE: tl.constexpr):
    """Return (start, stop) of the stored keys that a query has at one of M distances up to highest; start rounded to a tile."""
    # Distance r = j - i - query_offset: query 0 has the lowest of M distances at the first key, the last query the highest at the
    # last key.
    start = tl.maximum(highest + place.query_offset - (TILE.block_m - 1), tl.maximum(first_key, place.first_key))
    stop = tl.minimum(tl.minimum(place.num_keys, stop_key), place.num_queries + place.query_offset + highest)
    if window[1] is not None:
        stop = tl.where(highest - (TILE.block_m - 1) > window[1], 0, stop)
    if window[0] is not None:
        stop = tl.where(highest < -window[0], 0, stop)
    return start // TILE.block_n * TILE.block_n, stop


@triton.jit
def near_queries(offs_n, first, last, place, LAYOUT: tl.constexpr):
    """Return (start, stop) of the queries that the dkv kernel takes for near to a key, with a clamped table."""
    key_start = offs_n // LAYOUT.block_n * LAYOUT.block_n
    start, stop = near_keys(key_start, -last, -first, -place.query_offset, LAYOUT.block_n, LAYOUT.block_m)
    return start, tl.minimum(stop, place.num_queries)


@triton.jit
def rotate_columns(tile, TILE: tl.constexpr):
    """Rotate column n by n places back: ``rotated[m, n] = tile[(m + n) mod M, n]``; n is the place of its key."""
    M: tl.constexpr = TILE.block_m
    # Along the rows: [M, 1] + [1, N] -> [M, N]
    index = (tl.arange(0, M)[:, None] + key_order(TILE)[None, :]) % M
    return tl.gather(tile, tl.broadcast_to(index, (M, TILE.block_n)), axis=0)


@triton.jit(do_not_specialize=["first_program", "stop_program", "first", "last", "num_heads"])
def dp2c_kernel(
    inputs,
    stored,
    d_rel_p2c,
    first_program,
    stop_program,
    common,
    first,
    last,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    PER_HEAD: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Compute partial sums [splits, heads or 1, R, D] of BLOCK_M rows of rel_p2c's gradient; arguments are as of dtable_kernel.

    LAYOUT.margin: beyond a clamped table there are queries that dkv_kernel does not count as far. They are summed by distance in
    so many more rows on either side.

    Grid: as table_share has it; a program takes every splits-th block of keys of all heads that use its table.
    """
    # This program's rows of the table, and its share of the keys
    num_blocks = tl.cdiv(last - first + 1 + 2 * LAYOUT.margin, TILE.block_m)
    lowest = last + LAYOUT.margin + 1 - num_blocks * TILE.block_m
    block, table_head, split, num_splits = table_share(lowest, TILE.block_m, num_blocks, common, num_heads, PER_HEAD)
    highest = lowest + (block + 1) * TILE.block_m - 1  # relative position of the first row; they fall
    tile_m = tl.arange(0, TILE.block_m)
    tile_n = tl.arange(0, TILE.block_n)
    acc = tl.full([TILE.block_m, SHAPE.block_d], 0.0, tl.float32)  # the sums of rows [M, D]
    # The heads (bh: sequence * heads + head) and the keys that the workspace has; of these the heads that use this table
    first_bh, stop_bh, first_key, stop_key = stored_part(first_program, stop_program, common.sequences, LAYOUT, SHAPE.group)
    window = common.window
    if TILE.coverage != "full":
        window = window_in_table(window, first, last)

    bh_start, bh_step = table_bh_range(table_head, first_bh, num_heads, PER_HEAD)
    for bh in tl.range(bh_start, stop_bh, bh_step):
        place = locate(common.sequences, common.window, bh // num_heads)
        matrix = head_matrix(stored, 0, bh - first_bh, 0, False)
        head_keys = head_matrix(inputs.key, place.entry, bh % num_heads // SHAPE.group, place.key_start, SHAPE.wide_index)
        start, stop = keys_at(highest, first_key, stop_key, place, common.window, TILE)
        for key_start in tl.range(start + split * TILE.block_n, stop, num_splits * TILE.block_n):
            offs_n = key_start + tile_n
            valid_n = exists(offs_n, place, common.window) & (offs_n >= first_key) & (offs_n < stop_key)
            # A pair of a row and a key is one query: of the tile from the first of them on where m >= n, else of the next tile.
            # All [M, N]: the query, whether its dS is there, and in which column.
            next_tile = tl.where(tile_m[:, None] < tile_n[None, :], TILE.block_m, 0)
            offs_m = (key_start - place.query_offset - highest) + tile_m[:, None] + next_tile
            is_visible = visible(offs_m, offs_n[None, :], place, common.window) & valid_n[None, :]
            start_m, stop_m = 0, place.num_queries
            if TILE.coverage == "clamp":
                start_m, stop_m = near_queries(offs_n[None, :], first, last, place, LAYOUT)
            is_visible = is_visible & (offs_m >= start_m) & (offs_m < stop_m)
            # Numbers of positions below those of the rows may lie before the workspace's first.
            is_visible = is_visible & (offs_n[None, :] - offs_m >= place.query_offset + first - LAYOUT.margin)
            columns = offs_n[None, :] - first_column_key(offs_m, place.query_offset, first_key, window, LAYOUT)
            # Numbers of hidden pairs may never have been stored.
            d_tile = tl.load(matrix[0] + (offs_m * matrix[1] + columns), mask=is_visible, other=0.0)  # [M, N]
            key = load_rows(head_keys, key_start, tile_n, valid_n, SHAPE.head_dim, SHAPE.block_d)  # [N, D]
            # Column n is rotated by n, so that row m has the pairs of one row of the table.
            # [M, N] @ [N, D] -> [M, D]
            acc = tl.dot(rotate_columns(d_tile, TILE), key, acc, input_precision=TILE.precision)

    # Units, and store: the positions fall from row to row.
    acc *= rel_unit(common.scaling)
    row, valid = highest - first + LAYOUT.margin, highest - tile_m >= first - LAYOUT.margin
    d_rel_p2c = head_matrix(d_rel_p2c, split, table_head, 0, SHAPE.wide_index)
    store_rows(d_rel_p2c, row, -tile_m, valid, acc, SHAPE.head_dim, SHAPE.block_d, ADDS)

"""What the dkv kernel stores of pairs, for other kernels: the gradients of scores, dS, and probabilities, P, rounded to the
inputs' dtype. Without a row of a table for every pair, it stores only tiles with pairs that have one.

A row of the workspace is a query, and its numbers lie in the order of its keys. So those of one relative position lie on a
diagonal, at equal distances: a tile of table rows is read with the workspace's row stride plus one. From query to query it moves
on by one number. So a tile has queries that lie as many apart as 16 bytes have numbers: each of its rows begins at a multiple of
16 bytes.
"""

from typing import NamedTuple

import triton
import triton.language as tl

ALIGNMENT = tl.constexpr(16)
"""The first key of a band is rounded down to a multiple of this, so that its numbers can be stored 16 bytes at a time."""


class Layout(NamedTuple):
    """Constants of a workspace: the tile of the kernel that fills it, and which pairs it has."""

    block_m: int  # of the dkv kernel
    block_n: int
    is_band: bool = False  # a row has only the keys in the query's window, or in window_in_table
    margin: int = 0  # positions stored beyond either end of a clamped table, for rel_p2c


@triton.jit
def stored_part(first_program, stop_program, sequences, LAYOUT: tl.constexpr, GROUP: tl.constexpr):
    """Return (first bh, stop bh, first key, stop key) that these programs of the dkv kernel store, bh = sequence * heads + head:
    all keys of some heads, or some keys of the heads that share one key head."""
    num_blocks = tl.cdiv(sequences.max_seqlen_k, LAYOUT.block_n)
    # Programs are counted block by block of a key head, head by head, sequence by sequence.
    first_bh, stop_bh = first_program // num_blocks * GROUP, tl.cdiv(stop_program, num_blocks) * GROUP
    first_key = first_program % num_blocks * LAYOUT.block_n
    return first_bh, stop_bh, first_key, ((stop_program - 1) % num_blocks + 1) * LAYOUT.block_n


@triton.jit
def table_bh_range(table_head, first_bh, num_heads, PER_HEAD: tl.constexpr):
    """Return (first, step) of the workspace's heads that use a table: all of them, or those of its head."""
    if PER_HEAD:
        return first_bh + (table_head + num_heads - first_bh % num_heads) % num_heads, num_heads
    else:
        return first_bh, 1


@triton.jit
def table_share(first_position, BLOCK_ROWS: tl.constexpr, num_blocks, common, num_heads, PER_HEAD: tl.constexpr):
    """Return (block of rows, table head, split, number of splits) of a program of a table's gradient. Grid: (row blocks * table
    heads * splits,), splits fastest, then heads. first_position: of block 0; from block to block it grows by BLOCK_ROWS.

    Most queries have a key at the middle of all positions, fewer the farther away. Blocks with the longest loops come first.
    """
    sequences, window = common.sequences, common.window
    # The block of the middle position, which the window limits
    middle = (sequences.max_seqlen_k - sequences.max_seqlen_q) // 2
    if sequences.query_offsets is None:
        middle -= sequences.query_offset
    if window[0] is not None:
        middle = tl.maximum(middle, -window[0])
    if window[1] is not None:
        middle = tl.minimum(middle, window[1])
    middle = tl.minimum(tl.maximum(middle - first_position, 0) // BLOCK_ROWS, num_blocks - 1)
    # program_id = (order * tables + table head) * splits + split
    num_tables = num_heads if PER_HEAD else 1
    num_splits = tl.num_programs(0) // (num_blocks * num_tables)
    number = tl.program_id(0) // num_splits
    # Blocks to either side of the middle one in turn, and then those that one side has more
    order = number // num_tables
    reach = tl.minimum(middle, num_blocks - 1 - middle)
    has_two = order <= 2 * reach
    distance = tl.where(has_two, (order + 1) // 2, order - reach)
    is_above = tl.where(has_two, order % 2 == 0, reach == middle)
    block = middle + tl.where(is_above, distance, -distance)
    return block, number % num_tables, tl.program_id(0) % num_splits, num_splits


@triton.jit
def window_in_table(window, first, last):
    """Return the window (left, right) of the pairs that a call's window shows and a table has rows for: without a row for every
    pair, those that are read from the workspace. (With one, kernels use the call's: Triton 3.6 returns no None from here.)"""
    left, right = -first, last
    if window[0] is not None:
        left = tl.minimum(left, window[0])
    if window[1] is not None:
        right = tl.minimum(right, window[1])
    return left, right


@triton.jit
def first_column_key(row_start, query_offset, first_key, window, LAYOUT: tl.constexpr):
    """Return the key of column 0 of the workspace, for a block of queries from row_start on: the first that it has or, with a
    band, in the window (or window_in_table) of the first of block_m queries."""
    if LAYOUT.is_band:
        aligned = ((query_offset - window[0] - LAYOUT.margin) >> 4) * ALIGNMENT  # a product, so that the compiler knows
        return row_start // LAYOUT.block_m * LAYOUT.block_m + aligned
    else:
        return first_key


@triton.jit
def readable_keys(offs_m, place, window, first_key, stop_key, STEP: tl.constexpr):
    """Return (low, high), each [M, 1]: the keys, of those from first_key to stop_key, whose numbers are read. They are those in
    the window (or window_in_table), and others beside them up to multiples of STEP, whose numbers are 0 if the query does not see
    them. A query that does not exist has none."""
    low = tl.broadcast_to(tl.maximum(first_key, 0), offs_m.shape)
    high = tl.broadcast_to(tl.minimum(place.num_keys, stop_key), offs_m.shape)
    if window[0] is not None:
        low = tl.maximum(offs_m + (place.query_offset - window[0]), low)
    if window[1] is not None:
        high = tl.minimum(high, offs_m + (place.query_offset + window[1] + 1))
    high = tl.where((offs_m < place.num_queries) & (low < high), high, 0)
    return (low // STEP * STEP)[:, None], (tl.cdiv(high, STEP) * STEP)[:, None]


@triton.jit
def store_tile(matrix, tile, row_start, tile_m, valid_m, column, TILE: tl.constexpr, LAYOUT: tl.constexpr):
    """Store a tile [M, N], whose columns are in blocks.key_order, in the order of the keys, from this column of the workspace
    on. If the workspace has a band, only what lies in it is stored."""
    M: tl.constexpr = TILE.block_m
    N: tl.constexpr = TILE.block_n
    if TILE.rotation != "gather":
        tile = tl.reshape(tl.permute(tl.reshape(tile, (M, N // 2, 2)), (0, 2, 1)), (M, N))
    # Pointers [M, 1] + [1, N] to the rows of the queries
    columns = tl.multiple_of(column, ALIGNMENT) + tl.arange(0, N)
    pointers = matrix[0] + tl.cast(row_start, tl.int64) * matrix[1] + (tile_m[:, None] * matrix[1] + columns[None, :])
    if LAYOUT.is_band:
        # Limits that the compiler knows to be multiples of 16 leave 16 bytes together.
        in_band = (columns >= 0) & (columns < tl.multiple_of(matrix[1], ALIGNMENT))
        tl.store(pointers, tile, mask=valid_m[:, None] & in_band[None, :])  # [M, N]
    else:
        tl.store(pointers, tile, mask=valid_m[:, None])  # [M, N]


@triton.constexpr_function
def query_step(bits):
    """Return the distance of queries whose numbers, of so many bits, begin at multiples of 16 bytes at one position."""
    return 128 // bits


@triton.constexpr_function
def program_rows(block_n, step):
    """Return how many rows of a table a program of dtable_kernel owns: BLOCK_N less the ``step - 1`` that the next one has."""
    return (block_n - step + 1) // step * step


@triton.jit
def load_tile(matrix, offs_m, keys, column_keys, low, high, BLOCK_N: tl.constexpr):
    """Load the numbers [M, N] of queries at N successive keys each, 16 bytes at a time: those of keys from low to high, both
    multiples of query_step; the others are 0.

    keys, column_keys: the first of the keys, and the key in column 0, both [M] or scalars and multiples of query_step.
    low, high: [M, 1] or scalars.
    """
    STEP: tl.constexpr = query_step(matrix[0].dtype.element_ty.primitive_bitwidth)
    keys = (keys + tl.zeros_like(offs_m)) // STEP * STEP  # changes nothing: so the compiler knows that they are multiples
    starts = tl.multiple_of(offs_m * matrix[1] + (keys - column_keys), STEP)
    # Query m has the keys keys[m] + n: [M, 1] + [1, N]
    tile_keys = keys[:, None] + tl.arange(0, BLOCK_N)[None, :]
    pointers = matrix[0] + (starts[:, None] + tl.arange(0, BLOCK_N)[None, :])
    return tl.load(pointers, mask=(tile_keys >= low) & (tile_keys < high), other=0.0)  # [M, N]

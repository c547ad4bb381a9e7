"""Words: the gradients of scores that the dkv kernel leaves in a workspace, in the inputs' dtype, for other gradients.

The words of one query lie side by side, in the order of its keys. So the words of one relative position lie on a diagonal, at
equal distances: a tile of table rows is read with the workspace's row stride plus one. From query to query it moves on by one
word. So a tile has queries that lie as many apart as 16 bytes have words: each of its rows begins at a multiple of 16 bytes.
"""

import triton
import triton.language as tl

ALIGNMENT = tl.constexpr(16)
"""The first key of a band is rounded down to a multiple of this, so that words can be stored 16 bytes at a time."""


@triton.jit
def items_of(table_head, first_item, num_heads, PER_HEAD: tl.constexpr):
    """Return (first, step) of the workspace's items that use a table: all of them, or those of its head."""
    if PER_HEAD:
        return first_item + (table_head + num_heads - first_item % num_heads) % num_heads, num_heads
    else:
        return first_item, 1


@triton.jit
def key_of_column(row_start, query_offset, first_key, lowest, SKEW: tl.constexpr):
    """Return the key whose words are in column 0 of the workspace, for a block of queries from row_start on.

    SKEW 0: this is first_key, the first key that the workspace has. Else the workspace has a band: queries are taken SKEW at a
    time (the dkv kernel's block_m), and column 0 is the key at the relative position ``lowest`` of the first of them.
    """
    if SKEW == 0:
        return first_key
    else:
        return row_start // SKEW * SKEW + ((query_offset + lowest) & -ALIGNMENT)


@triton.jit
def store_words(matrix, words, row_start, tile_m, valid_m, column, TILE: tl.constexpr, SKEW: tl.constexpr):
    """Store a tile [M, N] of words, whose columns are in tiles.key_order, in the order of the keys, from this column of the
    workspace on. If the workspace has a band (SKEW), only words within it are stored."""
    M: tl.constexpr = TILE.block_m
    N: tl.constexpr = TILE.block_n
    if TILE.rotation != "gather":
        words = tl.reshape(tl.permute(tl.reshape(words, (M, N // 2, 2)), (0, 2, 1)), (M, N))
    columns = tl.multiple_of(column, ALIGNMENT) + tl.arange(0, N)
    pointers = matrix[0] + tl.cast(row_start, tl.int64) * matrix[1] + (tile_m[:, None] * matrix[1] + columns[None, :])
    if SKEW == 0:
        tl.store(pointers, words, mask=valid_m[:, None])
    else:
        within = columns.to(tl.uint32) < tl.cast(matrix[1], tl.uint32)  # negative ones are large
        tl.store(pointers, words, mask=valid_m[:, None] & within[None, :])


@triton.constexpr_function
def queries_apart(bits):
    """Return how far apart queries lie whose words, of so many bits, begin at multiples of 16 bytes at one relative position."""
    return 128 // bits


@triton.constexpr_function
def rows_of_program(block_n, apart):
    """Return how many rows of a table a program of dtable_words_kernel owns: its tile less those that it moves by."""
    return (block_n - apart + 1) // apart * apart


@triton.jit
def load_words(matrix, offs_m, keys, column_keys, low, high, BLOCK_N: tl.constexpr):
    """Load the words [M, N] of queries at N successive keys each, 16 bytes at a time: those of keys from low to high, both
    multiples of queries_apart; the others are 0.

    keys, column_keys: the first of the keys, and the key in column 0, both [M] or scalars and multiples of queries_apart.
    low, high: [M, 1] or scalars.
    """
    APART: tl.constexpr = queries_apart(matrix[0].dtype.element_ty.primitive_bitwidth)
    keys = (keys + tl.zeros_like(offs_m)) // APART * APART  # which they are; so the compiler knows
    starts = tl.multiple_of(offs_m * matrix[1] + (keys - column_keys), APART)
    tile_keys = keys[:, None] + tl.arange(0, BLOCK_N)[None, :]
    pointers = matrix[0] + (starts[:, None] + tl.arange(0, BLOCK_N)[None, :])
    return tl.load(pointers, mask=(tile_keys >= low) & (tile_keys < high), other=0.0)

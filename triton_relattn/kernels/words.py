"""The gradients of scores that the dkv kernel leaves in a workspace, in the inputs' dtype, for the gradient of a table.

A word is one of them. Those of one query lie side by side, in the order of its keys, so that those of one relative position lie
on a diagonal, at equal distances: a tile of table rows is read with one more than the workspace's row stride.
"""

import triton
import triton.language as tl

ALIGNMENT = tl.constexpr(16)
"""Keys that the first column of a band is rounded down to a multiple of, so that words can be stored 16 bytes at a time."""


@triton.jit
def key_of_column(row_start, query_offset, first_key, lowest, SKEW: tl.constexpr):
    """The key whose words are in the workspace's column 0, for a block of queries from row_start on.

    SKEW 0: first_key, the first one that the workspace has. Else it has a band: keys from the relative position ``lowest`` on,
    as seen from the first of the SKEW queries (a multiple of all tiles' queries) that the block is one of.
    """
    if SKEW == 0:
        return first_key
    else:
        return row_start // SKEW * SKEW + ((query_offset + lowest) & -ALIGNMENT)


@triton.jit
def store_words(matrix, words, row_start, tile_m, valid_m, column, TILE: tl.constexpr, SKEW: tl.constexpr):
    """Store a tile [M, N] of words, whose columns are in tiles.key_order, from this column of the workspace on: in the order of
    the keys, and of a band (SKEW) what of the tile lies in it."""
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


@triton.jit
def load_words(matrix, row_start, tile_m, column, within, BLOCK_N: tl.constexpr):
    """[N, M]: the words of N relative positions, from the one on that the first of the queries has in this column. Only those
    within are read; the others are 0.

    Side by side they are, but not aligned: from query to query they move on by a column.
    """
    n = tl.arange(0, BLOCK_N)
    start = matrix[0] + (tl.cast(row_start, tl.int64) * matrix[1] + column)
    return tl.load(start + (tile_m[None, :] * (matrix[1] + 1) + n[:, None]), mask=within, other=0.0)

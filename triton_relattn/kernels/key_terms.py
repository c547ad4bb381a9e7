"""The terms of a table that meets the keys, rel_p2c: a band whose rows are relative positions, rotated along the queries.

Key n and query m of a tile need the row of ``relative_position + n - m``: as seen from a key, the M queries have M successive
positions, falling. So multiply the keys with the rows of M positions, ``own[a, n] = F[relative_position - a] . k_n``, and with
the M before these, ``before[a, n] = F[relative_position + M - a] . k_n``. With ``a = (m - n) mod M``

    term[m, n] = own[a, n] where m >= n, which is where a + n < M, else before[a, n]

so a select and a rotation of each column by n give the tile: two products, and nothing to carry, because the next tile has other
keys. The gradient of the scores goes the same way back. N is at most M. Column n stands for key ``tiles.key_order[n]``, which is
what columns are rotated by, however rows are.
"""

import triton
import triton.language as tl

from .tiles import key_order, load_rows


@triton.jit
def falling_rows(table, relative_position, low, high, TILE: tl.constexpr, SHAPE: tl.constexpr):
    """[M, D]: table rows of M relative positions, falling from the given one; zeros where they are not from low to high."""
    start = relative_position - table.first
    rows = -tl.arange(0, TILE.block_m)
    positions = relative_position + rows
    return load_rows(table.matrix, start, rows, (positions >= low) & (positions <= high), SHAPE.head_dim, SHAPE.block_d)


@triton.jit
def is_own(TILE: tl.constexpr):
    """[M, N]: where the row of a band column belongs to a query of the same tile, not the next."""
    return tl.arange(0, TILE.block_m)[:, None] + key_order(TILE)[None, :] < TILE.block_m


@triton.jit
def rotate_columns(tile, TILE: tl.constexpr, BACK: tl.constexpr = False):
    """Column n by n places: ``rotated[m, n] = tile[(m - n) mod M, n]``. BACK undoes it."""
    M: tl.constexpr = TILE.block_m
    m = tl.arange(0, M)[:, None]
    n = key_order(TILE)[None, :]
    index = (m + n) % M if BACK else (m - n + M) % M
    return tl.gather(tile, tl.broadcast_to(index, (M, TILE.block_n)), axis=0)


@triton.jit
def scaled(terms, table):
    """Products with a table's rows, times its factor."""
    if table.scale is not None:
        terms *= tl.cast(table.scale, tl.float32)
    return terms


@triton.jit
def key_terms(key, table, relative_position, TILE: tl.constexpr, SHAPE: tl.constexpr):
    """[M, N]: the terms of a tile's keys, [N, D]."""
    own = falling_rows(table, relative_position, table.first, table.last, TILE, SHAPE)
    before = falling_rows(table, relative_position + TILE.block_m, table.first, table.last, TILE, SHAPE)
    # [M, D] @ [D, N] -> [M, N], twice
    band = tl.dot(own, tl.trans(key), input_precision=TILE.precision)
    band_before = tl.dot(before, tl.trans(key), input_precision=TILE.precision)
    return scaled(rotate_columns(tl.where(is_own(TILE), band, band_before), TILE), table)


@triton.jit
def add_key_rows(acc, tile, table, relative_position, low, high, TILE: tl.constexpr, SHAPE: tl.constexpr):
    """[N, D]: acc and each element of the tile, [M, N], times its table row; of rows, those from low to high are read."""
    own = falling_rows(table, relative_position, low, high, TILE, SHAPE)
    before = falling_rows(table, relative_position + TILE.block_m, low, high, TILE, SHAPE)
    band = rotate_columns(tile, TILE, BACK=True)
    nothing = tl.zeros_like(band)
    # [N, M] @ [M, D] -> [N, D], twice
    of_own = tl.trans(tl.where(is_own(TILE), band, nothing))
    of_before = tl.trans(tl.where(is_own(TILE), nothing, band))
    if table.scale is None:
        acc = tl.dot(of_own, own, acc, input_precision=TILE.precision)
        return tl.dot(of_before, before, acc, input_precision=TILE.precision)
    else:
        sums = tl.dot(of_own, own, input_precision=TILE.precision)
        sums = tl.dot(of_before, before, sums, input_precision=TILE.precision)
        return acc + scaled(sums, table)


@triton.jit
def reached_by_keys(key_start, place, window, TILE: tl.constexpr):
    """(lowest, highest) relative position of the pairs that a tile of keys and some query are."""
    lowest = tl.maximum(key_start, place.first_key) - (place.num_queries - 1) - place.query_offset
    highest = tl.minimum(key_start + TILE.block_n, place.num_keys) - 1 - place.query_offset
    if window[0] is not None:
        lowest = tl.maximum(lowest, -window[0])
    if window[1] is not None:
        highest = tl.minimum(highest, window[1])
    return lowest, highest

"""The terms of a table that meets the keys, rel_p2c: the band of rel_key (band.py), with queries and keys exchanged.

As seen from a key, the queries of a tile have successive relative positions, as seen from a query the keys have; only these rise
where those fall. So with the table upside down, a tile's keys take the place of its queries: ``term[n, m] = k_n . F'[m - n]``.
What is called mirrored here has that form, [N, N] for each N of the tile's M queries, with the constants TILE.keys. Keys are in
their natural order there, whatever their order in the tile is.
"""

import triton
import triton.language as tl

from .band import add_terms, next_terms, whole_tile
from .masking import exists
from .tiles import key_order, load_rows


@triton.jit
def mirrored(matrix, first, last):
    """Return a table's matrix upside down: its rows, of first to last, are then those of -last to -first."""
    pointer, row_stride, column_stride = matrix
    return pointer + tl.cast(last - first, tl.int64) * row_stride, -row_stride, column_stride


@triton.jit
def natural_keys(key, keys, key_start, place, window, TILE: tl.constexpr, SHAPE: tl.constexpr):
    """Return a tile's keys [N, D] in their natural order: those given, if they are in it, or else loaded once more."""
    if TILE.rotation == "gather":
        return key
    else:
        rows = tl.arange(0, TILE.block_n)
        return load_rows(keys, key_start, rows, exists(key_start + rows, place, window), SHAPE.head_dim, SHAPE.block_d)


@triton.jit
def turned(tile, TILE: tl.constexpr):
    """Return a mirrored tile [N, N] as one [N, N] of queries and keys, in the tile's order of keys."""
    N: tl.constexpr = TILE.block_n
    tile = tl.trans(tile)
    if TILE.keys.rotation != "gather":  # its queries are in tiles.key_order
        tile = tl.reshape(tl.permute(tl.reshape(tile, (N // 2, 2, N)), (1, 0, 2)), (N, N))
    if TILE.rotation != "gather":
        tile = tl.reshape(tl.permute(tl.reshape(tile, (N, 2, N // 2)), (0, 2, 1)), (N, N))
    return tile


@triton.jit
def in_natural_order(tile, TILE: tl.constexpr):
    """Return a tile [M, N] with its keys in their natural order."""
    if TILE.rotation == "gather":
        return tile
    else:
        columns = tl.permute(tl.reshape(tile, (TILE.block_m, TILE.block_n // 2, 2)), (0, 2, 1))
        return tl.reshape(columns, (TILE.block_m, TILE.block_n))


@triton.jit
def turned_back(tile, TILE: tl.constexpr):
    """Return a tile [N, N] of queries and keys, these in their natural order, as a mirrored one."""
    N: tl.constexpr = TILE.block_n
    if TILE.keys.rotation != "gather":
        tile = tl.reshape(tl.permute(tl.reshape(tile, (2, N // 2, N)), (1, 0, 2)), (N, N))
    return tl.trans(tile)


@triton.jit
def whole(halves, TILE: tl.constexpr):
    """Return a tile [M, N] of one or two [N, N], the queries of the first before those of the second."""
    if len(halves) == 1:
        return halves[0]
    else:
        return tl.reshape(tl.permute(tl.join(halves[0], halves[1]), (2, 0, 1)), (TILE.block_m, TILE.block_n))


@triton.jit
def key_terms(key, table, relative_position, TILE: tl.constexpr):
    """Compute the terms [M, N] of a tile's keys in their natural order, [N, D], without carried state; table: a mirrored one."""
    KEY_TILE: tl.constexpr = TILE.keys
    DTYPE: tl.constexpr = tl.float16 if TILE.round_terms else tl.float32
    halves = ()
    for half in tl.static_range(TILE.block_m // TILE.block_n):
        terms = whole_tile(key, table, half * TILE.block_n - relative_position, KEY_TILE)
        halves = halves + (turned(terms.to(DTYPE), TILE),)  # noqa: RUF005 - Triton's compiler has no starred elements in tuples
    return whole(halves, TILE).to(tl.float32)


@triton.jit
def next_key_terms(key, table, carried, relative_position, TILE: tl.constexpr):
    """Return the same of the next tile of a walk along the queries, and the state to carry on."""
    KEY_TILE: tl.constexpr = TILE.keys
    DTYPE: tl.constexpr = tl.float16 if TILE.round_terms else tl.float32
    halves = ()
    for half in tl.static_range(TILE.block_m // TILE.block_n):
        terms, carried = next_terms(key, table, carried, half * TILE.block_n - relative_position, KEY_TILE)
        halves = halves + (turned(terms.to(DTYPE), TILE),)  # noqa: RUF005
    return whole(halves, TILE).to(tl.float32), carried


@triton.jit
def add_key_rows(acc, tile, waiting, table, relative_position, TILE: tl.constexpr):
    """Add the elements of the next tile of a walk along the queries, each times its row of a mirrored table, to acc [N, D];
    return it and the elements that wait. Keys are in their natural order. After the last tile the caller adds zeros."""
    KEY_TILE: tl.constexpr = TILE.keys
    if TILE.block_m == TILE.block_n:
        acc, waiting = add_terms(acc, turned_back(tile, TILE).to(tl.float32), waiting, table, -relative_position, KEY_TILE)
    else:
        first, second = tl.split(tl.permute(tl.reshape(tile, (2, TILE.block_n, TILE.block_n)), (1, 2, 0)))
        acc, waiting = add_terms(acc, turned_back(first, TILE).to(tl.float32), waiting, table, -relative_position, KEY_TILE)
        behind = TILE.block_n - relative_position
        acc, waiting = add_terms(acc, turned_back(second, TILE).to(tl.float32), waiting, table, behind, KEY_TILE)
    return acc, waiting


@triton.jit
def reached_by_keys(key_start, place, window, TILE: tl.constexpr):
    """Return the (lowest, highest) relative position, as seen from them, of the queries that a tile of keys has pairs with."""
    lowest = tl.maximum(key_start, place.first_key) - (place.num_queries - 1) - place.query_offset
    highest = tl.minimum(key_start + TILE.block_n, place.num_keys) - 1 - place.query_offset
    if window[0] is not None:
        lowest = tl.maximum(lowest, -window[0])
    if window[1] is not None:
        highest = tl.minimum(highest, window[1])
    return -highest, -lowest


# The kernels of the table's gradient own rows of it, which fall along the queries, and walk the keys.


@triton.jit
def keys_at(highest, first_key, stop_key, place, window, TILE: tl.constexpr):
    """Return (start, stop) of the keys, of those from first_key to stop_key, that some query has at one of M distances, the
    farthest of which is highest; start is rounded down to a tile."""
    start = tl.maximum(highest + place.query_offset - (TILE.block_m - 1), tl.maximum(first_key, place.first_key))
    stop = tl.minimum(tl.minimum(place.num_keys, stop_key), place.num_queries + place.query_offset + highest)
    if window[1] is not None:
        stop = tl.where(highest - (TILE.block_m - 1) > window[1], 0, stop)
    if window[0] is not None:
        stop = tl.where(highest < -window[0], 0, stop)
    return start // TILE.block_n * TILE.block_n, stop


@triton.jit
def rotate_columns(tile, TILE: tl.constexpr):
    """Rotate column n by n places back: ``rotated[m, n] = tile[(m + n) mod M, n]``; n is the place of its key."""
    M: tl.constexpr = TILE.block_m
    index = (tl.arange(0, M)[:, None] + key_order(TILE)[None, :]) % M
    return tl.gather(tile, tl.broadcast_to(index, (M, TILE.block_n)), axis=0)

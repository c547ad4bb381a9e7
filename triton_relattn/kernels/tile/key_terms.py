"""The terms of a table that meets the keys, rel_p2c: the band of rel_key (band.py), with queries and keys exchanged.

As seen from a key, the queries of a tile have successive relative positions, as seen from a query the keys have; only these rise
where those fall. So with the table upside down, a tile's keys take the place of its queries: ``term[n, m] = k_n . F'[m - n]``.
What is called mirrored here has that form, [N, N] for each N of the tile's M queries, with the constants TILE.key_tile. Keys are
in their natural order there, whatever their order in the tile is.
"""

import triton
import triton.language as tl

from .band import add_end_rows, add_tile, next_terms
from .blocks import exists, load_rows, side_vector


@triton.jit
def natural_keys(keys, key_start, place, window, TILE: tl.constexpr, SHAPE: tl.constexpr):
    """Load a tile's keys [N, D] in their natural order."""
    rows = tl.arange(0, TILE.block_n)
    return load_rows(keys, key_start, rows, exists(key_start + rows, place, window), SHAPE.head_dim, SHAPE.block_d)


@triton.jit
def turned(tile, TILE: tl.constexpr):
    """Return a mirrored tile [N, N] as one [N, N] of queries and keys, in the tile's order of keys."""
    N: tl.constexpr = TILE.block_n
    tile = tl.trans(tile)  # keys by queries -> queries by keys
    if TILE.key_tile.rotation != "gather":  # its queries are in blocks.key_order
        tile = tl.reshape(tl.permute(tl.reshape(tile, (N // 2, 2, N)), (1, 0, 2)), (N, N))
    if TILE.rotation != "gather":  # and so will the tile's keys be
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
    if TILE.key_tile.rotation != "gather":  # queries to blocks.key_order
        tile = tl.reshape(tl.permute(tl.reshape(tile, (2, N // 2, N)), (1, 0, 2)), (N, N))
    return tl.trans(tile)


@triton.jit
def next_key_terms(key, table, carried, relative_position, TILE: tl.constexpr):
    """Return the terms [M, N] of the next tile, with keys [N, D] in their natural order and a mirrored table, and the state,
    which only a loop over the queries carries on."""
    KEY_TILE: tl.constexpr = TILE.key_tile
    DTYPE: tl.constexpr = tl.float16 if KEY_TILE.round_terms else tl.float32
    # For each N queries a mirrored tile [N, N], of keys by queries. The first query is at minus the tile's position.
    halves = ()
    for half in tl.static_range(TILE.block_m // TILE.block_n):
        terms, carried = next_terms(key, table, carried, half * TILE.block_n - relative_position, KEY_TILE)
        halves = halves + (turned(terms.to(DTYPE), TILE),)  # noqa: RUF005 - Triton's compiler has no starred elements in tuples
    terms = halves[0]
    if len(halves) == 2:  # [N, N], [N, N] -> [2, N, N] -> [M, N]: the queries of the first before those of the second
        terms = tl.reshape(tl.permute(tl.join(halves[0], halves[1]), (2, 0, 1)), (TILE.block_m, TILE.block_n))
    return terms.to(tl.float32), carried


@triton.jit
def add_key_rows(d_key, tile, table, relative_position, scaling, TILE: tl.constexpr):
    """Add the elements of a tile [M, N], each times its row of a mirrored table and rel_scale, to d_key [N, D]. Keys are in their
    natural order."""
    KEY_TILE: tl.constexpr = TILE.key_tile
    acc = d_key
    if scaling.rel_scale is not None:  # a sum of its own in float32, since float16 may not hold rel_scale * dS
        acc = tl.zeros_like(d_key)
    if TILE.block_m == TILE.block_n:
        acc = add_tile(acc, turned_back(tile, TILE).to(tl.float32), table, -relative_position, KEY_TILE)
    else:
        # [M, N] -> [N, N], [N, N]: the first and the second half of the queries
        first, second = tl.split(tl.permute(tl.reshape(tile, (2, TILE.block_n, TILE.block_n)), (1, 2, 0)))
        acc = add_tile(acc, turned_back(first, TILE).to(tl.float32), table, -relative_position, KEY_TILE)
        acc = add_tile(acc, turned_back(second, TILE).to(tl.float32), table, TILE.block_n - relative_position, KEY_TILE)
    if scaling.rel_scale is not None:
        acc = d_key + acc * tl.cast(scaling.rel_scale, tl.float32)
    return acc


@triton.jit
def reached_by_keys(key_start, place, window, TILE: tl.constexpr):
    """Return the (lowest, highest) position, as a tile's keys see it, of queries that they have pairs with; crossed if none."""
    # r = j - i - query_offset: the first key to the last query, and the last key to the first query; negated as keys see it
    first_key, last_key = tl.maximum(key_start, place.first_key), tl.minimum(key_start + TILE.block_n, place.num_keys) - 1
    lowest = first_key - (place.num_queries - 1) - place.query_offset
    highest = tl.where(first_key <= last_key, last_key - place.query_offset, lowest - 1)
    if window[0] is not None:
        lowest = tl.maximum(lowest, -window[0])
    if window[1] is not None:
        highest = tl.minimum(highest, window[1])
    return -highest, -lowest


# Beyond a clamped table the term is one number per key.


@triton.jit
def far_key_terms(far_keys, place, head, is_past, offs_n, valid_n):
    """Load the terms [N] that a tile's keys have with queries beyond the table: as keys of the past, or of the future."""
    pointers = side_vector(far_keys, place.entry, head, tl.where(is_past, 0, 1), place.key_start) + offs_n
    return tl.load(pointers, mask=valid_n, other=0.0)  # [N]


@triton.jit
def add_far_queries(sums, d_scores, is_past, TILE: tl.constexpr):
    """Add dS of a tile's far queries to sums [N, 16], column 0 for keys of the past, 1 for those of the future: a product, since
    a sum along the queries would go across warps."""
    side = tl.where(is_past, 0, 1)
    columns = tl.broadcast_to(tl.where(tl.arange(0, 16) == side, 1.0, 0.0)[None, :], (TILE.block_m, 16))
    # [N, M] @ [M, 16] -> [N, 16]
    return tl.dot(tl.trans(d_scores), columns.to(d_scores.dtype), sums, input_precision=TILE.precision)


@triton.jit
def far_query_sums(sums):
    """Return the sums of add_far_queries as two [N], those of keys of the past and those of keys of the future."""
    column = tl.arange(0, 16)[None, :]
    # [N, 16] -> [N], [N]
    return tl.sum(tl.where(column == 0, sums, 0.0), axis=1), tl.sum(tl.where(column == 1, sums, 0.0), axis=1)


@triton.jit
def add_key_end_rows(d_key, past, future, table, lowest, highest, TILE: tl.constexpr):
    """Return d_key [N, D] with the part of far queries; table is a mirrored one, lowest and highest of reached_by_keys."""
    KEY_TILE: tl.constexpr = TILE.key_tile
    if KEY_TILE.has_scale:
        past *= tl.cast(table.scale, tl.float32)
        future *= tl.cast(table.scale, tl.float32)
    # Upside down, the first row is that of keys in the future.
    return add_end_rows(d_key, future, past, table, lowest, highest, KEY_TILE)

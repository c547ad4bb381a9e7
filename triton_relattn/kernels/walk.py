"""The walk of a program along keys or queries, in two parts: near the diagonal, where the table has rows, and far from it."""

import triton
import triton.language as tl

from .masking import first_key, first_query, last_key, last_query

# The two parts of a walk along keys or queries. Without a table there is only the far part; with a table that covers every pair,
# only the near part.
FAR = tl.constexpr(0)
NEAR = tl.constexpr(1)


@triton.constexpr_function
def first_part(tile):
    """Return the first part of a walk, FAR or NEAR."""
    return 1 if tile.coverage == "full" else 0


@triton.constexpr_function
def stop_part(tile):
    """Return one past the last part of a walk."""
    return 1 if tile.coverage == "no table" else 2


@triton.jit
def near_keys(row_start, first, last, query_offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr):
    """Return (start, stop), multiples of BLOCK_N, of the near keys: in their tiles, the term differs from key to key.

    Tiles before start have only r <= first (clamp) or r < first (zero); tiles from stop on only r >= last or r > last. There
    the term is one number per query, or nothing.
    """
    SLACK: tl.constexpr = 0 if TILE.coverage == "clamp" else 1
    last_past = first + row_start + query_offset - (BLOCK_N - 1) - SLACK
    first_future = last + row_start + (BLOCK_M - 1) + query_offset + SLACK
    start = tl.maximum(last_past + BLOCK_N, 0) // BLOCK_N * BLOCK_N
    stop = (tl.maximum(first_future, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return start, stop


@triton.constexpr_function
def clamp_margin(block_m, block_n):
    """Return a bound on how many relative positions beyond the table near tiles can reach."""
    return block_m + block_n


@triton.jit
def key_range(row_start, last_query, first, last, place, window, TILE: tl.constexpr):
    """Return (first, stop, near start, near stop) of the keys that queries from row_start to last_query see."""
    key_first = first_key(row_start, place, window, TILE.block_n)
    key_stop = last_key(last_query, place, window)
    near_start = key_first
    near_stop = key_first if TILE.coverage == "no table" else key_stop
    if TILE.coverage == "clamp" or TILE.coverage == "zero":
        near_start, near_stop = near_keys(row_start, first, last, place.query_offset, TILE.block_m, TILE.block_n, TILE)
        near_start, near_stop = tl.maximum(near_start, key_first), tl.maximum(near_stop, key_first)
    return key_first, key_stop, near_start, near_stop


@triton.jit
def query_range(key_start, first, last, place, window, TILE: tl.constexpr):
    """Return (first, stop, near start, near stop) of the queries that see a tile's keys, as key_range does of keys."""
    row_first = first_query(key_start, place, window, TILE.block_m)
    row_stop = tl.where(key_start < place.num_keys, last_query(key_start + TILE.block_n - 1, place, window), 0)
    near_start = row_first
    near_stop = row_first if TILE.coverage == "no table" else row_stop
    if TILE.coverage == "clamp" or TILE.coverage == "zero":
        # As seen from the keys: i - j has the sign and the limits turned round.
        near_start, near_stop = near_keys(key_start, -last, -first, -place.query_offset, TILE.block_n, TILE.block_m, TILE)
        near_start, near_stop = tl.maximum(near_start, row_first), tl.maximum(near_stop, row_first)
    return row_first, row_stop, near_start, near_stop


@triton.jit
def part_range(PART: tl.constexpr, start, stop, near_start, near_stop):
    """Return (start, stop) of one part of a walk. The far part joins the keys before and behind the near part into one range."""
    if PART == FAR:
        return start, tl.minimum(near_start, stop) + tl.maximum(stop - near_stop, 0)
    else:
        return near_start, tl.minimum(near_stop, stop)


@triton.jit
def walk_position(PART: tl.constexpr, position, near_start, near_stop, TILE: tl.constexpr):
    """Return the key (or query) at a position of the walk: the far part skips the near one."""
    if PART == FAR and TILE.coverage != "no table":
        return tl.where(position < near_start, position, position + near_stop - near_start)
    else:
        return position

"""The rotating band: the relative term of a tile from one matrix product and one rotation. DERIVATION.md explains it.

A table block holds the products of the tile's queries with the BLOCK_N table rows that start at the tile's own relative
position: ``block[m, c] = q_m . E[row(j0 - i0 - query_offset + c)]``. Cut into halves of W = BLOCK_N // 2 columns, numbered on
from tile to tile, with query m = W * group + m', the term of query m and key W * b + n' of the tile is

    half[b - group - wraps][m, c]   with   c = (n' - m') mod W,   wraps = (c + m' >= W)

so three steps give it: delay the halves by the row's group, step back one more where it wraps, rotate each row by m'. Each
step carries what it needs of the tile before; no block is multiplied or rotated twice.

OUTSIDE says what lies beyond the table: "clamp" (its end row), "zero" (no term), "none" (nothing does: it covers every pair);
None: there is no table.
"""

import triton
import triton.language as tl

from .tiles import key_order, load_rows

# A walk along keys or queries has three parts. Without a table it has only the last; with one that covers every pair, only NEAR.
PAST = tl.constexpr(0)
NEAR = tl.constexpr(1)
FUTURE = tl.constexpr(2)


@triton.jit
def table_rows(
    table,
    relative_position,
    first,
    last,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OUTSIDE: tl.constexpr,
):
    """[N, D]: table rows of BLOCK_N relative positions, the given one first; outside first and last the end row or zeros."""
    start = relative_position - first
    rows = key_order(BLOCK_N)
    if OUTSIDE == "clamp":
        rows = tl.minimum(tl.maximum(start + rows, 0), last - first)
        start = 0
        exists = tl.full([BLOCK_N], 1, tl.int1)
    else:
        exists = (start + rows).to(tl.uint32) <= tl.cast(last - first, tl.uint32)  # negative rows are large
    return load_rows(table, start, rows, exists, WIDTH, BLOCK_WIDTH)


@triton.jit
def table_block(
    query,
    table,
    relative_position,
    first,
    last,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OUTSIDE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Products of the queries with the table rows of BLOCK_N relative positions, the given one first."""
    rows = table_rows(table, relative_position, first, last, WIDTH, BLOCK_WIDTH, BLOCK_N, OUTSIDE)
    # [M, D] @ [D, N] -> [M, N]
    return tl.dot(query, tl.trans(rows), input_precision=INPUT_PRECISION)


@triton.jit
def far_scores(query, table, first, last, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, INPUT_PRECISION: tl.constexpr):
    """Two [M]: products of the queries with the first and the last table row, which clamping uses for all keys beyond."""
    column = tl.arange(0, 16)  # the narrowest product that matrix units take; two of its columns are used
    rows = tl.where(column == 0, 0, last - first)
    ends = load_rows(table, 0, rows, rows >= 0, WIDTH, BLOCK_WIDTH)
    # [M, D] @ [D, 16] -> [M, 16]
    scores = tl.dot(query, tl.trans(ends), input_precision=INPUT_PRECISION)
    past = tl.sum(tl.where((column == 0)[None, :], scores, 0.0), axis=1)
    future = tl.sum(tl.where((column == 1)[None, :], scores, 0.0), axis=1)
    return past, future


@triton.jit
def reached(table, first, last, lowest, highest):
    """The part of a table, as (matrix, first, last), whose rows stand for relative positions from lowest to highest.

    A gradient times a table row that no pair has would be 0, or NaN if the row is.
    """
    new_first = tl.maximum(first, lowest)
    new_last = tl.minimum(last, highest)
    start = table[0] + tl.cast(new_first - first, tl.int64) * table[1]
    # Of an empty part no row is loaded: its first lies beyond all positions.
    is_empty = new_last < new_first
    new_first = tl.where(is_empty, 2**30, new_first)
    new_last = tl.where(is_empty, 2**30, new_last)
    return (start, table[1], table[2]), new_first, new_last


@triton.jit
def end_row(table, row, is_reached, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """[D] float32: one table row, zeros if it is not reached."""
    columns = tl.arange(0, BLOCK_WIDTH)
    pointers = table[0] + tl.cast(row, tl.int64) * table[1] + columns * table[2]
    return tl.load(pointers, mask=(columns < WIDTH) & is_reached, other=0.0).to(tl.float32)


@triton.jit
def split_halves(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[M, N] -> two [M, W]: the lower and the higher columns."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def join_halves(low, high, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Two [M, W] -> [M, N], the inverse of split_halves."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (BLOCK_M, BLOCK_N))


@triton.jit
def step_back(low, high, before, where):
    """The halves, each replaced by its predecessor where the mask says so; before is the last half of the tile before."""
    return tl.where(where, before, low), tl.where(where, low, high)


@triton.jit
def rotate(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BACK: tl.constexpr = False):
    """[M, N] -> [M, N]: within each half, move row m by m places: ``rotated[m, n] = half[m, (n - m) mod W]``. BACK undoes it."""
    W: tl.constexpr = BLOCK_N // 2
    m = tl.arange(0, BLOCK_M)[:, None, None]
    n = tl.arange(0, W)[None, None, :]
    index = (n + m) % W if BACK else (n - m + BLOCK_M) % W
    halves = tl.reshape(tile, (BLOCK_M, 2, W))
    return tl.reshape(tl.gather(halves, tl.broadcast_to(index, (BLOCK_M, 2, W)), axis=2), (BLOCK_M, BLOCK_N))


@triton.jit
def empty_band(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, dtype: tl.constexpr = tl.float32):
    """What delayed carries, before the first tile."""
    half = tl.zeros([BLOCK_M, BLOCK_N // 2], dtype)
    if BLOCK_M == BLOCK_N:
        return half, half
    else:
        return half, half, half, half


@triton.jit
def delayed(tile, carried, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BACK: tl.constexpr, ROTATED: tl.constexpr):
    """[M, N] -> [M, N], and what to carry to the next tile: each element as it was ``group + wraps`` halves ago.

    BACK: as it was ``BLOCK_M / W - group - wraps`` halves ago, so that after one and the other all are equally late, by
    BLOCK_M // BLOCK_N tiles. ROTATED: the columns are those of the tile, not of the band.
    All that is carried is made in this turn: a value passed on unchanged would turn off Triton's loop pipelining.
    """
    W: tl.constexpr = BLOCK_N // 2
    m = tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, W)[None, :]
    group = m // W
    by_half = group % 2 == (0 if BACK else 1)
    if BACK:
        wraps = m % W <= n if ROTATED else m % W + n < W
        by_tile = group < 2
    else:
        wraps = m % W > n if ROTATED else m % W + n >= W
        by_tile = group >= 2

    low, high = split_halves(tile, BLOCK_M, BLOCK_N)
    if BLOCK_M == BLOCK_N:
        due_low, due_high = low, high
    else:  # two of the four groups are one whole tile behind
        due_low, due_high = tl.where(by_tile, carried[2], low), tl.where(by_tile, carried[3], high)
    late_low, late_high = step_back(due_low, due_high, carried[0], by_half)
    latest_low, latest_high = step_back(late_low, late_high, carried[1], wraps)
    result = join_halves(latest_low, latest_high, BLOCK_M, BLOCK_N)
    if BLOCK_M == BLOCK_N:
        return result, (due_high, late_high)
    else:
        return result, (due_high, late_high, low, high)


@triton.jit
def next_tile(block, carried, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Relative scores [M, N] of the tile whose table block is given, and what to carry to the next.

    The scores are right once the BLOCK_M // BLOCK_N blocks before have gone through. BLOCK_M is BLOCK_N or twice that.
    """
    band, carried = delayed(block, carried, BLOCK_M, BLOCK_N, BACK=False, ROTATED=False)
    return rotate(band, BLOCK_M, BLOCK_N), carried


@triton.jit
def previous_block(d_scores, carried, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The way back: gradient [M, N] of the table block BLOCK_M // BLOCK_N tiles ago, complete with this tile's."""
    return delayed(rotate(d_scores, BLOCK_M, BLOCK_N, BACK=True), carried, BLOCK_M, BLOCK_N, BACK=True, ROTATED=False)


@triton.jit
def from_tiles(tile, carried, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The elements of one table block, gathered from the BLOCK_M // BLOCK_N + 1 tiles they lie in: complete with the last.

    They keep their tile's columns, so that rotating back puts them in the block's; band_column says where that is.
    """
    return delayed(tile, carried, BLOCK_M, BLOCK_N, BACK=True, ROTATED=True)


@triton.jit
def band_column(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[M, N]: column of the table block that an element has after rotating back; its key is that many after the first."""
    W: tl.constexpr = BLOCK_N // 2
    m = tl.arange(0, BLOCK_M)[:, None]
    n = key_order(BLOCK_N)[None, :]
    return n // W * W + (n - m + BLOCK_M) % W


@triton.jit
def near_keys(row_start, first, last, query_offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OUTSIDE: tl.constexpr):
    """(start, stop), multiples of BLOCK_N: the key tiles in which the term is not one number (or nothing) per query.

    Tiles before start have only r <= first (clamp) or r < first (zero); tiles from stop on only r >= last or r > last.
    """
    SLACK: tl.constexpr = 0 if OUTSIDE == "clamp" else 1
    last_past = first + row_start + query_offset - (BLOCK_N - 1) - SLACK
    first_future = last + row_start + (BLOCK_M - 1) + query_offset + SLACK
    start = tl.maximum(last_past + BLOCK_N, 0) // BLOCK_N * BLOCK_N
    stop = (tl.maximum(first_future, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return start, stop

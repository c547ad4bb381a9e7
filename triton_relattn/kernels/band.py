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
    start = relative_position - first
    rows = key_order(BLOCK_N)
    if OUTSIDE == "clamp":
        rows = tl.minimum(tl.maximum(start + rows, 0), last - first)
        start = 0
        exists = tl.full([BLOCK_N], 1, tl.int1)
    else:
        exists = (start + rows).to(tl.uint32) <= tl.cast(last - first, tl.uint32)  # negative rows are large
    # [M, D] @ [D, N] -> [M, N]
    return tl.dot(query, tl.trans(load_rows(table, start, rows, exists, WIDTH, BLOCK_WIDTH)), input_precision=INPUT_PRECISION)


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
def rotate(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[M, N] -> [M, N]: within each half, move row m by m places: ``rotated[m, n] = half[m, (n - m) mod W]``."""
    W: tl.constexpr = BLOCK_N // 2
    m = tl.arange(0, BLOCK_M)[:, None, None]
    n = tl.arange(0, W)[None, None, :]
    index = tl.broadcast_to((n - m + BLOCK_M) % W, (BLOCK_M, 2, W))
    return tl.reshape(tl.gather(tl.reshape(tile, (BLOCK_M, 2, W)), index, axis=2), (BLOCK_M, BLOCK_N))


@triton.jit
def empty_band(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """What next_tile carries, before the first tile."""
    half = tl.zeros([BLOCK_M, BLOCK_N // 2], tl.float32)
    if BLOCK_M == BLOCK_N:
        return half, half
    else:
        return half, half, half, half


@triton.jit
def next_tile(block, carried, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Relative scores [M, N] of the tile whose table block is given, and what to carry to the next.

    The scores are right once the BLOCK_M // BLOCK_N blocks before have gone through. BLOCK_M is BLOCK_N or twice that.
    All that is carried is made in this turn: a value passed on unchanged would turn off Triton's loop pipelining.
    """
    W: tl.constexpr = BLOCK_N // 2
    m = tl.arange(0, BLOCK_M)[:, None]
    group = m // W
    wraps = m % W + tl.arange(0, W)[None, :] >= W

    low, high = split_halves(block, BLOCK_M, BLOCK_N)
    if BLOCK_M == BLOCK_N:
        due_low, due_high = low, high
    else:  # groups 2 and 3 are one whole tile behind
        due_low = tl.where(group >= 2, carried[2], low)
        due_high = tl.where(group >= 2, carried[3], high)
    delayed_low, delayed_high = step_back(due_low, due_high, carried[0], group % 2 == 1)
    band_low, band_high = step_back(delayed_low, delayed_high, carried[1], wraps)
    scores = rotate(join_halves(band_low, band_high, BLOCK_M, BLOCK_N), BLOCK_M, BLOCK_N)
    if BLOCK_M == BLOCK_N:
        return scores, (due_high, delayed_high)
    else:
        return scores, (due_high, delayed_high, low, high)


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

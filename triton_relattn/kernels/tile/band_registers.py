"""The band of band.py where rows are rotated in registers, for the layout of NVIDIA's matrix units (registers.py).

The steps are those of band.py, where they are explained. A tile is cut into parts, which are rotated and delayed: its two chunks
[M, W] in float32, or words that hold a 16-bit element of each.
"""

import triton
import triton.language as tl

from .registers import pack, rotate_rows, step_back_words, unpack
from .table import table_block, table_rows


@triton.constexpr_function
def term_dtype(tile):
    """Return the dtype in which terms are rotated and carried."""
    return tl.float16 if tile.round_terms else tl.float32


@triton.jit
def cut(tile, TILE: tl.constexpr, DTYPE: tl.constexpr, SATURATE: tl.constexpr = False):
    """Return the parts of a tile [M, N]: two chunks or, if DTYPE has 16 bits, words. SATURATE: limit numbers to the range of
    float16."""
    low, high = tl.split(tl.reshape(tile, (TILE.block_m, TILE.block_n // 2, 2)))
    if DTYPE == tl.float32:
        return low, high
    else:
        return (pack(low, high, DTYPE, SATURATE),)


@triton.jit
def cut_terms(block, TILE: tl.constexpr):
    """Return the parts of a block of terms, rounded as all kernels of a call round them."""
    return cut(block, TILE, term_dtype(TILE), True)


@triton.jit
def glued(parts, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Put a tile [M, N] together from its parts: the inverse of cut with the same DTYPE."""
    if len(parts) == 1:
        low, high = unpack(parts[0], DTYPE)
    else:
        low, high = parts
    return tl.reshape(tl.join(low, high), (TILE.block_m, TILE.block_n))


@triton.jit
def rotate(parts, TILE: tl.constexpr, BACK: tl.constexpr = False):
    """Rotate the rows of each part, as band.rotate does."""
    W: tl.constexpr = TILE.block_n // 2
    if len(parts) == 1:
        return (rotate_rows(parts[0], TILE.block_m, W, TILE.warps, BACK),)
    else:
        low = rotate_rows(parts[0], TILE.block_m, W, TILE.warps, BACK)
        return low, rotate_rows(parts[1], TILE.block_m, W, TILE.warps, BACK)


@triton.jit
def delayed(parts, carried, TILE: tl.constexpr, BACK: tl.constexpr, ROTATED: tl.constexpr):
    """Return the parts of the tile that band.delayed returns, and the state to carry on."""
    M: tl.constexpr = TILE.block_m
    W: tl.constexpr = TILE.block_n // 2
    GROUPS: tl.constexpr = M // W
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, W)[None, :]
    group = GROUPS - 1 - m // W if BACK else m // W
    if ROTATED:
        wraps = m % W - n % 4 > n // 4 * 4  # a lane has every fourth column: one number for a row, compared with constants
    else:
        wraps = m % W + n >= W
    if BACK:
        wraps = wraps == 0
    is_odd = group % 2 == 1

    if len(parts) == 1:
        due = parts[0]
        if GROUPS == 4:
            due = tl.where(group >= 2, carried[1], due)
        latest = (step_back_words(due, carried[0], is_odd | wraps, is_odd & wraps),)
        return latest, ((due, parts[0]) if GROUPS == 4 else (due,))
    else:
        low, high = parts
        due_low, due_high = low, high
        if GROUPS == 4:
            due_low, due_high = tl.where(group >= 2, carried[2], low), tl.where(group >= 2, carried[3], high)
        late_low, late_high = tl.where(is_odd, carried[0], due_low), tl.where(is_odd, due_low, due_high)
        latest = tl.where(wraps, carried[1], late_low), tl.where(wraps, late_low, late_high)
        if GROUPS == 4:
            return latest, (due_high, late_high, low, high)
        else:
            return latest, (due_high, late_high)


@triton.jit
def empty_band(TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Return what delayed carries before the first tile: zeros, for parts that were cut with this DTYPE."""
    if DTYPE == tl.float32:
        chunk = tl.full([TILE.block_m, TILE.block_n // 2], 0.0, DTYPE)
        if TILE.block_m == 2 * TILE.block_n:
            return chunk, chunk, chunk, chunk
        else:
            return chunk, chunk
    else:
        words = tl.full([TILE.block_m, TILE.block_n // 2], 0, tl.uint32)
        if TILE.block_m == 2 * TILE.block_n:
            return words, words
        else:
            return (words,)


@triton.jit
def next_tile(block, carried, TILE: tl.constexpr):
    """As band.next_tile."""
    parts, carried = delayed(rotate(cut_terms(block, TILE), TILE), carried, TILE, BACK=False, ROTATED=True)
    return glued(parts, TILE, term_dtype(TILE)).to(tl.float32), carried


@triton.jit
def whole_tile(query, table, relative_position, TILE: tl.constexpr):
    """As band.whole_tile."""
    carried = empty_band(TILE, term_dtype(TILE))
    for ago in tl.static_range(TILE.block_m // TILE.block_n, -1, -1):
        block = table_block(query, table, relative_position - ago * TILE.block_n, TILE)
        parts, carried = delayed(cut_terms(block, TILE), carried, TILE, BACK=False, ROTATED=False)
    return glued(rotate(parts, TILE), TILE, term_dtype(TILE)).to(tl.float32)


@triton.jit
def blocks_before(query, table, relative_position, TILE: tl.constexpr):
    """As band.blocks_before."""
    carried = empty_band(TILE, term_dtype(TILE))
    for ago in tl.static_range(TILE.block_m // TILE.block_n, 0, -1):
        block = table_block(query, table, relative_position - ago * TILE.block_n, TILE)
        _, carried = next_tile(block, carried, TILE)
    return carried


@triton.jit
def add_tile(acc, tile, table, relative_position, TILE: tl.constexpr):
    """As band.add_tile."""
    DTYPE: tl.constexpr = table.matrix[0].dtype.element_ty
    parts = rotate(cut(tile, TILE, DTYPE), TILE, BACK=True)
    carried = empty_band(TILE, DTYPE)
    for ahead in tl.static_range(TILE.block_m // TILE.block_n + 1):
        block, carried = delayed(parts, carried, TILE, BACK=True, ROTATED=False)
        rows = table_rows(table, relative_position - TILE.block_m + ahead * TILE.block_n, TILE)
        # [M, N] @ [N, D] -> [M, D]
        acc = tl.dot(glued(block, TILE, DTYPE), rows, acc, input_precision=TILE.precision)
        parts = cut(tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32), TILE, DTYPE)
    return acc

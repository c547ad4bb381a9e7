"""The rotating band: the relative term of a tile from one matrix product and one rotation. DERIVATION.md explains it.

A table block holds the products of the tile's M queries with the N table rows that start at the tile's own relative position:
``block[m, c] = q_m . E[row(j0 - i0 - query_offset + c)]``. It is cut into chunks of W columns, which are numbered on from tile to
tile. The term of query m = W * group + m' and key n = W * half + n' of the tile is

    chunk[half - group - wraps][m, (n' - m') mod W]   with   wraps = (n' < m')

Two steps compute it: rotate each row by m' within its chunks, then take each element from ``group + wraps`` chunks ago. The state
that is carried to the next tile is rotated already, so no block is multiplied or rotated twice. The gradient of the scores goes
the same way back.

Here a row is rotated by a gather, which any GPU can do. Where TILE.rotation is "registers", band_registers.py takes its place:
the same steps, without shared memory.
"""

import triton
import triton.language as tl

from . import band_registers
from .table import table_block, table_rows


@triton.constexpr_function
def chunk_width(tile):
    """Return how many columns are rotated together. A gather along more than 32, a warp's lanes, takes a second shuffle."""
    return tile.block_n if tile.block_m == tile.block_n <= 32 else tile.block_n // 2


@triton.jit
def rotate(tile, TILE: tl.constexpr, BACK: tl.constexpr = False):
    """Rotate row m by m places within each chunk: ``rotated[m, n] = chunk[m, (n - m) mod W]``. BACK undoes it."""
    M: tl.constexpr = TILE.block_m
    W: tl.constexpr = chunk_width(TILE)
    CHUNKS: tl.constexpr = TILE.block_n // W
    m = tl.arange(0, M)[:, None, None]
    n = tl.arange(0, W)[None, None, :]
    index = tl.broadcast_to((n + m) % W if BACK else (n - m + M) % W, (M, CHUNKS, W))
    return tl.reshape(tl.gather(tl.reshape(tile, (M, CHUNKS, W)), index, axis=2), (M, TILE.block_n))


@triton.jit
def delayed(tile, carried, TILE: tl.constexpr, BACK: tl.constexpr, ROTATED: tl.constexpr):
    """Let element [m, n] take the value that it had ``group(m) + wraps(m, n)`` chunks earlier; return the tile and the chunks to
    carry on.

    BACK: the complementary delay, ``M / W - group - wraps``, so that both one after the other delay all by M / N tiles. ROTATED:
    the tile's rows have been rotated, and its columns are those of keys; else they are those of the table block.
    All of the carried state is computed in this iteration: if a value were passed on unchanged, Triton would not pipeline the
    loop.
    """
    M: tl.constexpr = TILE.block_m
    N: tl.constexpr = TILE.block_n
    W: tl.constexpr = chunk_width(TILE)
    GROUPS: tl.constexpr = M // W
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, W)[None, :]
    group = GROUPS - 1 - m // W if BACK else m // W
    wraps = m % W > n if ROTATED else m % W + n >= W
    if BACK:
        wraps = wraps == 0

    if GROUPS == 1:
        return tl.where(wraps, carried[1], tile), (tile, tile)
    else:
        low, high = tl.split(tl.permute(tl.reshape(tile, (M, 2, W)), (0, 2, 1)))
        due_low, due_high = low, high
        if GROUPS == 4:  # half of the groups are one whole tile behind
            due_low, due_high = tl.where(group >= 2, carried[2], low), tl.where(group >= 2, carried[3], high)
        is_odd = group % 2 == 1
        late_low, late_high = tl.where(is_odd, carried[0], due_low), tl.where(is_odd, due_low, due_high)
        latest = tl.join(tl.where(wraps, carried[1], late_low), tl.where(wraps, late_low, late_high))
        latest = tl.reshape(tl.permute(latest, (0, 2, 1)), (M, N))
        if GROUPS == 4:
            return latest, (due_high, late_high, low, high)
        else:
            return latest, (due_high, late_high)


@triton.jit
def empty_band(TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Return what delayed carries before the first tile: chunks of zeros."""
    chunk = tl.full([TILE.block_m, chunk_width(TILE)], 0.0, DTYPE)
    if TILE.block_m == 2 * TILE.block_n:
        return chunk, chunk, chunk, chunk
    else:
        return chunk, chunk


@triton.jit
def next_tile(block, carried, TILE: tl.constexpr):
    """Return the relative scores [M, N] of the tile whose table block is given, and the state to carry to the next tile.

    The scores are right once the M / N blocks before have gone through. M is N or 2N.
    """
    return delayed(rotate(block, TILE), carried, TILE, BACK=False, ROTATED=True)


@triton.jit
def whole_tile(query, table, relative_position, TILE: tl.constexpr):
    """Compute the terms [M, N] of one tile without carried state: M / N + 1 products, and one rotation as the last step."""
    if TILE.rotation == "registers":
        return band_registers.whole_tile(query, table, relative_position, TILE)
    else:
        tile, carried = 0, empty_band(TILE, tl.float32)
        for ago in tl.static_range(TILE.block_m // TILE.block_n, -1, -1):
            block = table_block(query, table, relative_position - ago * TILE.block_n, TILE)
            tile, carried = delayed(block, carried, TILE, BACK=False, ROTATED=False)
        return rotate(tile, TILE)


@triton.jit
def blocks_before(query, table, relative_position, TILE: tl.constexpr):
    """Compute the carried state that next_terms needs for the first tile of a loop, at this relative position; not with carry
    None."""
    if TILE.rotation == "registers":
        return band_registers.blocks_before(query, table, relative_position, TILE)
    else:
        carried = empty_band(TILE, tl.float32)
        for ago in tl.static_range(TILE.block_m // TILE.block_n, 0, -1):
            block = table_block(query, table, relative_position - ago * TILE.block_n, TILE)
            _, carried = next_tile(block, carried, TILE)
        return carried


@triton.jit
def next_terms(query, table, carried, relative_position, TILE: tl.constexpr):
    """Return the terms [M, N] of the next tile of a loop over the keys, and the state to carry on. With carry None there is no
    state, which takes more products and fewer registers."""
    if TILE.carry is None:
        return whole_tile(query, table, relative_position, TILE), carried
    else:
        block = table_block(query, table, relative_position, TILE)
        if TILE.rotation == "registers":
            return band_registers.next_tile(block, carried, TILE)
        else:
            return next_tile(block, carried, TILE)


@triton.jit
def add_tile(acc, tile, table, relative_position, TILE: tl.constexpr):
    """Add the tile's elements, each times its table row, to acc [M, D]: one product for each of the M / N + 1 blocks that the
    tile has elements in."""
    if TILE.rotation == "registers":
        return band_registers.add_tile(acc, tile, table, relative_position, TILE)
    else:
        DTYPE: tl.constexpr = table.matrix[0].dtype.element_ty
        rest = rotate(tile.to(DTYPE), TILE, BACK=True)
        carried = empty_band(TILE, DTYPE)
        for ahead in tl.static_range(TILE.block_m // TILE.block_n + 1):
            block, carried = delayed(rest, carried, TILE, BACK=True, ROTATED=False)
            rows = table_rows(table, relative_position - TILE.block_m + ahead * TILE.block_n, TILE)
            # [M, N] @ [N, D] -> [M, D]
            acc = tl.dot(block, rows, acc, input_precision=TILE.precision)
            rest = tl.full([TILE.block_m, TILE.block_n], 0.0, DTYPE)
        return acc

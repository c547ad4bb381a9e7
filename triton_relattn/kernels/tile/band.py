"""The rotating band: the relative term of a tile from one matrix product and one rotation. DERIVATION.md explains it.

A table block holds the products of the tile's M queries with the N table rows that start at the tile's own relative position:
``block[m, c] = q_m . E[row(j0 - i0 - query_offset + c)]``. It is cut into chunks of W columns, which are numbered on from tile to
tile. The term of query m = W * group + m' and key n = W * half + n' of the tile is

    chunk[half - group - wraps][m, (n' - m') mod W]   with   wraps = (n' < m')

Two steps compute it: rotate each row by m' within its chunks, then take each element from ``group + wraps`` chunks ago. The state
that is carried to the next tile is rotated already, so no block is multiplied or rotated twice. The gradient of the scores goes
the same way back.

Here a row is rotated by a gather, which any GPU can do. Where TILE.rotation is "registers", the four steps (pack, rotate, delay,
unpack) are those of band_registers.py, without shared memory.
"""

import triton
import triton.language as tl

from . import band_registers
from .table import table_block, table_rows


@triton.constexpr_function
def chunk_width(tile):
    """Return how many columns are rotated together. A gather along more than 32, a warp's lanes, takes a second shuffle."""
    is_one_chunk = tile.rotation == "gather" and tile.block_m == tile.block_n <= 32
    return tile.block_n if is_one_chunk else tile.block_n // 2


@triton.constexpr_function
def term_dtype(tile):
    """Return the dtype in which terms are rotated and carried. For a gather they are rounded before (table.table_block)."""
    return tl.float16 if tile.round_terms and tile.rotation != "gather" else tl.float32


@triton.jit
def pack(tile, TILE: tl.constexpr, DTYPE: tl.constexpr, SATURATE: tl.constexpr = False):
    """Return a tile [M, N] in a dtype and in the form in which it is rotated. SATURATE: limit numbers to float16's range."""
    if TILE.rotation == "gather":
        return tile.to(DTYPE)
    else:
        return band_registers.pack_tile(tile, TILE, DTYPE, SATURATE)


@triton.jit
def unpack(packed, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the tile [M, N] that pack was given."""
    if TILE.rotation == "gather":
        return packed
    else:
        return band_registers.unpack_tile(packed, TILE, DTYPE)


@triton.jit
def rotate(packed, TILE: tl.constexpr, BACK: tl.constexpr = False):
    """Rotate row m by m places within each chunk: ``rotated[m, n] = chunk[m, (n - m) mod W]``. BACK undoes it."""
    if TILE.rotation == "gather":
        M: tl.constexpr = TILE.block_m
        W: tl.constexpr = chunk_width(TILE)
        CHUNKS: tl.constexpr = TILE.block_n // W
        m = tl.arange(0, M)[:, None, None]
        n = tl.arange(0, W)[None, None, :]
        index = tl.broadcast_to((n + m) % W if BACK else (n - m + M) % W, (M, CHUNKS, W))
        return tl.reshape(tl.gather(tl.reshape(packed, (M, CHUNKS, W)), index, axis=2), (M, TILE.block_n))
    else:
        return band_registers.rotate(packed, TILE, BACK)


@triton.jit
def delay(packed, carried, TILE: tl.constexpr, BACK: tl.constexpr, ROTATED: tl.constexpr):
    """Let element [m, n] take the value of ``group(m) + wraps(m, n)`` chunks ago; return that, and the chunks to carry on.

    BACK: the complementary delay, ``M / W - group - wraps``, so that both one after the other delay all by M / N tiles. ROTATED:
    the tile's rows have been rotated, and its columns are those of keys; else they are those of the table block.
    All of the carried state is computed in this iteration: if a value were passed on unchanged, Triton would not pipeline the
    loop.
    """
    M: tl.constexpr = TILE.block_m
    W: tl.constexpr = chunk_width(TILE)
    GROUPS: tl.constexpr = M // W
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, W)[None, :]
    group = GROUPS - 1 - m // W if BACK else m // W
    if not ROTATED:
        wraps = m % W + n >= W
    elif TILE.rotation == "gather":
        wraps = m % W > n
    else:  # a lane has every fourth column: one number for a row, compared with constants
        wraps = m % W - n % 4 > n // 4 * 4
    if BACK:
        wraps = wraps == 0

    if TILE.rotation != "gather":
        return band_registers.delay(packed, carried, group, wraps, GROUPS)
    elif GROUPS == 1:
        return tl.where(wraps, carried[1], packed), (packed, packed)
    else:
        low, high = tl.split(tl.permute(tl.reshape(packed, (M, 2, W)), (0, 2, 1)))
        latest, carried = band_registers.delay((low, high), carried, group, wraps, GROUPS)
        return tl.reshape(tl.permute(tl.join(latest[0], latest[1]), (0, 2, 1)), (M, TILE.block_n)), carried


@triton.jit
def empty_band(TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Return what delay carries before the first tile: chunks of zeros, or words of two elements each."""
    if TILE.rotation == "gather" or DTYPE == tl.float32:
        chunk = tl.full([TILE.block_m, chunk_width(TILE)], 0.0, DTYPE)
        if TILE.block_m == 2 * TILE.block_n:
            return chunk, chunk, chunk, chunk
        else:
            return chunk, chunk
    else:
        words = tl.full([TILE.block_m, chunk_width(TILE)], 0, tl.uint32)
        if TILE.block_m == 2 * TILE.block_n:
            return words, words
        else:
            return (words,)


@triton.jit
def next_tile(block, carried, TILE: tl.constexpr):
    """Return the terms [M, N] of the tile whose table block is given, right once the M / N blocks before have gone through, and
    the state to carry on."""
    DTYPE: tl.constexpr = term_dtype(TILE)
    rotated = rotate(pack(block, TILE, DTYPE, True), TILE)
    packed, carried = delay(rotated, carried, TILE, BACK=False, ROTATED=True)
    return unpack(packed, TILE, DTYPE).to(tl.float32), carried


@triton.jit
def whole_tile(query, table, relative_position, TILE: tl.constexpr):
    """Compute the terms [M, N] of one tile without carried state: M / N + 1 products, and one rotation as the last step."""
    DTYPE: tl.constexpr = term_dtype(TILE)
    carried = empty_band(TILE, DTYPE)
    for ago in tl.static_range(TILE.block_m // TILE.block_n, -1, -1):
        block = table_block(query, table, relative_position - ago * TILE.block_n, TILE)
        packed, carried = delay(pack(block, TILE, DTYPE, True), carried, TILE, BACK=False, ROTATED=False)
    return unpack(rotate(packed, TILE), TILE, DTYPE).to(tl.float32)


@triton.jit
def blocks_before(query, table, relative_position, TILE: tl.constexpr):
    """Compute the carried state that next_terms needs for the first tile of a loop, at this position; not with carry None."""
    carried = empty_band(TILE, term_dtype(TILE))
    for ago in tl.static_range(TILE.block_m // TILE.block_n, 0, -1):
        block = table_block(query, table, relative_position - ago * TILE.block_n, TILE)
        _, carried = next_tile(block, carried, TILE)
    return carried


@triton.jit
def next_terms(query, table, carried, relative_position, TILE: tl.constexpr):
    """Return the terms [M, N] of the next tile of a loop over the keys, and the state; carry None has none, and more products."""
    if TILE.carry is None:
        return whole_tile(query, table, relative_position, TILE), carried
    else:
        return next_tile(table_block(query, table, relative_position, TILE), carried, TILE)


@triton.jit
def add_tile(acc, tile, table, relative_position, TILE: tl.constexpr):
    """Add the tile's elements, each times its table row, to acc [M, D]: a product for each block that it has elements in."""
    DTYPE: tl.constexpr = table.matrix[0].dtype.element_ty
    packed = rotate(pack(tile, TILE, DTYPE), TILE, BACK=True)
    carried = empty_band(TILE, DTYPE)
    for ahead in tl.static_range(TILE.block_m // TILE.block_n + 1):
        block, carried = delay(packed, carried, TILE, BACK=True, ROTATED=False)
        rows = table_rows(table, relative_position - TILE.block_m + ahead * TILE.block_n, TILE)
        # [M, N] @ [N, D] -> [M, D]
        acc = tl.dot(unpack(block, TILE, DTYPE), rows, acc, input_precision=TILE.precision)
        packed = pack(tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32), TILE, DTYPE)
    return acc

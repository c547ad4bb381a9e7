"""The rotating band: the relative term of a tile from one matrix product and one rotation. DERIVATION.md explains it.

A table block holds the products of the tile's M queries with the N table rows that start at the tile's own relative position:
``block[m, c] = q_m . E[row(j0 - i0 - query_offset + c)]``. It is cut into chunks of W columns, which are numbered on from tile to
tile. The term of query m = W * group + m' and key n = W * half + n' of the tile is

    chunk[half - group - wraps][m, (n' - m') mod W]   with   wraps = (n' < m')

Two steps compute it: rotate each row by m' within its chunks, then take each element from ``group + wraps`` chunks ago. The state
that is carried to the next tile is rotated already, so no block is multiplied or rotated twice. The gradient of the scores goes
the same way back.
"""

import triton
import triton.language as tl

from .quads import pack, rotate_rows, step_back_words, unpack
from .table import table_block, table_rows


@triton.constexpr_function
def chunk_width(tile):
    """Return how many columns are rotated together. A gather along more than 32, a warp's lanes, takes a second shuffle."""
    has_one_chunk = tile.rotation == "gather" and tile.block_m == tile.block_n <= 32
    return tile.block_n if has_one_chunk else tile.block_n // 2


@triton.constexpr_function
def term_dtype(tile):
    """Return the dtype in which terms are rotated and carried. For the gather it is float32: block_of_rows has rounded them."""
    return tl.float16 if tile.round_terms and tile.rotation != "gather" else tl.float32


@triton.jit
def cut(tile, TILE: tl.constexpr, DTYPE: tl.constexpr, SATURATE: tl.constexpr = False):
    """Split a tile [M, N] into the parts that are rotated and delayed: the tile itself ("gather"), its two chunks [M, W], or, if
    DTYPE has 16 bits, words that hold an element of each chunk. SATURATE: limit numbers to the range of float16."""
    if TILE.rotation == "gather":
        return (tile.to(DTYPE),)
    else:
        low, high = tl.split(tl.reshape(tile, (TILE.block_m, TILE.block_n // 2, 2)))
        if DTYPE == tl.float32:
            return low, high
        else:
            return (pack(low, high, DTYPE, SATURATE),)


@triton.jit
def cut_terms(block, TILE: tl.constexpr):
    """Cut a block of terms, rounded as all kernels of a call round them."""
    return cut(block, TILE, term_dtype(TILE), True)


@triton.jit
def glued(parts, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Put a tile [M, N] together from its parts: the inverse of cut with the same DTYPE."""
    if TILE.rotation == "gather":
        return parts[0]
    elif len(parts) == 1:
        low, high = unpack(parts[0], DTYPE)
        return tl.reshape(tl.join(low, high), (TILE.block_m, TILE.block_n))
    else:
        return tl.reshape(tl.join(parts[0], parts[1]), (TILE.block_m, TILE.block_n))


@triton.jit
def rotate(parts, TILE: tl.constexpr, BACK: tl.constexpr = False):
    """Rotate row m by m places within each chunk: ``rotated[m, n] = chunk[m, (n - m) mod W]``. BACK undoes it."""
    M: tl.constexpr = TILE.block_m
    W: tl.constexpr = chunk_width(TILE)
    if TILE.rotation == "gather":
        CHUNKS: tl.constexpr = TILE.block_n // W
        m = tl.arange(0, M)[:, None, None]
        n = tl.arange(0, W)[None, None, :]
        index = tl.broadcast_to((n + m) % W if BACK else (n - m + M) % W, (M, CHUNKS, W))
        return (tl.reshape(tl.gather(tl.reshape(parts[0], (M, CHUNKS, W)), index, axis=2), (M, TILE.block_n)),)
    elif len(parts) == 1:
        return (rotate_rows(parts[0], M, W, TILE.warps, BACK),)
    else:
        return rotate_rows(parts[0], M, W, TILE.warps, BACK), rotate_rows(parts[1], M, W, TILE.warps, BACK)


@triton.jit
def step_back(chunks, before, where):
    """Replace each chunk of a tile by the chunk before it where the mask is set. before: the last chunk of the tile before."""
    if len(chunks) == 1:
        return (tl.where(where, before, chunks[0]),)
    else:
        return tl.where(where, before, chunks[0]), tl.where(where, chunks[0], chunks[1])


@triton.jit
def empty_band(TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Return what delayed carries before the first tile: zeros, for parts that were cut with this DTYPE."""
    if TILE.rotation != "gather" and DTYPE != tl.float32:
        words = tl.full([TILE.block_m, TILE.block_n // 2], 0, tl.uint32)
        if TILE.block_m == 2 * TILE.block_n:
            return words, words
        else:
            return (words,)
    else:
        chunk = tl.full([TILE.block_m, chunk_width(TILE)], 0.0, DTYPE)
        if TILE.block_m == 2 * TILE.block_n:
            return chunk, chunk, chunk, chunk
        else:
            return chunk, chunk


@triton.jit
def wraps_around(TILE: tl.constexpr):
    """Return the mask [M, W] of elements that rotating has brought from the end of their chunk to its beginning."""
    W: tl.constexpr = chunk_width(TILE)
    m = tl.arange(0, TILE.block_m)[:, None]
    n = tl.arange(0, W)[None, :]
    if TILE.rotation == "gather":
        return m % W > n
    else:
        return m % W - n % 4 > n // 4 * 4  # a lane has every fourth column: one number for a row, compared with constants


@triton.jit
def delayed(parts, carried, TILE: tl.constexpr, BACK: tl.constexpr, ROTATED: tl.constexpr):
    """Replace each element of a tile by its value ``group + wraps`` chunks ago; return the parts and the state to carry on.

    BACK: the delay is ``M / W - group - wraps`` chunks, so that forward and back together delay all elements alike, by M / N
    tiles. ROTATED: the columns are those of the tile; else those of the table block.
    All of the carried state is computed in this turn: if a value were passed on unchanged, Triton would not pipeline the loop.
    """
    M: tl.constexpr = TILE.block_m
    W: tl.constexpr = chunk_width(TILE)
    GROUPS: tl.constexpr = M // W
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, W)[None, :]
    group = GROUPS - 1 - m // W if BACK else m // W
    wraps = wraps_around(TILE) if ROTATED else m % W + n >= W
    if BACK:
        wraps = wraps == 0

    if TILE.rotation != "gather" and len(parts) == 1:
        due = parts[0]
        if GROUPS == 4:  # half of the groups are one whole tile behind
            due = tl.where(group >= 2, carried[1], due)
        odd = group % 2 == 1
        latest = (step_back_words(due, carried[0], odd | wraps, odd & wraps),)
        return latest, ((due, parts[0]) if GROUPS == 4 else (due,))
    else:
        chunks = parts
        if TILE.rotation == "gather" and GROUPS > 1:
            chunks = tl.split(tl.permute(tl.reshape(parts[0], (M, 2, W)), (0, 2, 1)))
        due = chunks
        if GROUPS == 4:
            due = tl.where(group >= 2, carried[2], chunks[0]), tl.where(group >= 2, carried[3], chunks[1])
        late = step_back(due, carried[0], group % 2 == 1) if GROUPS > 1 else due
        latest = step_back(late, carried[1], wraps)
        if GROUPS == 1:
            return latest, (due[0], late[0])
        else:
            if TILE.rotation == "gather":
                latest = (tl.reshape(tl.permute(tl.join(latest[0], latest[1]), (0, 2, 1)), (M, TILE.block_n)),)
            if GROUPS == 4:
                return latest, (due[1], late[1], chunks[0], chunks[1])
            else:
                return latest, (due[1], late[1])


@triton.jit
def next_tile(block, carried, TILE: tl.constexpr):
    """Return the relative scores [M, N] of the tile whose table block is given, and the state to carry to the next tile.

    The scores are right once the M / N blocks before have gone through. M is N or 2N.
    """
    TERM: tl.constexpr = term_dtype(TILE)
    parts, carried = delayed(rotate(cut_terms(block, TILE), TILE), carried, TILE, BACK=False, ROTATED=True)
    return glued(parts, TILE, TERM).to(tl.float32), carried


@triton.jit
def whole_tile(
    query,
    table,
    relative_position,
    TILE: tl.constexpr,
):
    """Compute the terms [M, N] of one tile without carried state: M / N + 1 products, and one rotation as the last step."""
    TERM: tl.constexpr = term_dtype(TILE)
    carried = empty_band(TILE, TERM)
    for ago in tl.static_range(TILE.block_m // TILE.block_n, -1, -1):
        behind = relative_position - ago * TILE.block_n
        block = table_block(query, table, behind, TILE)
        parts, carried = delayed(cut_terms(block, TILE), carried, TILE, BACK=False, ROTATED=False)
    return glued(rotate(parts, TILE), TILE, TERM).to(tl.float32)


@triton.jit
def blocks_before(
    query,
    table,
    relative_position,
    TILE: tl.constexpr,
):
    """Compute the carried state that next_terms needs for the first tile of a walk, at this relative position; not with carry
    None."""
    carried = empty_band(TILE, term_dtype(TILE))
    for ago in tl.static_range(TILE.block_m // TILE.block_n, 0, -1):
        behind = relative_position - ago * TILE.block_n
        block = table_block(query, table, behind, TILE)
        _, carried = next_tile(block, carried, TILE)
    return carried


@triton.jit
def next_terms(
    query,
    table,
    carried,
    relative_position,
    TILE: tl.constexpr,
):
    """Return the terms [M, N] of the next tile of a walk along the keys, and the state to carry on. With carry None there is no
    state, which takes more products and fewer registers."""
    if TILE.carry is not None:
        block = table_block(query, table, relative_position, TILE)
        return next_tile(block, carried, TILE)
    else:
        tile = whole_tile(query, table, relative_position, TILE)
        return tile, carried


@triton.jit
def add_tile(
    acc,
    tile,
    table,
    relative_position,
    TILE: tl.constexpr,
):
    """Add the tile's elements, each times its table row, to acc [M, D]: one product for each of the M / N + 1 blocks that the
    tile has elements in."""
    DTYPE: tl.constexpr = table.matrix[0].dtype.element_ty
    parts = rotate(cut(tile, TILE, DTYPE), TILE, BACK=True)
    carried = empty_band(TILE, DTYPE)
    for ahead in tl.static_range(TILE.block_m // TILE.block_n + 1):
        block, carried = delayed(parts, carried, TILE, BACK=True, ROTATED=False)
        behind = relative_position - TILE.block_m + ahead * TILE.block_n
        rows = table_rows(table, behind, TILE)
        # [M, N] @ [N, D] -> [M, D]
        acc = tl.dot(glued(block, TILE, DTYPE), rows, acc, input_precision=TILE.precision)
        parts = cut(tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32), TILE, DTYPE)
    return acc

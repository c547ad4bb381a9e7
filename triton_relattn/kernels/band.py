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

from .quads import pack, rotate_rows, rotated_within, step_back_words, swap_elements, unpack
from .table import table_block, table_rows
from .tiles import key_order


@triton.constexpr_function
def chunk_width(tile):
    """Columns that are rotated together: at most 32, because a second shuffle is needed beyond a warp's lanes."""
    has_one_chunk = tile.rotation == "gather" and tile.block_m == tile.block_n <= 32
    return tile.block_n if has_one_chunk else tile.block_n // 2


@triton.constexpr_function
def term_dtype(tile):
    """The dtype that terms are rotated and carried in; for the gather block_of_rows has rounded them."""
    return tl.float16 if tile.round_terms and tile.rotation != "gather" else tl.float32


@triton.constexpr_function
def waiting_dtype(tile, dtype):
    """Return the dtype in which gradients of scores wait for their table block to be complete."""
    return tl.float32 if tile.rotation == "gather" else dtype


@triton.jit
def cut(tile, TILE: tl.constexpr, DTYPE: tl.constexpr, SATURATE: tl.constexpr = False):
    """Split a tile [M, N] into the pieces that are rotated and delayed: the tile itself ("gather"), its two chunks [M, W], or, if
    DTYPE has 16 bits, words of an element of each. SATURATE: beyond float16's range its largest number."""
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
    """A block of terms, cut, and rounded as all kernels of a call round them."""
    return cut(block, TILE, term_dtype(TILE), True)


@triton.jit
def glued(parts, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """The tile [M, N] whose parts they are, cut with the same DTYPE."""
    if TILE.rotation == "gather":
        return parts[0]
    elif len(parts) == 1:
        low, high = unpack(parts[0], DTYPE)
        return tl.reshape(tl.join(low, high), (TILE.block_m, TILE.block_n))
    else:
        return tl.reshape(tl.join(parts[0], parts[1]), (TILE.block_m, TILE.block_n))


@triton.jit
def rotate(parts, TILE: tl.constexpr, BACK: tl.constexpr = False):
    """Within each chunk, row m by m places: ``rotated[m, n] = chunk[m, (n - m) mod W]``. BACK undoes it."""
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
def rotated_tile(tile, TILE: tl.constexpr, DTYPE: tl.constexpr, BACK: tl.constexpr = False):
    """[M, N]: a tile, rotated, in DTYPE."""
    return glued(rotate(cut(tile, TILE, DTYPE), TILE, BACK), TILE, DTYPE)


@triton.jit
def step_back(chunks, before, where):
    """The chunks of a tile, each replaced by its predecessor where the mask says so; before is the last of the tile before."""
    if len(chunks) == 1:
        return (tl.where(where, before, chunks[0]),)
    else:
        return tl.where(where, before, chunks[0]), tl.where(where, chunks[0], chunks[1])


@triton.jit
def empty_band(TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the state of delayed before the first tile, zeros, for parts cut with this DTYPE."""
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
    """[M, W]: where rotating has brought elements from the end of their chunk to its beginning."""
    W: tl.constexpr = chunk_width(TILE)
    m = tl.arange(0, TILE.block_m)[:, None]
    n = tl.arange(0, W)[None, :]
    if TILE.rotation == "gather":
        return m % W > n
    else:
        return m % W - n % 4 > n // 4 * 4  # a lane has every fourth column: one number for a row, compared with constants


@triton.jit
def delayed(parts, carried, TILE: tl.constexpr, BACK: tl.constexpr, ROTATED: tl.constexpr):
    """The parts of a tile, and what to carry to the next tile: each element as it was ``group + wraps`` chunks ago.

    BACK: as it was ``M / W - group - wraps`` chunks ago, so that after one and the other all are equally late, by
    M / N tiles. ROTATED: the columns are those of the tile; else those of the table block.
    All that is carried is made in this turn: a value passed on unchanged would turn off Triton's loop pipelining.
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
    """Relative scores [M, N] of the tile whose table block is given, and what to carry to the next.

    The scores are right once the M / N blocks before have gone through. M is N or twice that.
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
    """[M, N]: the terms of one tile from nothing. All its blocks are at hand, so that one rotation, the last step, is enough."""
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
    """Compute the state that next_terms needs for the first tile of a walk, at this relative position."""
    carried = empty_band(TILE, term_dtype(TILE))
    if TILE.carry is not None:
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
    """Terms [M, N] of the next tile of a walk along the keys, and what to carry on: with carry None nothing, which takes more
    products and fewer registers."""
    if TILE.carry is not None:
        block = table_block(query, table, relative_position, TILE)
        return next_tile(block, carried, TILE)
    else:
        tile = whole_tile(query, table, relative_position, TILE)
        return tile, carried


@triton.jit
def from_tiles(tile, carried, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """The parts of one table block, gathered from the M / N + 1 tiles that its elements lie in: complete with the last.

    They keep their tile's columns, so that rotating back puts them in the block's; band_column says where that is.
    """
    return delayed(cut(tile, TILE, DTYPE), carried, TILE, BACK=True, ROTATED=True)


@triton.jit
def in_tiles(parts, TILE: tl.constexpr):
    """Parts of a rotated block in the columns that from_tiles takes its elements from: its chunks trade places where that is an
    odd number of chunks ago. Not for the gather."""
    W: tl.constexpr = chunk_width(TILE)
    m = tl.arange(0, TILE.block_m)[:, None]
    odd = (m // W % 2 == 1) ^ wraps_around(TILE)
    if len(parts) == 1:
        return (swap_elements(parts[0], odd),)
    else:
        return tl.where(odd, parts[1], parts[0]), tl.where(odd, parts[0], parts[1])


@triton.jit
def add_tile(
    acc,
    tile,
    table,
    relative_position,
    TILE: tl.constexpr,
):
    """[M, D]: acc and each element of the tile times its table row: all blocks that the tile has elements in, one after the
    other. One product more than if blocks waited for their other elements, and nothing to carry."""
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


@triton.jit
def add_terms(
    acc,
    tile,
    waiting,
    table,
    relative_position,
    TILE: tl.constexpr,
):
    """[M, D]: acc and the elements of the next tile of a walk along the keys times their table rows, and what to carry on.

    Carry "both": elements wait until their block is complete, so that it is multiplied once. After the last tile,
    M / N blocks wait for tiles that do not come.
    """
    if TILE.carry == "both":
        DTYPE: tl.constexpr = waiting_dtype(TILE, table.matrix[0].dtype.element_ty)
        parts, waiting = from_tiles(tile, waiting, TILE, DTYPE)
        block = glued(rotate(parts, TILE, BACK=True), TILE, DTYPE)
        rows = table_rows(table, relative_position - TILE.block_m, TILE)
        # [M, N] @ [N, D] -> [M, D]
        acc = tl.dot(block.to(rows.dtype), rows, acc, input_precision=TILE.precision)
    else:
        acc = add_tile(acc, tile, table, relative_position, TILE)
    return acc, waiting


@triton.jit
def band_column(TILE: tl.constexpr):
    """[M, N]: column of the table block that an element has after rotating back; its key is that many after the first."""
    W: tl.constexpr = chunk_width(TILE)
    m = tl.arange(0, TILE.block_m)[:, None]
    n = key_order(TILE)[None, :]
    return n // W * W + (n - m + TILE.block_m) % W


@triton.jit
def band_within(low, high, TILE: tl.constexpr):
    """[M, N]: whether low <= band_column < high, for limits [M]."""
    if TILE.rotation == "gather":
        return (band_column(TILE) - low[:, None]).to(tl.uint32) < tl.maximum(high - low, 0)[:, None].to(tl.uint32)
    else:
        return rotated_within(low, high, key_order(TILE), chunk_width(TILE))

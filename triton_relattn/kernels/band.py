"""The rotating band: the relative term of a tile from one matrix product and one rotation. DERIVATION.md explains it.

A table block holds the products of the tile's queries with the BLOCK_N table rows that start at the tile's own relative
position: ``block[m, c] = q_m . E[row(j0 - i0 - query_offset + c)]``. Cut into chunks of W columns, numbered on from tile to
tile, with query m = W * group + m', the term of query m and key W * b + n' of the tile is

    chunk[b - group - wraps][m, (n' - m') mod W]   with   wraps = (n' < m')

so two steps give it: rotate each row by m' within its chunks, then take each element from ``group + wraps`` chunks ago. What
is carried to the next tile is rotated already; no block is multiplied or rotated twice. The gradient of the scores goes the
same way back.

OUTSIDE says what lies beyond the table: "clamp" (its end row), "zero" (no term), "none" (nothing does: it covers every pair);
None: there is no table.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .quads import pack, rotate_rows, rotated_within, step_back_words, swap_elements, unpack
from .tiles import key_order, load_rows

# The two parts of a walk along keys or queries. Without a table there is only the first, with one that covers every pair only
# the second.
FAR = tl.constexpr(0)
NEAR = tl.constexpr(1)


@triton.constexpr_function
def chunk_width(tile):
    """Columns that are rotated together: at most 32, because a second shuffle is needed beyond a warp's lanes."""
    block_m, block_n, rotation, _ = tile
    return block_n if rotation == "gather" and block_m == block_n <= 32 else block_n // 2


class Table(NamedTuple):
    """What rows of queries, or of d_out, are multiplied with: a table of one head."""

    matrix: Any  # (pointer, row stride, column stride) of rel_key or rel_value, or None
    scale: Any  # factor of the product, or None for 1
    bias: Any  # (pointer, row stride) of rel_bias, or None
    bias_scale: Any  # its factor
    first: Any  # relative position of row 0
    last: Any  # and of the last row


class Reached(NamedTuple):
    """The part of a table that is used: a Table without what may be None, which functions cannot return in Triton 3.6."""

    matrix: Any
    first: Any
    last: Any


@triton.jit
def row_indices(table, relative_position, TILE: tl.constexpr, OUTSIDE: tl.constexpr):
    """(start, rows [N], exists [N]): the rows of N relative positions, the given one first, and where there is one."""
    start = relative_position - table.first
    rows = key_order(TILE)
    if OUTSIDE == "clamp":
        rows = tl.minimum(tl.maximum(start + rows, 0), table.last - table.first)
        start = 0
        exists = rows >= 0  # none if last is before first
    else:
        exists = (start + rows).to(tl.uint32) <= tl.cast(table.last - table.first, tl.uint32)  # negative rows are large
    return start, rows, exists


@triton.jit
def table_rows(
    table,
    relative_position,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    OUTSIDE: tl.constexpr,
):
    """[N, D]: table rows of N relative positions, the given one first; outside first and last the end row or zeros."""
    start, rows, exists = row_indices(table, relative_position, TILE, OUTSIDE)
    return load_rows(table.matrix, start, rows, exists, WIDTH, BLOCK_WIDTH)


@triton.jit
def block_of_rows(query, rows, table, relative_position, TILE: tl.constexpr, OUTSIDE, INPUT_PRECISION):
    """[M, N]: products of the queries with the given table rows, and the bias of the same relative positions."""
    if table.matrix is not None:
        # [M, D] @ [D, N] -> [M, N]
        block = tl.dot(query, tl.trans(rows), input_precision=INPUT_PRECISION)
        if table.scale is not None:
            block *= tl.cast(table.scale, tl.float32)
    else:
        block = tl.zeros([TILE[0], TILE[1]], tl.float32)
    if table.bias is not None:
        start, rows, exists = row_indices(table, relative_position, TILE, OUTSIDE)
        bias = tl.load(table.bias[0] + (start + rows) * table.bias[1], mask=exists, other=0.0).to(tl.float32)
        block += (bias * tl.cast(table.bias_scale, tl.float32))[None, :]
    return block


@triton.jit
def table_block(
    query,
    table,
    relative_position,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    OUTSIDE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """The terms of the queries at N relative positions, the given one first."""
    if table.matrix is not None:
        rows = table_rows(table, relative_position, WIDTH, BLOCK_WIDTH, TILE, OUTSIDE)
    else:
        rows = None
    return block_of_rows(query, rows, table, relative_position, TILE, OUTSIDE, INPUT_PRECISION)


@triton.jit
def far_terms(query, table, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, INPUT_PRECISION: tl.constexpr):
    """Two [M]: the terms of the queries with the first and the last table row, which clamping uses for all keys beyond."""
    if table.matrix is not None:
        column = tl.arange(0, 16)  # the narrowest product that matrix units take; two of its columns are used
        rows = tl.where(column == 0, 0, table.last - table.first)
        ends = load_rows(table.matrix, 0, rows, rows >= 0, WIDTH, BLOCK_WIDTH)
        # [M, D] @ [D, 16] -> [M, 16]
        terms = tl.dot(query, tl.trans(ends), input_precision=INPUT_PRECISION)
        past = tl.sum(tl.where((column == 0)[None, :], terms, 0.0), axis=1)
        future = tl.sum(tl.where((column == 1)[None, :], terms, 0.0), axis=1)
        if table.scale is not None:
            past *= tl.cast(table.scale, tl.float32)
            future *= tl.cast(table.scale, tl.float32)
    else:
        past = tl.zeros([BLOCK_M], tl.float32)
        future = past
    if table.bias is not None:
        last = (table.last - table.first) * table.bias[1]
        past += tl.load(table.bias[0]).to(tl.float32) * tl.cast(table.bias_scale, tl.float32)
        future += tl.load(table.bias[0] + last).to(tl.float32) * tl.cast(table.bias_scale, tl.float32)
    return past, future


@triton.jit
def reached_positions(first_query, last_query, place, window):
    """(lowest, highest) relative position of the pairs that some of the queries see; highest < lowest if there is none."""
    lowest = -last_query - place.query_offset
    highest = tl.where(place.num_keys > 0, place.num_keys - 1 - first_query - place.query_offset, lowest - 1)
    if window[1] is not None:
        highest = tl.minimum(highest, window[1])
    if window[0] is not None:
        lowest = tl.maximum(lowest, -window[0])
    return lowest, highest


@triton.jit
def reached_rows(table, lowest, highest, OUTSIDE: tl.constexpr):
    """The part of a table that pairs at relative positions from lowest to highest use.

    A probability or a gradient times a table row that no pair uses is 0, but NaN if the row is.
    """
    matrix, first, last = table.matrix, table.first, table.last
    if OUTSIDE == "clamp":
        new_first = tl.minimum(tl.maximum(first, lowest), last)
        new_last = tl.where(lowest <= highest, tl.maximum(tl.minimum(last, highest), first), new_first - 1)
        start = new_first
    else:
        start = tl.maximum(first, lowest)
        new_last = tl.minimum(last, highest)
        # Of an empty part no row exists: it lies beyond all positions.
        new_first = tl.where(start <= new_last, start, 2**30)
        new_last = tl.where(start <= new_last, new_last, 2**30)
    part = (matrix[0] + tl.cast(start - first, tl.int64) * matrix[1], matrix[1], matrix[2])
    return Reached(part, new_first, new_last)


@triton.jit
def add_end_rows(acc, past, future, table, lowest, highest, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """[M, D]: acc + past * first row + future * last row, of a clamped table, if they are reached."""
    columns = tl.arange(0, BLOCK_WIDTH)
    pointers = table.matrix[0] + columns * table.matrix[2]
    # Not (columns < WIDTH) & reached: a vector with a scalar is a mask that the interpreter of Triton 3.9 rejects.
    first_width = tl.where(lowest <= tl.minimum(table.first, highest), WIDTH, 0)
    last_width = tl.where(highest >= tl.maximum(table.last, lowest), WIDTH, 0)
    first_row = tl.load(pointers, mask=columns < first_width, other=0.0)
    pointers += tl.cast(table.last - table.first, tl.int64) * table.matrix[1]
    last_row = tl.load(pointers, mask=columns < last_width, other=0.0)
    acc += past[:, None] * first_row.to(tl.float32)[None, :]
    return acc + future[:, None] * last_row.to(tl.float32)[None, :]


@triton.constexpr_function
def term_dtype(tile):
    """What terms are rotated and carried in."""
    return tl.float16 if tile[2] == "packed" else tl.float32


@triton.constexpr_function
def for_values(tile):
    """The tile for products of d_out with a table for values: float16 has no digits for gradients as small as they may be."""
    block_m, block_n, rotation, warps = tile
    return block_m, block_n, "exact" if rotation == "packed" else rotation, warps


@triton.constexpr_function
def waiting_dtype(tile, dtype):
    """What elements of a tile are in while they wait to be multiplied with table rows, and then rounded to their dtype."""
    return tl.float32 if tile[2] == "gather" else dtype


@triton.jit
def cut(tile, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """What of a tile [M, N] is rotated and delayed: all of it ("gather"), or its two chunks [M, W], or, if DTYPE has 16 bits, one
    word for an element of each."""
    if TILE[2] == "gather":
        return (tile.to(DTYPE),)
    else:
        low, high = tl.split(tl.reshape(tile, (TILE[0], TILE[1] // 2, 2)))
        if DTYPE == tl.float32:
            return low, high
        else:
            return (pack(low, high, DTYPE, TILE[2] == "packed"),)


@triton.jit
def glued(parts, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """The tile [M, N] whose parts they are, cut with the same DTYPE."""
    if TILE[2] == "gather":
        return parts[0]
    elif len(parts) == 1:
        low, high = unpack(parts[0], DTYPE)
        return tl.reshape(tl.join(low, high), (TILE[0], TILE[1]))
    else:
        return tl.reshape(tl.join(parts[0], parts[1]), (TILE[0], TILE[1]))


@triton.jit
def rotate(parts, TILE: tl.constexpr, BACK: tl.constexpr = False):
    """Within each chunk, row m by m places: ``rotated[m, n] = chunk[m, (n - m) mod W]``. BACK undoes it."""
    M: tl.constexpr = TILE[0]
    W: tl.constexpr = chunk_width(TILE)
    if TILE[2] == "gather":
        CHUNKS: tl.constexpr = TILE[1] // W
        m = tl.arange(0, M)[:, None, None]
        n = tl.arange(0, W)[None, None, :]
        index = tl.broadcast_to((n + m) % W if BACK else (n - m + M) % W, (M, CHUNKS, W))
        return (tl.reshape(tl.gather(tl.reshape(parts[0], (M, CHUNKS, W)), index, axis=2), (M, TILE[1])),)
    elif len(parts) == 1:
        return (rotate_rows(parts[0], M, W, TILE[3], BACK),)
    else:
        return rotate_rows(parts[0], M, W, TILE[3], BACK), rotate_rows(parts[1], M, W, TILE[3], BACK)


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
    """What delayed carries of parts cut with this DTYPE, before the first tile."""
    if TILE[2] != "gather" and DTYPE != tl.float32:
        words = tl.zeros([TILE[0], TILE[1] // 2], tl.uint32)
        if TILE[0] == 2 * TILE[1]:
            return words, words
        else:
            return (words,)
    else:
        chunk = tl.zeros([TILE[0], chunk_width(TILE)], DTYPE)
        if TILE[0] == 2 * TILE[1]:
            return chunk, chunk, chunk, chunk
        else:
            return chunk, chunk


@triton.jit
def wraps_around(TILE: tl.constexpr):
    """[M, W]: where rotating has brought elements from the end of their chunk to its beginning."""
    W: tl.constexpr = chunk_width(TILE)
    m = tl.arange(0, TILE[0])[:, None]
    n = tl.arange(0, W)[None, :]
    if TILE[2] == "gather":
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
    M: tl.constexpr = TILE[0]
    W: tl.constexpr = chunk_width(TILE)
    GROUPS: tl.constexpr = M // W
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, W)[None, :]
    group = GROUPS - 1 - m // W if BACK else m // W
    wraps = wraps_around(TILE) if ROTATED else m % W + n >= W
    if BACK:
        wraps = wraps == 0

    if TILE[2] != "gather" and len(parts) == 1:
        due = parts[0]
        if GROUPS == 4:  # half of the groups are one whole tile behind
            due = tl.where(group >= 2, carried[1], due)
        odd = group % 2 == 1
        latest = (step_back_words(due, carried[0], odd | wraps, odd & wraps),)
        return latest, ((due, parts[0]) if GROUPS == 4 else (due,))
    else:
        chunks = parts
        if TILE[2] == "gather" and GROUPS > 1:
            chunks = tl.split(tl.permute(tl.reshape(parts[0], (M, 2, W)), (0, 2, 1)))
        due = chunks
        if GROUPS == 4:
            due = tl.where(group >= 2, carried[2], chunks[0]), tl.where(group >= 2, carried[3], chunks[1])
        late = step_back(due, carried[0], group % 2 == 1) if GROUPS > 1 else due
        latest = step_back(late, carried[1], wraps)
        if GROUPS == 1:
            return latest, (due[0], late[0])
        else:
            if TILE[2] == "gather":
                latest = (tl.reshape(tl.permute(tl.join(latest[0], latest[1]), (0, 2, 1)), (M, TILE[1])),)
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
    parts, carried = delayed(rotate(cut(block, TILE, TERM), TILE), carried, TILE, BACK=False, ROTATED=True)
    return glued(parts, TILE, TERM).to(tl.float32), carried


@triton.jit
def whole_tile(
    query,
    table,
    relative_position,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    OUTSIDE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """[M, N]: the terms of one tile from nothing. All its blocks are at hand, so that one rotation, the last step, is enough."""
    TERM: tl.constexpr = term_dtype(TILE)
    carried = empty_band(TILE, TERM)
    for ago in tl.static_range(TILE[0] // TILE[1], -1, -1):
        behind = relative_position - ago * TILE[1]
        block = table_block(query, table, behind, WIDTH, BLOCK_WIDTH, TILE, OUTSIDE, INPUT_PRECISION)
        parts, carried = delayed(cut(block, TILE, TERM), carried, TILE, BACK=False, ROTATED=False)
    return glued(rotate(parts, TILE), TILE, TERM).to(tl.float32)


@triton.jit
def blocks_before(
    query,
    table,
    relative_position,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    OUTSIDE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    CARRY: tl.constexpr,
):
    """What next_terms carries to the tile at this relative position, the first of a walk."""
    carried = empty_band(TILE, term_dtype(TILE))
    if CARRY is not None:
        for ago in tl.static_range(TILE[0] // TILE[1], 0, -1):
            behind = relative_position - ago * TILE[1]
            block = table_block(query, table, behind, WIDTH, BLOCK_WIDTH, TILE, OUTSIDE, INPUT_PRECISION)
            _, carried = next_tile(block, carried, TILE)
    return carried


@triton.jit
def next_terms(
    query,
    table,
    carried,
    relative_position,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    OUTSIDE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    CARRY: tl.constexpr,
):
    """Terms [M, N] of the next tile of a walk along the keys, and what to carry on: with CARRY None nothing, which takes more
    products and fewer registers."""
    if CARRY is not None:
        block = table_block(query, table, relative_position, WIDTH, BLOCK_WIDTH, TILE, OUTSIDE, INPUT_PRECISION)
        return next_tile(block, carried, TILE)
    else:
        tile = whole_tile(query, table, relative_position, WIDTH, BLOCK_WIDTH, TILE, OUTSIDE, INPUT_PRECISION)
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
    m = tl.arange(0, TILE[0])[:, None]
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
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    OUTSIDE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """[M, D]: acc and each element of the tile times its table row: all blocks that the tile has elements in, one after the
    other. One product more than if blocks waited for their other elements, and nothing to carry."""
    DTYPE: tl.constexpr = table.matrix[0].dtype.element_ty
    parts = rotate(cut(tile, TILE, DTYPE), TILE, BACK=True)
    carried = empty_band(TILE, DTYPE)
    for ahead in tl.static_range(TILE[0] // TILE[1] + 1):
        block, carried = delayed(parts, carried, TILE, BACK=True, ROTATED=False)
        behind = relative_position - TILE[0] + ahead * TILE[1]
        rows = table_rows(table, behind, WIDTH, BLOCK_WIDTH, TILE, OUTSIDE)
        # [M, N] @ [N, D] -> [M, D]
        acc = tl.dot(glued(block, TILE, DTYPE), rows, acc, input_precision=INPUT_PRECISION)
        parts = cut(tl.zeros([TILE[0], TILE[1]], tl.float32), TILE, DTYPE)
    return acc


@triton.jit
def add_terms(
    acc,
    tile,
    waiting,
    table,
    relative_position,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    OUTSIDE: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    CARRY: tl.constexpr,
):
    """[M, D]: acc and the elements of the next tile of a walk along the keys times their table rows, and what to carry on.

    CARRY "both": elements wait until their block is complete, so that it is multiplied once. After the last tile,
    M / N blocks wait for tiles that do not come.
    """
    if CARRY == "both":
        DTYPE: tl.constexpr = waiting_dtype(TILE, table.matrix[0].dtype.element_ty)
        parts, waiting = from_tiles(tile, waiting, TILE, DTYPE)
        block = glued(rotate(parts, TILE, BACK=True), TILE, DTYPE)
        rows = table_rows(table, relative_position - TILE[0], WIDTH, BLOCK_WIDTH, TILE, OUTSIDE)
        # [M, N] @ [N, D] -> [M, D]
        acc = tl.dot(block.to(rows.dtype), rows, acc, input_precision=INPUT_PRECISION)
    else:
        acc = add_tile(acc, tile, table, relative_position, WIDTH, BLOCK_WIDTH, TILE, OUTSIDE, INPUT_PRECISION)
    return acc, waiting


@triton.jit
def band_column(TILE: tl.constexpr):
    """[M, N]: column of the table block that an element has after rotating back; its key is that many after the first."""
    W: tl.constexpr = chunk_width(TILE)
    m = tl.arange(0, TILE[0])[:, None]
    n = key_order(TILE)[None, :]
    return n // W * W + (n - m + TILE[0]) % W


@triton.jit
def band_within(low, high, TILE: tl.constexpr):
    """[M, N]: whether low <= band_column < high, for limits [M]."""
    if TILE[2] == "gather":
        return (band_column(TILE) - low[:, None]).to(tl.uint32) < tl.maximum(high - low, 0)[:, None].to(tl.uint32)
    else:
        return rotated_within(low, high, key_order(TILE), chunk_width(TILE))


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


@triton.constexpr_function
def clamp_margin(block_m, block_n):
    """How many relative positions beyond the table the near tiles can reach, and some more."""
    return block_m + block_n


@triton.jit
def part_range(PART: tl.constexpr, start, stop, near_start, near_stop):
    """(start, stop) of one part of a walk; the far part is what lies before and behind the near one, pushed together."""
    if PART == FAR:
        return start, tl.minimum(near_start, stop) + tl.maximum(stop - near_stop, 0)
    else:
        return near_start, tl.minimum(near_stop, stop)


@triton.jit
def walk_position(PART: tl.constexpr, position, near_start, near_stop, OUTSIDE: tl.constexpr):
    """Where the walk is: in the far part the near one is stepped over."""
    if PART == FAR and OUTSIDE is not None:
        return tl.where(position < near_start, position, position + near_stop - near_start)
    else:
        return position

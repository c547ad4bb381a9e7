"""A table of one head, and the rotating band: the terms of a tile from one matrix product and one rotation.

TILE.coverage says which pairs the table has rows for: "full" (all of them), "clamp" (beyond its ends the nearer end row applies),
"zero" (beyond its ends there is no term), "no table".

A table block holds the products of the tile's M queries with the N table rows that start at the tile's own relative position:
``block[m, c] = q_m . E[row(j0 - i0 - query_offset + c)]``. It is cut into chunks of W columns, which are numbered on from tile to
tile. The term of query m = W * group + m' and key n = W * half + n' of the tile is

    chunk[half - group - wraps][m, (n' - m') mod W]   with   wraps = (n' < m')

Two steps compute it: rotate each row by m' within its chunks, then take each element from ``group + wraps`` chunks ago. The state
that is carried to the next tile is rotated already, so no block is multiplied or rotated twice. The gradient of the scores goes
the same way back. DERIVATION.md explains all of it. D, in shapes, is the width of the table's rows.

Here a row is rotated by a gather, which any GPU can do. Where TILE.rotation is "registers", the four steps (pack, rotate, delay,
unpack) are those of registers.py, without shared memory.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from . import registers
from .blocks import key_order, load_rows


class Table(NamedTuple):
    """One head's table: the matrix that queries, or rows of d_out, are multiplied with, its bias, and its positions."""

    matrix: Any  # (pointer, row stride, column stride) of rel_key or rel_value, if TILE.has_matrix
    scale: Any  # factor of the product, if TILE.has_scale
    bias: Any  # (pointer, row stride) of rel_bias, if TILE.has_bias
    bias_scale: Any  # factor of the bias
    first: Any  # relative position of row 0
    last: Any  # relative position of the last row


@triton.jit
def row_indices(table, relative_position, offsets, TILE: tl.constexpr):
    """Return (start, rows, exists): row ``start + rows`` of the positions ``relative_position + offsets``, and if there is
    one."""
    start = relative_position - table.first
    rows = offsets
    if TILE.coverage == "clamp":  # the nearer end row
        rows = tl.minimum(tl.maximum(start + rows, 0), table.last - table.first)
        start = 0
        exists = rows >= 0  # none if last is before first
    else:
        exists = (start + rows).to(tl.uint32) <= tl.cast(table.last - table.first, tl.uint32)  # negative rows are large
    return start, rows, exists


@triton.jit
def table_rows(table, relative_position, TILE: tl.constexpr):
    """Load the table rows [N, D] of N successive relative positions. Beyond first and last: the end row, or zeros."""
    start, rows, exists = row_indices(table, relative_position, key_order(TILE), TILE)  # rows, exists: [N]
    return load_rows(table.matrix, start, rows, exists, TILE.width, TILE.block_width)


@triton.jit
def bias_at(table, relative_position, offsets, TILE: tl.constexpr):
    """Load the bias of the relative positions ``relative_position + offsets`` in float32; 0 where there is no row."""
    start, rows, exists = row_indices(table, relative_position, offsets, TILE)
    pointers = table.bias[0] + (start + rows) * table.bias[1]
    return tl.load(pointers, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def table_block(query, table, relative_position, TILE: tl.constexpr):
    """Compute the terms [M, N] of the queries at N successive relative positions: products with the rows, and the bias. For the
    gather, terms are rounded here, as rotations in registers round them."""
    if TILE.has_matrix:
        # q . E: [M, D] @ [D, N] -> [M, N]
        rows = table_rows(table, relative_position, TILE)
        block = tl.dot(query, tl.trans(rows), input_precision=TILE.precision)
        if TILE.has_scale:
            block *= tl.cast(table.scale, tl.float32)
    else:
        block = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
    if TILE.has_bias:
        bias = bias_at(table, relative_position, key_order(TILE), TILE) * tl.cast(table.bias_scale, tl.float32)
        block += bias[None, :]  # a column is one position: [M, N] + [1, N]
    if TILE.rotation == "gather" and TILE.round_terms:
        # By the same instruction: [M, N] -> words [M, N / 2] of two elements -> [M, N]
        low, high = tl.split(tl.reshape(block, (TILE.block_m, TILE.block_n // 2, 2)))
        low, high = registers.unpack(registers.pack(low, high, tl.float16, True), tl.float16)
        block = tl.reshape(tl.join(low, high), (TILE.block_m, TILE.block_n)).to(tl.float32)
    return block


# The band: pack, rotate, delay, unpack.


@triton.constexpr_function
def chunk_width(tile):
    """Return how many columns are rotated together. A gather along more than 32, a warp's lanes, takes a second shuffle."""
    is_one_chunk = tile.rotation == "gather" and tile.block_m == tile.block_n <= 32
    return tile.block_n if is_one_chunk else tile.block_n // 2


@triton.constexpr_function
def term_dtype(tile):
    """Return the dtype in which terms are rotated and carried. For a gather they are rounded before (table_block)."""
    return tl.float16 if tile.round_terms and tile.rotation != "gather" else tl.float32


@triton.jit
def pack(tile, TILE: tl.constexpr, DTYPE: tl.constexpr, SATURATE: tl.constexpr = False):
    """Return a tile [M, N] in a dtype and in the form in which it is rotated. SATURATE: limit numbers to float16's range."""
    if TILE.rotation == "gather":
        return tile.to(DTYPE)
    else:
        return registers.pack_tile(tile, TILE, DTYPE, SATURATE)


@triton.jit
def unpack(packed, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the tile [M, N] that pack was given."""
    if TILE.rotation == "gather":
        return packed
    else:
        return registers.unpack_tile(packed, TILE, DTYPE)


@triton.jit
def rotate(packed, TILE: tl.constexpr, BACK: tl.constexpr = False):
    """Rotate row m by m places within each chunk: ``rotated[m, n] = chunk[m, (n - m) mod W]``. BACK undoes it."""
    if TILE.rotation == "gather":
        M: tl.constexpr = TILE.block_m
        W: tl.constexpr = chunk_width(TILE)
        CHUNKS: tl.constexpr = TILE.block_n // W
        m = tl.arange(0, M)[:, None, None]
        n = tl.arange(0, W)[None, None, :]
        # Along the columns of each chunk: [M, N] -> [M, CHUNKS, W], gathered, -> [M, N]
        index = tl.broadcast_to((n + m) % W if BACK else (n - m + M) % W, (M, CHUNKS, W))
        return tl.reshape(tl.gather(tl.reshape(packed, (M, CHUNKS, W)), index, axis=2), (M, TILE.block_n))
    else:
        return registers.rotate(packed, TILE, BACK)


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
    # m = W * group + m'. A row lags by its group, and by one chunk more where the rotation by m' goes around its end.
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, W)[None, :]
    group = GROUPS - 1 - m // W if BACK else m // W
    if not ROTATED:  # column n will be at n + m'
        wraps = m % W + n >= W
    elif TILE.rotation == "gather":  # column n was at n - m'
        wraps = m % W > n
    else:  # a lane has every fourth column: one number for a row, compared with constants
        wraps = m % W - n % 4 > n // 4 * 4
    if BACK:
        wraps = wraps == 0

    if TILE.rotation != "gather":
        return registers.delay(packed, carried, group, wraps, GROUPS)
    elif GROUPS == 1:  # one chunk a tile: of this one, or of the one before
        return tl.where(wraps, carried[1], packed), (packed, packed)
    else:
        # [M, N] -> two chunks [M, W], delayed, -> [M, N]
        low, high = tl.split(tl.permute(tl.reshape(packed, (M, 2, W)), (0, 2, 1)))
        latest, carried = registers.delay((low, high), carried, group, wraps, GROUPS)
        return tl.reshape(tl.permute(tl.join(latest[0], latest[1]), (0, 2, 1)), (M, TILE.block_n)), carried


@triton.jit
def empty_band(TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Return what delay carries before the first tile: chunks of zeros, or words of two elements each."""
    if TILE.rotation == "gather" or DTYPE == tl.float32:
        chunk = tl.full([TILE.block_m, chunk_width(TILE)], 0.0, DTYPE)
        if TILE.block_m == 2 * TILE.block_n:  # four groups of rows: the last two lag by one tile more
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
    rotated = rotate(pack(block, TILE, DTYPE, True), TILE)  # [M, N] as pack has it
    packed, carried = delay(rotated, carried, TILE, BACK=False, ROTATED=True)
    return unpack(packed, TILE, DTYPE).to(tl.float32), carried


@triton.jit
def whole_tile(query, table, relative_position, TILE: tl.constexpr):
    """Compute the terms [M, N] of one tile without carried state: M / N + 1 products, and one rotation as the last step."""
    DTYPE: tl.constexpr = term_dtype(TILE)
    carried = empty_band(TILE, DTYPE)
    # From the earliest block to the tile's own: after that delay each row has its elements, which are rotated together.
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
    """Add the tile's elements, each times its table row, to acc [M, D]: a product per block that it has elements in."""
    DTYPE: tl.constexpr = table.matrix[0].dtype.element_ty
    packed = rotate(pack(tile, TILE, DTYPE), TILE, BACK=True)
    carried = empty_band(TILE, DTYPE)
    # Block after block, the earliest first: the elements of the tile [M, N], each in the column of its table row
    for ahead in tl.static_range(TILE.block_m // TILE.block_n + 1):
        block, carried = delay(packed, carried, TILE, BACK=True, ROTATED=False)
        rows = table_rows(table, relative_position - TILE.block_m + ahead * TILE.block_n, TILE)
        # [M, N] @ [N, D] -> [M, D]
        acc = tl.dot(unpack(block, TILE, DTYPE), rows, acc, input_precision=TILE.precision)
        packed = pack(tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32), TILE, DTYPE)  # behind the tile: nothing
    return acc


@triton.jit
def bias_tile(table, relative_position, TILE: tl.constexpr):
    """Load the biases [M, N] of a tile, float32: query m and key n have ``bias[relative_position + n - m]``. In NVIDIA's
    accumulators a thread's elements lie on few diagonals, a load each (registers.py); a load of the tile would go through shared
    memory."""
    if TILE.rotation == "gather":
        queries = tl.arange(0, TILE.block_m)[:, None]
        # The offsets n - m are [M, N].
        return bias_at(table, relative_position, key_order(TILE)[None, :] - queries, TILE)
    else:
        offsets = registers.diagonal_offsets(TILE.warps)
        diagonals = ()
        for diagonal in tl.static_range(registers.first_diagonal(TILE.block_m, TILE.warps), TILE.block_n // 4):
            # A number per thread: a vector has a single layout, that of a register of the tile.
            values = bias_at(table, relative_position, offsets + 4 * diagonal, TILE)
            diagonals = diagonals + (tl.reshape(values, (TILE.warps, 8, 4)),)  # noqa: RUF005
        return registers.join_diagonals(diagonals, TILE.block_m, TILE.block_n, TILE.warps)


# Beyond the ends of a clamped table the term is one number per query, and the gradient one sum.


@triton.jit
def rounded(terms):
    """Round a vector of terms to float16 as registers.pack does: numbers beyond its range become its largest."""
    terms = tl.where(terms > 65504.0, 65504.0, tl.where(terms < -65504.0, -65504.0, terms))
    return terms.to(tl.float16).to(tl.float32)


@triton.jit
def far_terms(query, table, TILE: tl.constexpr):
    """Return two [M]: the terms of the queries with the first and the last row, those of all keys beyond a clamped table."""
    if TILE.has_matrix:
        column = tl.arange(0, 16)  # the narrowest product that matrix units take; two of its columns are used
        rows = tl.where(column == 0, 0, table.last - table.first)
        ends = load_rows(table.matrix, 0, rows, rows >= 0, TILE.width, TILE.block_width)  # [16, D]
        # [M, D] @ [D, 16] -> [M, 16]
        terms = tl.dot(query, tl.trans(ends), input_precision=TILE.precision)
        # Columns 0 and 1: [M, 16] -> [M], [M]
        past = tl.sum(tl.where((column == 0)[None, :], terms, 0.0), axis=1)
        future = tl.sum(tl.where((column == 1)[None, :], terms, 0.0), axis=1)
        if TILE.has_scale:
            past *= tl.cast(table.scale, tl.float32)
            future *= tl.cast(table.scale, tl.float32)
    else:
        past = tl.full([TILE.block_m], 0.0, tl.float32)
        future = past
    if TILE.has_bias:
        # A bias is a scalar for all queries.
        last = (table.last - table.first) * table.bias[1]
        past += tl.load(table.bias[0]).to(tl.float32) * tl.cast(table.bias_scale, tl.float32)
        future += tl.load(table.bias[0] + last).to(tl.float32) * tl.cast(table.bias_scale, tl.float32)
    if TILE.round_terms:
        past, future = rounded(past), rounded(future)
    return past, future


@triton.jit
def add_far_tile(past, future, tile, is_past):
    """Add the sum over a tile's far keys to that of the past or that of the future, two [M]."""
    sums = tl.sum(tile, axis=1)  # [M, N] -> [M]
    return past + tl.where(is_past, sums, 0.0), future + tl.where(is_past, 0.0, sums)


@triton.jit
def add_end_rows(acc, past, future, table, lowest, highest, TILE: tl.constexpr):
    """Return acc [M, D] + past * first row + future * last row of a clamped table. A row that is not reached is left out."""
    columns = tl.arange(0, TILE.block_width)
    pointers = table.matrix[0] + columns * table.matrix[2]
    # Not (columns < TILE.width) & reached: a vector with a scalar is a mask that the interpreter of Triton 3.9 rejects.
    first_width = tl.where(lowest <= tl.minimum(table.first, highest), TILE.width, 0)
    last_width = tl.where(highest >= tl.maximum(table.last, lowest), TILE.width, 0)
    first_row = tl.load(pointers, mask=columns < first_width, other=0.0)  # [D]
    pointers += tl.cast(table.last - table.first, tl.int64) * table.matrix[1]
    last_row = tl.load(pointers, mask=columns < last_width, other=0.0)  # [D]
    # Of each query the sum [M, 1] times the row [1, D]
    acc += past[:, None] * first_row.to(tl.float32)[None, :]
    return acc + future[:, None] * last_row.to(tl.float32)[None, :]


# The part of the table that a block of queries uses.


@triton.jit
def reached_positions(first_query, last_query, place, window):
    """Return the (lowest, highest) relative position of pairs that the queries see; highest < lowest if there are none."""
    # r = j - i - query_offset: the first key to the last query, and the last key to the first query
    lowest = -last_query - place.query_offset
    highest = tl.where(place.num_keys > 0, place.num_keys - 1 - first_query - place.query_offset, lowest - 1)
    if window[1] is not None:
        highest = tl.minimum(highest, window[1])
    if window[0] is not None:
        lowest = tl.maximum(lowest, -window[0])
    return lowest, highest


@triton.jit
def reached_table(table, lowest, highest, TILE: tl.constexpr):
    """Return the part of a table that positions from lowest to highest use, without its bias: 0 times another row may be NaN."""
    matrix, first, last = table.matrix, table.first, table.last
    if TILE.coverage == "clamp":  # positions beyond an end use its row
        new_first = tl.minimum(tl.maximum(first, lowest), last)
        new_last = tl.where(lowest <= highest, tl.maximum(tl.minimum(last, highest), first), new_first - 1)
        start = new_first
    else:
        start = tl.maximum(first, lowest)
        new_last = tl.minimum(last, highest)
        # An empty part has no rows: it lies beyond all positions.
        new_first = tl.where(start <= new_last, start, 2**30)
        new_last = tl.where(start <= new_last, new_last, 2**30)
    part = (matrix[0] + tl.cast(start - first, tl.int64) * matrix[1], matrix[1], matrix[2])
    return Table(part, table.scale, 0, table.bias_scale, new_first, new_last)

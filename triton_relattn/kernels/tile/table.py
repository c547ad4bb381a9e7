"""A table of one head: its rows by relative position, their products, and the part of it that a block of queries uses.

TILE.coverage says which pairs the table has rows for: "full" (all of them), "clamp" (beyond its ends the nearer end row applies),
"zero" (beyond its ends there is no term), "no table".
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .addressing import key_order, load_rows
from .registers import diagonal_offsets, first_diagonal, join_diagonals, pack, unpack


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
    if TILE.coverage == "clamp":
        rows = tl.minimum(tl.maximum(start + rows, 0), table.last - table.first)
        start = 0
        exists = rows >= 0  # none if last is before first
    else:
        exists = (start + rows).to(tl.uint32) <= tl.cast(table.last - table.first, tl.uint32)  # negative rows are large
    return start, rows, exists


@triton.jit
def table_rows(table, relative_position, TILE: tl.constexpr):
    """Load the table rows [N, D] of N successive relative positions. Beyond first and last: the end row, or zeros."""
    start, rows, exists = row_indices(table, relative_position, key_order(TILE), TILE)
    return load_rows(table.matrix, start, rows, exists, TILE.width, TILE.block_width)


@triton.jit
def rounded(terms):
    """Round a vector of terms to float16 as registers.pack does: numbers beyond its range become its largest."""
    terms = tl.where(terms > 65504.0, 65504.0, tl.where(terms < -65504.0, -65504.0, terms))
    return terms.to(tl.float16).to(tl.float32)


@triton.jit
def bias_at(table, relative_position, offsets, TILE: tl.constexpr):
    """Load the bias of the relative positions ``relative_position + offsets`` in float32; 0 where there is no row."""
    start, rows, exists = row_indices(table, relative_position, offsets, TILE)
    pointers = table.bias[0] + (start + rows) * table.bias[1]
    return tl.load(pointers, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def bias_tile(table, relative_position, TILE: tl.constexpr):
    """Load the biases [M, N] of a tile, float32: query m and key n have ``bias[relative_position + n - m]``. In NVIDIA's
    accumulators a thread's elements lie on few diagonals, a load each (registers.py); a load of the tile would go through shared
    memory."""
    if TILE.rotation == "gather":
        queries = tl.arange(0, TILE.block_m)[:, None]
        return bias_at(table, relative_position, key_order(TILE)[None, :] - queries, TILE)
    else:
        offsets = diagonal_offsets(TILE.warps)
        diagonals = ()
        for diagonal in tl.static_range(first_diagonal(TILE.block_m, TILE.warps), TILE.block_n // 4):
            # A number per thread: a vector has a single layout, that of a register of the tile.
            values = bias_at(table, relative_position, offsets + 4 * diagonal, TILE)
            diagonals = diagonals + (tl.reshape(values, (TILE.warps, 8, 4)),)  # noqa: RUF005
        return join_diagonals(diagonals, TILE.block_m, TILE.block_n, TILE.warps)


@triton.jit
def table_block(query, table, relative_position, TILE: tl.constexpr):
    """Compute the terms [M, N] of the queries at N successive relative positions: products with the rows, and the bias. For the
    gather, terms are rounded here, as rotations in registers round them."""
    if TILE.has_matrix:
        rows = table_rows(table, relative_position, TILE)
        # [M, D] @ [D, N] -> [M, N]
        block = tl.dot(query, tl.trans(rows), input_precision=TILE.precision)
        if TILE.has_scale:
            block *= tl.cast(table.scale, tl.float32)
    else:
        block = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
    if TILE.has_bias:
        bias = bias_at(table, relative_position, key_order(TILE), TILE) * tl.cast(table.bias_scale, tl.float32)
        block += bias[None, :]
    if TILE.rotation == "gather" and TILE.round_terms:
        low, high = tl.split(tl.reshape(block, (TILE.block_m, TILE.block_n // 2, 2)))
        low, high = unpack(pack(low, high, tl.float16, True), tl.float16)
        block = tl.reshape(tl.join(low, high), (TILE.block_m, TILE.block_n)).to(tl.float32)
    return block


@triton.jit
def far_terms(query, table, TILE: tl.constexpr):
    """Return two [M]: the terms of the queries with the first and the last row, those of all keys beyond a clamped table."""
    if TILE.has_matrix:
        column = tl.arange(0, 16)  # the narrowest product that matrix units take; two of its columns are used
        rows = tl.where(column == 0, 0, table.last - table.first)
        ends = load_rows(table.matrix, 0, rows, rows >= 0, TILE.width, TILE.block_width)
        # [M, D] @ [D, 16] -> [M, 16]
        terms = tl.dot(query, tl.trans(ends), input_precision=TILE.precision)
        past = tl.sum(tl.where((column == 0)[None, :], terms, 0.0), axis=1)
        future = tl.sum(tl.where((column == 1)[None, :], terms, 0.0), axis=1)
        if TILE.has_scale:
            past *= tl.cast(table.scale, tl.float32)
            future *= tl.cast(table.scale, tl.float32)
    else:
        past = tl.full([TILE.block_m], 0.0, tl.float32)
        future = past
    if TILE.has_bias:
        last = (table.last - table.first) * table.bias[1]
        past += tl.load(table.bias[0]).to(tl.float32) * tl.cast(table.bias_scale, tl.float32)
        future += tl.load(table.bias[0] + last).to(tl.float32) * tl.cast(table.bias_scale, tl.float32)
    if TILE.round_terms:
        past, future = rounded(past), rounded(future)
    return past, future


@triton.jit
def add_far_tile(past, future, tile, is_past):
    """Add the sum over a tile's far keys to that of the past or that of the future, two [M]."""
    sums = tl.sum(tile, axis=1)
    return past + tl.where(is_past, sums, 0.0), future + tl.where(is_past, 0.0, sums)


@triton.jit
def reached_positions(first_query, last_query, place, window):
    """Return the (lowest, highest) relative position of pairs that the queries see; highest < lowest if there are none."""
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
    if TILE.coverage == "clamp":
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


@triton.jit
def add_end_rows(acc, past, future, table, lowest, highest, TILE: tl.constexpr):
    """Return acc [M, D] + past * first row + future * last row of a clamped table. A row that is not reached is left out."""
    columns = tl.arange(0, TILE.block_width)
    pointers = table.matrix[0] + columns * table.matrix[2]
    # Not (columns < TILE.width) & reached: a vector with a scalar is a mask that the interpreter of Triton 3.9 rejects.
    first_width = tl.where(lowest <= tl.minimum(table.first, highest), TILE.width, 0)
    last_width = tl.where(highest >= tl.maximum(table.last, lowest), TILE.width, 0)
    first_row = tl.load(pointers, mask=columns < first_width, other=0.0)
    pointers += tl.cast(table.last - table.first, tl.int64) * table.matrix[1]
    last_row = tl.load(pointers, mask=columns < last_width, other=0.0)
    acc += past[:, None] * first_row.to(tl.float32)[None, :]
    return acc + future[:, None] * last_row.to(tl.float32)[None, :]

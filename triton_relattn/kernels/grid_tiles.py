"""Tiles of keys on a grid, and the terms of a tile: one number for each of its rows of the grid, one for each of its columns.

The grid is cut into strips of COLUMNS columns. A tile is LINES lines of a strip, ``BLOCK_N == LINES * COLUMNS`` keys, line by
line. So the terms of all tiles of a strip by column are the same [M, COLUMNS]. The keys before the grid (class tokens) are strip
-1: its lines are COLUMNS successive keys, and have no terms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Grid(NamedTuple):
    """The grid of a call's keys, as the kernels get it."""

    of_rows: Any  # (B, H, height, queries on the grid): terms by row, in units of scores, with strides
    of_columns: Any  # (B, H, queries on the grid, width): terms by column
    height: Any
    width: Any
    prefix: Any  # positions before the grid; None: there are none
    strips: Any


class Strip(NamedTuple):
    """Some columns of the grid, or what comes before it. The key at a line and a column is ``origin + line * pitch + column``."""

    number: Any
    origin: Any
    pitch: Any
    lines: Any
    columns: Any  # those that exist
    end: Any  # one past its last key


@triton.constexpr_function
def lines_of(tile, columns):
    """Return how many lines of a strip a tile has."""
    return tile.block_n // columns


@triton.jit
def first_strip(grid):
    """Return the number of the first strip."""
    return 0 if grid.prefix is None else -1


@triton.jit
def strip_at(number, grid, num_keys, COLUMNS: tl.constexpr):
    """Return a strip by its number."""
    if grid.prefix is None:
        return Strip(number, number * COLUMNS, grid.width, grid.height, grid.width - number * COLUMNS, num_keys)
    else:
        on_grid = number >= 0
        origin = tl.where(on_grid, grid.prefix + number * COLUMNS, 0)
        pitch = tl.where(on_grid, grid.width, COLUMNS)
        lines = tl.where(on_grid, grid.height, tl.cdiv(grid.prefix, COLUMNS))
        columns = tl.where(on_grid, grid.width - number * COLUMNS, COLUMNS)
        return Strip(number, origin, pitch, lines, columns, tl.where(on_grid, num_keys, grid.prefix))


@triton.jit
def blocks_before(grid, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return how many tiles the keys before the grid take."""
    if grid.prefix is None:
        return 0
    else:
        return tl.cdiv(tl.cdiv(grid.prefix, COLUMNS), LINES)


@triton.jit
def key_blocks(grid, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return how many tiles all keys take."""
    return blocks_before(grid, LINES, COLUMNS) + tl.cdiv(grid.height, LINES) * grid.strips


@triton.jit
def block_at(block, grid, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (number of the strip, first line) of a tile, counted through."""
    of_strip = tl.cdiv(grid.height, LINES)
    if grid.prefix is None:
        return block // of_strip, block % of_strip * LINES
    else:
        inside = block - blocks_before(grid, LINES, COLUMNS)
        number = tl.where(inside < 0, -1, inside // of_strip)
        return number, tl.where(inside < 0, block, inside % of_strip) * LINES


@triton.jit
def tile_keys(strip, line, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (first key, keys from there on [N], mask of those that exist) of the tile that begins with a line of a strip."""
    tile_n = tl.arange(0, TILE.block_n)
    rows = tile_n // COLUMNS * strip.pitch + tile_n % COLUMNS
    start = strip.origin + line * strip.pitch
    valid = (tile_n // COLUMNS < strip.lines - line) & (tile_n % COLUMNS < strip.columns) & (start + rows < strip.end)
    return start, rows, valid


@triton.jit
def on_grid(offs_m, valid_m, grid):
    """Return the places of queries on the grid [M], and the mask of those that are there."""
    if grid.prefix is None:
        return offs_m, valid_m
    else:
        return offs_m - grid.prefix, valid_m & (offs_m >= grid.prefix)


@triton.jit
def row_pointers(tensor, entry, head, line, places, LINES: tl.constexpr):
    """Return pointers [M, LINES] to numbers of queries and rows of the grid, in a (B, H, height, queries on the grid) tensor."""
    pointer, strides = tensor
    start = pointer + tl.cast(entry, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    start += tl.cast(line, tl.int64) * strides[2]
    return start + (tl.arange(0, LINES)[None, :].to(tl.int64) * strides[2] + places[:, None])


@triton.jit
def row_mask(strip, line, valid_m, LINES: tl.constexpr):
    """Return the mask of the pointers to rows that exist; before the grid none does."""
    return valid_m[:, None] & (tl.arange(0, LINES) < tl.where(strip.number < 0, 0, strip.lines - line))[None, :]


@triton.jit
def column_pointers(tensor, entry, head, strip, places, COLUMNS: tl.constexpr):
    """Return pointers [M, COLUMNS] to numbers of queries and columns, in a (B, H, queries on the grid, width) tensor."""
    pointer, strides = tensor
    start = pointer + tl.cast(entry, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    columns = strip.number * COLUMNS + tl.arange(0, COLUMNS)
    return start + (places[:, None].to(tl.int64) * strides[2] + columns[None, :])


@triton.jit
def column_mask(strip, valid_m, COLUMNS: tl.constexpr):
    """Return the mask of the pointers to columns that exist; before the grid none does."""
    return valid_m[:, None] & (tl.arange(0, COLUMNS) < tl.where(strip.number < 0, 0, strip.columns))[None, :]


@triton.jit
def load_column_terms(grid, entry, head, strip, offs_m, valid_m, COLUMNS: tl.constexpr):
    """Load the terms of queries by column of a strip, [M, COLUMNS]."""
    places, exist = on_grid(offs_m, valid_m, grid)
    pointers = column_pointers(grid.of_columns, entry, head, strip, places, COLUMNS)
    return tl.load(pointers, mask=column_mask(strip, exist, COLUMNS), other=0.0)


@triton.jit
def tile_terms(of_columns, grid, entry, head, strip, line, offs_m, valid_m, LINES: tl.constexpr):
    """Add the terms by row of a tile's lines, which are loaded, to those by column; [M, N]."""
    places, exist = on_grid(offs_m, valid_m, grid)
    pointers = row_pointers(grid.of_rows, entry, head, line, places, LINES)
    of_rows = tl.load(pointers, mask=row_mask(strip, line, exist, LINES), other=0.0)
    if LINES == 1:
        return of_columns + of_rows
    else:
        terms = of_columns[:, None, :] + of_rows[:, :, None]
        return tl.reshape(terms, [terms.shape[0], LINES * terms.shape[2]])


@triton.jit
def sums_by_place(tile, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum up a tile [M, N] by its lines, [M, LINES], and by its columns, [M, COLUMNS]."""
    if LINES == 1:
        return tl.sum(tile, axis=1)[:, None], tile
    else:
        by_place = tl.reshape(tile, [tile.shape[0], LINES, COLUMNS])
        return tl.sum(by_place, axis=2), tl.sum(by_place, axis=1)

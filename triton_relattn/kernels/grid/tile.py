"""Tiles of keys on a grid, and the terms of a tile: one number per row of the grid, one per column.

The grid is cut into strips, some columns wide. A tile is some lines of a strip, ``BLOCK_N == lines * columns`` keys, line by
line. So the terms of all tiles of a strip by column are the same [M, columns]. The keys before the grid (class tokens) are strip
-1: its lines are as many successive keys, and have no terms.

Terms come negated, and are taken off the products of queries and keys. Triton would make a sum with a product its accumulator: it
would be computed before, in the layout of loads, and wgmma that follow would wait for each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..tile.logits import lane_consistent


class Cut(NamedTuple):
    """Constants: how tiles cut the grid."""

    columns: int
    lines: int
    is_even: bool  # all tiles are full, and on the grid


class Grid(NamedTuple):
    """The grid of a call's keys, as the kernels get it."""

    row_terms: Any  # (B, H, height, queries on the grid): terms by row, negated, in units of scores, with strides
    column_terms: Any  # (B, H, queries on the grid, width): terms by column
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


@triton.jit
def first_strip(grid):
    """Return the number of the first strip."""
    return 0 if grid.prefix is None else -1


@triton.jit
def strip_at(number, grid, num_keys, CUT: tl.constexpr):
    """Return a strip by its number."""
    if grid.prefix is None:
        return Strip(number, number * CUT.columns, grid.width, grid.height, grid.width - number * CUT.columns, num_keys)
    else:
        on_grid = number >= 0
        origin = tl.where(on_grid, grid.prefix + number * CUT.columns, 0)
        pitch = tl.where(on_grid, grid.width, CUT.columns)
        lines = tl.where(on_grid, grid.height, tl.cdiv(grid.prefix, CUT.columns))
        columns = tl.where(on_grid, grid.width - number * CUT.columns, CUT.columns)
        return Strip(number, origin, pitch, lines, columns, tl.where(on_grid, num_keys, grid.prefix))


@triton.jit
def blocks_before(grid, CUT: tl.constexpr):
    """Return how many tiles the keys before the grid take."""
    if grid.prefix is None:
        return 0
    else:
        return tl.cdiv(tl.cdiv(grid.prefix, CUT.columns), CUT.lines)


@triton.jit
def key_blocks(grid, CUT: tl.constexpr):
    """Return how many tiles all keys take."""
    return blocks_before(grid, CUT) + tl.cdiv(grid.height, CUT.lines) * grid.strips


@triton.jit
def block_at(block, grid, CUT: tl.constexpr):
    """Return (number of the strip, first line) of a tile, counted through."""
    strip_tiles = tl.cdiv(grid.height, CUT.lines)
    if grid.prefix is None:
        return block // strip_tiles, block % strip_tiles * CUT.lines
    else:
        inside = block - blocks_before(grid, CUT)  # the tiles before the grid come first
        number = tl.where(inside < 0, -1, inside // strip_tiles)
        return number, tl.where(inside < 0, block, inside % strip_tiles) * CUT.lines


@triton.jit
def tile_keys(strip, line, CUT: tl.constexpr):
    """Return (first key, keys from there on [N], mask of those that exist) of the tile that begins with a line of a strip."""
    # Line by line: key n is at line n // columns and column n % columns of the tile.
    tile_n = tl.arange(0, CUT.lines * CUT.columns)
    rows = tile_n // CUT.columns * strip.pitch + tile_n % CUT.columns
    start = strip.origin + line * strip.pitch
    if CUT.is_even:
        valid = tile_n >= 0
    else:
        inside = (tile_n // CUT.columns < strip.lines - line) & (tile_n % CUT.columns < strip.columns)
        valid = inside & (start + rows < strip.end)
    return start, rows, valid


@triton.jit
def on_grid(offs_m, valid_m, grid):
    """Return the places of queries on the grid [M], and the mask of those that are there."""
    if grid.prefix is None:
        return offs_m, valid_m
    else:
        return offs_m - grid.prefix, valid_m & (offs_m >= grid.prefix)


@triton.jit
def row_pointers(tensor, entry, head, line, places, CUT: tl.constexpr):
    """Return pointers [M, lines] to numbers of queries and rows of the grid, in a (B, H, height, queries on the grid) tensor."""
    pointer, strides = tensor
    start = pointer + tl.cast(entry, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    start += tl.cast(line, tl.int64) * strides[2]
    return start + (tl.arange(0, CUT.lines)[None, :].to(tl.int64) * strides[2] + places[:, None])


@triton.jit
def row_mask(strip, line, valid_m, CUT: tl.constexpr):
    """Return the mask of the pointers to rows that exist; before the grid none does."""
    return valid_m[:, None] & (tl.arange(0, CUT.lines) < tl.where(strip.number < 0, 0, strip.lines - line))[None, :]


@triton.jit
def column_pointers(tensor, entry, head, strip, places, CUT: tl.constexpr):
    """Return pointers [M, columns] to numbers of queries and columns, in a (B, H, queries on the grid, width) tensor."""
    pointer, strides = tensor
    start = pointer + tl.cast(entry, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    columns = strip.number * CUT.columns + tl.arange(0, CUT.columns)
    return start + (places[:, None].to(tl.int64) * strides[2] + columns[None, :])


@triton.jit
def column_mask(strip, valid_m, CUT: tl.constexpr):
    """Return the mask of the pointers to columns that exist; before the grid none does."""
    return valid_m[:, None] & (tl.arange(0, CUT.columns) < tl.where(strip.number < 0, 0, strip.columns))[None, :]


@triton.jit
def load_column_terms(grid, entry, head, strip, offs_m, valid_m, CUT: tl.constexpr):
    """Load the terms of queries by column of a strip, [M, columns]."""
    places, exist = on_grid(offs_m, valid_m, grid)
    pointers = column_pointers(grid.column_terms, entry, head, strip, places, CUT)
    return tl.load(pointers, mask=column_mask(strip, exist, CUT), other=0.0)  # [M, columns]


@triton.jit
def load_row_terms(grid, entry, head, strip, line, offs_m, valid_m, CUT: tl.constexpr):
    """Load the terms of queries by row of a tile's lines, [M, lines]."""
    places, exist = on_grid(offs_m, valid_m, grid)
    pointers = row_pointers(grid.row_terms, entry, head, line, places, CUT)
    return tl.load(pointers, mask=row_mask(strip, line, exist, CUT), other=0.0)  # [M, lines]


@triton.jit
def with_terms(products, row_terms, column_terms, CUT: tl.constexpr):
    """Add the terms of a tile, negated ones by row [M, lines] and by column [M, columns], to products [M, N]."""
    if CUT.lines == 1:
        return products - column_terms - row_terms
    else:
        # The products as [M, lines, columns], less terms [M, 1, columns] and [M, lines, 1]
        by_place = tl.reshape(products, [products.shape[0], CUT.lines, CUT.columns])
        return tl.reshape(by_place - column_terms[:, None, :] - row_terms[:, :, None], products.shape)


@triton.jit
def sums_by_place(tile, CUT: tl.constexpr):
    """Sum up a tile [M, N] by its lines, [M, lines], which are lane_consistent (logits.py), and by columns, [M, columns]."""
    if CUT.lines == 1:
        return lane_consistent(tl.sum(tile, axis=1), CUT.columns)[:, None], tile
    else:
        by_place = tl.reshape(tile, [tile.shape[0], CUT.lines, CUT.columns])  # [M, N] -> [M, lines, columns]
        line_sums = tl.sum(by_place, axis=2)  # [M, lines]
        return tl.max(tl.broadcast_to(line_sums[:, :, None], by_place.shape), axis=2), tl.sum(by_place, axis=1)


@triton.jit
def lane_consistent_columns(sums, CUT: tl.constexpr):
    """Make all lanes that hold a copy of sums by the columns of tiles, [M, columns], agree on its bits."""
    if CUT.lines == 1:
        return sums
    else:
        return tl.max(tl.broadcast_to(sums[:, None, :], (sums.shape[0], CUT.lines, CUT.columns)), axis=1)

"""Backward, instead of the fourth kernel: the gradient of the table that meets the keys, from the words of the dkv kernel.

A program owns a block of the table's rows and walks the keys, as in the dp2c kernel, whose tiles it reads (words.py) instead of
computing them. No two programs add to the same number.
"""

import torch
import triton
import triton.language as tl

from .arguments import Call, TableGradients, TableRows, cdiv, strided
from .configs import TileConfig
from .key_terms import keys_at, near_queries, rotate_columns, wanted_limits
from .masking import exists, locate, visible
from .scores import rel_unit
from .tiles import head_matrix, load_rows, store_rows
from .words import items_of, key_of_column
from .workspace import Part, Plan


@triton.jit(do_not_specialize=["first_item", "stop_item", "first_key", "stop_key", "lowest", "first", "last", "num_heads"])
def dp2c_words_kernel(
    inputs,
    words,
    d_rel_p2c,
    first_item,
    stop_item,
    first_key,
    stop_key,
    lowest,
    call,
    first,
    last,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SKEW: tl.constexpr,
):
    """Compute the partial sums of dp2c_kernel from words [1, items, Nq, columns]; arguments are as of dtable_words_kernel.

    Grid: (row blocks * table heads, splits), row blocks fastest; a program takes every splits-th block of keys of all items that
    use its table.
    """
    MARGIN: tl.constexpr = ROWS.p2c_margin if TILE.coverage == "clamp" else 0
    num_blocks = tl.cdiv(last - first + 1 + 2 * MARGIN, TILE.block_m)
    highest = last + MARGIN - tl.program_id(0) % num_blocks * TILE.block_m  # relative position of the first row; they fall
    table_head = tl.program_id(0) // num_blocks if ROWS.per_head else 0
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    tile_m = tl.arange(0, TILE.block_m)
    tile_n = tl.arange(0, TILE.block_n)
    acc = tl.full([TILE.block_m, SHAPE.block_d], 0.0, tl.float32)
    near_first, near_last = wanted_limits(first, last, call.window, ROWS)

    item_start, item_step = items_of(table_head, first_item, num_heads, ROWS.per_head)
    for item in tl.range(item_start, stop_item, item_step):
        place = locate(call.sequences, call.window, item // num_heads)
        matrix = head_matrix(words, 0, item - first_item, 0, False)
        head_keys = head_matrix(inputs.key, place.entry, item % num_heads // SHAPE.group, place.key_start, SHAPE.wide_index)
        start, stop = keys_at(highest, first_key, stop_key, place, call.window, TILE)
        for key_start in tl.range(start + split * TILE.block_n, stop, num_splits * TILE.block_n):
            offs_n = key_start + tile_n
            valid_n = exists(offs_n, place, call.window) & (offs_n >= first_key) & (offs_n < stop_key)
            # A pair of a row and a key is one query: of the tile from the first of them on where m >= n, else of the next tile.
            next_tile = tl.where(tile_m[:, None] < tile_n[None, :], TILE.block_m, 0)
            offs_m = (key_start - place.query_offset - highest) + tile_m[:, None] + next_tile
            seen = visible(offs_m, offs_n[None, :], place, call.window) & valid_n[None, :]
            start_m, stop_m = 0, place.num_queries
            if TILE.coverage == "clamp":
                start_m, stop_m = near_queries(offs_n[None, :], near_first, near_last, place, ROWS, TILE)
            seen = seen & (offs_m >= start_m) & (offs_m < stop_m)
            columns = offs_n[None, :] - key_of_column(offs_m, place.query_offset, first_key, lowest, SKEW)
            # Words of hidden pairs may never have been written.
            d_tile = tl.load(matrix[0] + (offs_m * matrix[1] + columns), mask=seen, other=0.0)
            key = load_rows(head_keys, key_start, tile_n, valid_n, SHAPE.head_dim, SHAPE.block_d)
            # [M, N] @ [N, D] -> [M, D]
            acc = tl.dot(rotate_columns(d_tile, TILE), key, acc, input_precision=TILE.precision)

    acc *= rel_unit(call.scaling)
    row, valid = highest - first + MARGIN, highest - tile_m >= first - MARGIN
    row = row + 1 if TILE.coverage == "clamp" else row
    d_rel_p2c = head_matrix(d_rel_p2c, split, table_head, 0, SHAPE.wide_index)
    if ROWS.adds:
        acc += load_rows(d_rel_p2c, row, -tile_m, valid, SHAPE.head_dim, SHAPE.block_d)
    store_rows(d_rel_p2c, row, -tile_m, valid, acc, SHAPE.head_dim, SHAPE.block_d)


def launch_dp2c_words(
    call: Call, tile: TileConfig, words: torch.Tensor, d_tables: TableGradients, plan: Plan, part: Part, rows: TableRows
) -> None:
    """Launch dp2c_words_kernel for a part of the workspace's words; see there."""
    assert d_tables.rel_p2c is not None
    splits, table_heads, num_rows, _ = d_tables.rel_p2c[0].shape
    num_rows -= 2 * (call.coverage == "clamp")  # the rows of dtable_ends_kernel
    call.launch(
        "dp2c_words",
        dp2c_words_kernel,
        tile,
        (cdiv(num_rows, tile.block_m) * table_heads, splits),
        words=strided(words),
        d_rel_p2c=d_tables.rel_p2c,
        first_item=part.first_item,
        stop_item=part.stop_item,
        first_key=part.first_key,
        stop_key=part.stop_key,
        lowest=plan.lowest,
        ROWS=rows,
        SKEW=plan.skew,
    )

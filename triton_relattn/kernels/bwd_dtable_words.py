"""Backward, instead of the third kernel: the gradient of a table from the words that the dkv kernel has left in a workspace.

A program owns a block of table rows and walks the queries, as in the dtable kernel. It does not compute scores again, but reads
their gradients (words.py) and multiplies them with the queries. No two programs add to the same number.
"""

import torch
import triton
import triton.language as tl

from .arguments import Call, TableGradients, TableRows, strided
from .configs import TileConfig
from .masking import locate
from .scores import rel_unit
from .tiles import head_matrix, load_rows, row_vector, store_rows
from .walk import clamp_margin, near_keys
from .words import items_of, key_of_column, load_words
from .workspace import Part, Plan


@triton.jit(do_not_specialize=["first_item", "stop_item", "first_key", "stop_key", "lowest", "first", "last", "num_heads"])
def dtable_words_kernel(
    inputs,
    words,
    d_tables,
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
    """Compute the partial sums of dtable_kernel from words [1, items, Nq, columns]. ROWS.adds: add to the sums that are there.

    An item is a batch entry and head, numbered entry * heads + head. The workspace has the items from first_item to stop_item,
    and of each the keys from first_key to stop_key.
    Grid: (row blocks * table heads, splits), row blocks fastest; a program takes every splits-th block of queries of all items
    that use its table.
    """
    MARGIN: tl.constexpr = clamp_margin(ROWS.dq_block_m, ROWS.dq_block_n) if TILE.coverage == "clamp" else 0
    num_blocks = tl.cdiv(last - first + 1 + 2 * MARGIN, TILE.block_n)
    block = tl.program_id(0) % num_blocks
    table_head = tl.program_id(0) // num_blocks if ROWS.per_head else 0
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    relative = first - MARGIN + block * TILE.block_n
    tile_m = tl.arange(0, TILE.block_m)
    tile_n = tl.arange(0, TILE.block_n)
    if d_tables.rel_key is not None:
        acc = tl.full([TILE.block_n, SHAPE.block_dr], 0.0, tl.float32)
    if d_tables.rel_bias is not None:
        # Summed over the queries at the end only, because that sum goes across warps.
        bias_acc = tl.full([TILE.block_n, TILE.block_m], 0.0, tl.float32)

    # The relative positions that both the table, with its margins, and the window have.
    position = relative + tile_n
    valid_n = position <= last + MARGIN
    if call.window[1] is not None:
        valid_n = valid_n & (position <= call.window[1])
    if call.window[0] is not None:
        valid_n = valid_n & (position >= -call.window[0])

    item_start, item_step = items_of(table_head, first_item, num_heads, ROWS.per_head)
    queries = inputs.query
    if inputs.rel_query is not None:
        queries = inputs.rel_query
    for item in tl.range(item_start, stop_item, item_step):
        entry = item // num_heads
        head = item % num_heads
        place = locate(call.sequences, call.window, entry)
        matrix = head_matrix(words, 0, item - first_item, 0, False)
        if d_tables.rel_key is not None:
            head_queries = head_matrix(queries, place.entry, head, place.query_start, SHAPE.wide_index)
        # The queries that see a key of the workspace at one of these relative positions.
        shift = place.query_offset + relative
        start = tl.maximum(first_key - shift - (TILE.block_n - 1), 0) // TILE.block_m * TILE.block_m
        stop = tl.minimum(place.num_queries, tl.minimum(place.num_keys, stop_key) - shift)
        if call.window[1] is not None:
            stop = tl.where(relative > call.window[1], 0, stop)
        if call.window[0] is not None:
            stop = tl.where(relative + (TILE.block_n - 1) < -call.window[0], 0, stop)
        for row_start in tl.range(start + split * TILE.block_m, stop, num_splits * TILE.block_m):
            valid_m = row_start + tile_m < place.num_queries
            # Words of hidden pairs may never have been written. Those of far keys do not count: the dq kernel has summed them.
            key_low, key_high = first_key, tl.minimum(place.num_keys, stop_key)
            if TILE.coverage == "clamp":
                rows_start = row_start // ROWS.dq_block_m * ROWS.dq_block_m
                if ROWS.dq_block_m < TILE.block_m:
                    rows_start = ((row_start + tile_m) // ROWS.dq_block_m * ROWS.dq_block_m)[None, :]
                near_start, near_stop = near_keys(
                    rows_start, first, last, place.query_offset, ROWS.dq_block_m, ROWS.dq_block_n, TILE
                )
                key_low, key_high = tl.maximum(near_start, key_low), tl.minimum(near_stop, key_high)
            column = row_start + shift - key_of_column(row_start, place.query_offset, first_key, lowest, SKEW)
            keys = (row_start + shift) + (tile_n[:, None] + tile_m[None, :])
            within = (keys - key_low).to(tl.uint32) < tl.maximum(key_high - key_low, 0).to(tl.uint32)
            within = within & valid_m[None, :] & valid_n[:, None]
            d_band = load_words(matrix, row_start, tile_m, column, within, TILE.block_n)
            if d_tables.rel_bias is not None:
                bias_acc += d_band.to(tl.float32)
            if d_tables.rel_key is not None:
                rel_query = load_rows(head_queries, row_start, tile_m, valid_m, SHAPE.rel_dim, SHAPE.block_dr)
                # [N, M] @ [M, Dr] -> [N, Dr]
                acc = tl.dot(d_band, rel_query, acc, input_precision=TILE.precision)

    row = relative - first + MARGIN
    valid = relative + tile_n <= last + MARGIN
    row = row + 1 if TILE.coverage == "clamp" else row
    if d_tables.rel_key is not None:
        acc *= rel_unit(call.scaling)
        d_rel_keys = head_matrix(d_tables.rel_key, split, table_head, 0, SHAPE.wide_index)
        if ROWS.adds:
            acc += load_rows(d_rel_keys, row, tile_n, valid, SHAPE.rel_dim, SHAPE.block_dr)
        store_rows(d_rel_keys, row, tile_n, valid, acc, SHAPE.rel_dim, SHAPE.block_dr)
    if d_tables.rel_bias is not None:
        bias = tl.sum(bias_acc, axis=1)
        pointers = row_vector(d_tables.rel_bias, split, table_head, row) + tile_n
        if ROWS.adds:
            bias += tl.load(pointers, mask=valid, other=0.0)
        tl.store(pointers, bias, mask=valid)


def launch_dtable_words(
    call: Call,
    tile: TileConfig,
    words: torch.Tensor,
    d_tables: TableGradients,
    plan: Plan,
    part: Part,
    rows: TableRows,
    grid: tuple[int, int],
) -> None:
    """Launch dtable_words_kernel for a part of the workspace's words; see there."""
    call.launch(
        "dtable_words",
        dtable_words_kernel,
        tile,
        grid,
        words=strided(words),
        d_tables=d_tables,
        first_item=part.first_item,
        stop_item=part.stop_item,
        first_key=part.first_key,
        stop_key=part.stop_key,
        lowest=plan.lowest,
        ROWS=rows,
        SKEW=plan.skew,
    )

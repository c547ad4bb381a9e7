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
from .words import items_of, key_of_column, load_words, queries_apart, rows_of_program
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
    APART: tl.constexpr = queries_apart(words[0].dtype.element_ty.primitive_bitwidth)
    MARGIN: tl.constexpr = clamp_margin(ROWS.dq_block_m, ROWS.dq_block_n) if TILE.coverage == "clamp" else 0
    STEP: tl.constexpr = rows_of_program(TILE.block_n, APART)
    num_blocks = tl.cdiv(last - first + 1 + 2 * MARGIN, STEP)
    block = tl.program_id(0) % num_blocks
    table_head = tl.program_id(0) // num_blocks if ROWS.per_head else 0
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    lowest_row = first - MARGIN + block * STEP
    tile_m = tl.arange(0, TILE.block_m)
    tile_n = tl.arange(0, TILE.block_n)
    row_before = tl.maximum(tile_n - 1, 0)[:, None]
    if d_tables.rel_key is not None:
        acc = tl.full([TILE.block_n, SHAPE.block_dr], 0.0, tl.float32)
    if d_tables.rel_bias is not None:
        # A product with ones, the narrowest that matrix units take, sums over the queries: all columns are alike.
        bias_acc = tl.full([TILE.block_n, 16], 0.0, tl.float32)
        ones = tl.full([TILE.block_m, 16], 1.0, words[0].dtype.element_ty)

    item_start, item_step = items_of(table_head, first_item, num_heads, ROWS.per_head)
    num_items = tl.cdiv(tl.maximum(stop_item - item_start, 0), item_step)
    queries = inputs.query
    if inputs.rel_query is not None:
        queries = inputs.rel_query
    query_offset = call.sequences.query_offset
    first_key = first_key // APART * APART  # which it is; so the compiler knows
    for before in tl.range(APART):  # so many rows of the tile stand for positions before lowest_row
        relative = lowest_row - before
        shift = query_offset + relative
        first_query = -shift & (APART - 1)
        # In each turn but the first, when all sums are zero, every position moves on by a row.
        if d_tables.rel_key is not None:
            acc = tl.gather(acc, tl.broadcast_to(row_before, acc.shape), axis=0)
        if d_tables.rel_bias is not None:
            bias_acc = tl.gather(bias_acc, tl.broadcast_to(row_before, bias_acc.shape), axis=0)
        # The queries that see a key of the workspace at one of these relative positions.
        start = tl.maximum(first_key - shift - (TILE.block_n - 1), 0) // APART * APART
        stop = tl.minimum(call.sequences.max_seqlen_q, tl.minimum(call.sequences.max_seqlen_k, stop_key) - shift)
        if call.window[1] is not None:
            stop = tl.where(relative > call.window[1], 0, stop)
        if call.window[0] is not None:
            stop = tl.where(relative + (TILE.block_n - 1) < -call.window[0], 0, stop)
        per_item = tl.cdiv(tl.maximum(stop - start, 0), TILE.block_m * APART)
        for position in tl.range(split, num_items * per_item, num_splits):
            item = item_start + position // tl.maximum(per_item, 1) * item_step
            row_start = start + position % tl.maximum(per_item, 1) * (TILE.block_m * APART)
            place = locate(call.sequences, call.window, item // num_heads)
            offs_m = row_start + first_query + tile_m * APART
            valid_m = offs_m < place.num_queries
            # Words of hidden pairs may never have been written. Those of far keys do not count: the dq kernel has summed them.
            key_low, key_high = first_key, tl.cdiv(tl.minimum(place.num_keys, stop_key), APART) * APART
            if TILE.coverage == "clamp":
                rows_start = (offs_m // ROWS.dq_block_m * ROWS.dq_block_m)[:, None]
                near_start, near_stop = near_keys(
                    rows_start, first, last, place.query_offset, ROWS.dq_block_m, ROWS.dq_block_n, TILE
                )
                key_low, key_high = tl.maximum(near_start, key_low), tl.minimum(near_stop, key_high)
            column_keys = key_of_column(offs_m, query_offset, first_key, lowest, SKEW)
            matrix = head_matrix(words, 0, item - first_item, 0, False)
            key_high = tl.where(valid_m[:, None], key_high, 0)
            d_band = load_words(matrix, offs_m, offs_m + shift, column_keys, key_low, key_high, TILE.block_n)
            if d_tables.rel_bias is not None:
                # [N, M] @ [M, 16] -> [N, 16]
                bias_acc = tl.dot(tl.trans(d_band), ones, bias_acc, input_precision="ieee")
            if d_tables.rel_key is not None:
                head_queries = head_matrix(queries, place.entry, item % num_heads, place.query_start, SHAPE.wide_index)
                rows = first_query + tile_m * APART
                rel_query = load_rows(head_queries, row_start, rows, valid_m, SHAPE.rel_dim, SHAPE.block_dr)
                # [N, M] @ [M, Dr] -> [N, Dr]
                acc = tl.dot(tl.trans(d_band), rel_query, acc, input_precision=TILE.precision)

    # What hidden positions add to their own rows may be anything.
    position = lowest_row - (APART - 1) + tile_n
    seen = position >= lowest_row
    if call.window[1] is not None:
        seen = seen & (position <= call.window[1])
    if call.window[0] is not None:
        seen = seen & (position >= -call.window[0])
    row = lowest_row - (APART - 1) - first + MARGIN
    valid = (position >= lowest_row) & (position < lowest_row + STEP) & (position <= last + MARGIN)
    row = row + 1 if TILE.coverage == "clamp" else row
    if d_tables.rel_key is not None:
        acc = tl.where(seen[:, None], acc * rel_unit(call.scaling), 0.0)
        d_rel_keys = head_matrix(d_tables.rel_key, split, table_head, 0, SHAPE.wide_index)
        if ROWS.adds:
            acc += load_rows(d_rel_keys, row, tile_n, valid, SHAPE.rel_dim, SHAPE.block_dr)
        store_rows(d_rel_keys, row, tile_n, valid, acc, SHAPE.rel_dim, SHAPE.block_dr)
    if d_tables.rel_bias is not None:
        bias = tl.where(seen, tl.max(bias_acc, axis=1), 0.0)
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

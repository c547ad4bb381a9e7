"""Backward, fourth kernel: the gradient of a table, from what the dkv kernel has stored of each pair.

    d_rel_key[r] = sum_i dS[i, i + r] q_i     d_rel_bias[r] = sum_i dS[i, i + r]     d_rel_value[r] = sum_i P[i, i + r] d_out_i

A program owns a block of table rows and loops over the queries. No two programs add to the same number, so there are no atomics
and the result repeats bit for bit. Where there are fewer blocks of rows than a GPU can work on at once, several programs share
a block, each with a partial sum of its own.
"""

import torch
import triton
import triton.language as tl

from .bwd_dq import fitted
from .call import Call, strided
from .config.selection import TileConfig
from .tile.addressing import head_matrix, load_rows, row_vector, store_rows
from .tile.masking import locate
from .tile.scores import rel_unit
from .workspace.planning import Part, Plan
from .workspace.stored import (
    items_of,
    key_of_column,
    load_tile,
    queries_apart,
    rows_of_program,
    seen_keys,
    stored_part,
)
from .workspace.table_sums import TableSums


@triton.jit
def queries_at(relative, query_offset, first_key, stop_key, APART: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (start, stop) of the queries that have a key of first_key .. stop_key at one of N successive relative positions;
    start is a multiple of APART."""
    start = tl.maximum(first_key - query_offset - relative - (BLOCK_N - 1), 0) // APART * APART
    return start, tl.maximum(stop_key - query_offset - relative, 0)


@triton.jit(do_not_specialize=["first_program", "stop_program", "first", "last", "num_heads"])
def dtable_kernel(
    inputs,
    vectors,
    stored,
    d_rows,
    d_biases,
    first_program,
    stop_program,
    call,
    first,
    last,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    OF_VALUES: tl.constexpr,
    PER_HEAD: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Compute partial sums of the gradients of table rows: d_rows [splits, heads or 1, R, D], d_biases [splits, heads or 1, R].
    Either may be None. ADDS: add to the sums that are there.

    vectors: the queries, or what rel_key meets in their place, and stored is dS, [1, items, Nq, columns]. OF_VALUES: vectors are
    d_out, and stored is P. first_program, stop_program: the programs of the dkv kernel whose numbers the workspace has.

    Pairs beyond a clamped table are not here: dq_kernel sums them for each query (table_sums.py).

    Grid: (row blocks * table heads, splits), row blocks fastest; a program takes every splits-th block of queries of all items
    that use its table.
    """
    TABLE: tl.constexpr = TILE.value_tile if OF_VALUES else TILE
    APART: tl.constexpr = queries_apart(stored[0].dtype.element_ty.primitive_bitwidth)
    STEP: tl.constexpr = rows_of_program(TILE.block_n, APART)
    num_blocks = tl.cdiv(last - first + 1, STEP)
    block = tl.program_id(0) % num_blocks
    table_head = tl.program_id(0) // num_blocks if PER_HEAD else 0
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    lowest_row = first + block * STEP
    tile_m = tl.arange(0, TILE.block_m)
    tile_n = tl.arange(0, TILE.block_n)
    row_before = tl.maximum(tile_n - 1, 0)[:, None]
    if d_rows is not None:
        acc = tl.full([TILE.block_n, TABLE.block_width], 0.0, tl.float32)
    if d_biases is not None:
        # A product with ones, the narrowest that matrix units take, sums over the queries: all columns are alike.
        bias_acc = tl.full([TILE.block_n, 16], 0.0, tl.float32)
        ones = tl.full([TILE.block_m, 16], 1.0, stored[0].dtype.element_ty)

    first_item, stop_item, first_key, stop_key = stored_part(first_program, stop_program, call.sequences, LAYOUT, SHAPE.group)
    first_key = first_key // APART * APART  # changes nothing: so the compiler knows that it is a multiple
    stop_key = tl.minimum(stop_key, call.sequences.max_seqlen_k)
    item_start, item_step = items_of(table_head, first_item, num_heads, PER_HEAD)
    num_items = tl.cdiv(tl.maximum(stop_item - item_start, 0), item_step)
    for before in tl.range(APART):  # so many rows of the tile stand for positions before lowest_row
        relative = lowest_row - before
        # In each iteration but the first, when all sums are zero, every position moves on by a row.
        if d_rows is not None:
            acc = tl.gather(acc, tl.broadcast_to(row_before, acc.shape), axis=0)
        if d_biases is not None:
            bias_acc = tl.gather(bias_acc, tl.broadcast_to(row_before, bias_acc.shape), axis=0)
        # How many queries of an item have a key of the workspace at one of these positions, at most.
        if call.sequences.query_offsets is None:
            start, stop = queries_at(relative, call.sequences.query_offset, first_key, stop_key, APART, TILE.block_n)
            span = tl.minimum(stop, call.sequences.max_seqlen_q) - start
        else:
            span = tl.minimum(call.sequences.max_seqlen_q, stop_key - first_key + TILE.block_n + APART)
        if call.window[1] is not None:
            span = tl.where(relative > call.window[1], 0, span)
        if call.window[0] is not None:
            span = tl.where(relative + (TILE.block_n - 1) < -call.window[0], 0, span)
        per_item = tl.cdiv(tl.maximum(span, 0), TILE.block_m * APART)
        for position in tl.range(split, num_items * per_item, num_splits):
            item = item_start + position // tl.maximum(per_item, 1) * item_step
            place = locate(call.sequences, call.window, item // num_heads)
            shift = place.query_offset + relative
            start, _ = queries_at(relative, place.query_offset, first_key, stop_key, APART, TILE.block_n)
            row_start = start + position % tl.maximum(per_item, 1) * (TILE.block_m * APART)
            first_query = -shift & (APART - 1)  # whose numbers at this position begin at a multiple of 16 bytes
            offs_m = row_start + first_query + tile_m * APART
            valid_m = offs_m < place.num_queries
            # Numbers of hidden pairs may never have been stored, and in a band have no place.
            key_low, key_high = seen_keys(offs_m, place, call.window, first_key, stop_key, APART)
            column_keys = key_of_column(offs_m, place.query_offset, first_key, call.window, LAYOUT)
            matrix = head_matrix(stored, 0, item - first_item, 0, False)
            band = load_tile(matrix, offs_m, offs_m + shift, column_keys, key_low, key_high, TILE.block_n)
            if d_biases is not None:
                # [N, M] @ [M, 16] -> [N, 16]
                bias_acc = tl.dot(tl.trans(band), ones, bias_acc, input_precision="ieee")
            if d_rows is not None:
                head_vectors = head_matrix(vectors, place.entry, item % num_heads, place.query_start, SHAPE.wide_index)
                rows = first_query + tile_m * APART
                of_queries = load_rows(head_vectors, row_start, rows, valid_m, TABLE.width, TABLE.block_width)
                # [N, M] @ [M, D] -> [N, D]
                acc = tl.dot(tl.trans(band), of_queries, acc, input_precision=TILE.precision)

    # What hidden positions add to their own rows may be anything.
    position = lowest_row - (APART - 1) + tile_n
    seen = position >= lowest_row
    if call.window[1] is not None:
        seen = seen & (position <= call.window[1])
    if call.window[0] is not None:
        seen = seen & (position >= -call.window[0])
    row = lowest_row - (APART - 1) - first
    valid = (position >= lowest_row) & (position < lowest_row + STEP) & (position <= last)
    if d_rows is not None:
        unit = rel_unit(call.scaling)
        if OF_VALUES:
            unit = 1.0 if call.dropout.seed is None else tl.cast(call.dropout.keep_scale, tl.float32)
        acc = tl.where(seen[:, None], acc * unit, 0.0)
        d_rows = head_matrix(d_rows, split, table_head, 0, SHAPE.wide_index)
        if ADDS:
            acc += load_rows(d_rows, row, tile_n, valid, TABLE.width, TABLE.block_width)
        store_rows(d_rows, row, tile_n, valid, acc, TABLE.width, TABLE.block_width)
    if d_biases is not None:
        bias = tl.where(seen, tl.max(bias_acc, axis=1), 0.0)
        pointers = row_vector(d_biases, split, table_head, row) + tile_n
        if ADDS:
            bias += tl.load(pointers, mask=valid, other=0.0)
        tl.store(pointers, bias, mask=valid)


def launch_dtable(
    call: Call,
    tile: TileConfig,
    vectors: torch.Tensor,
    stored: torch.Tensor,
    sums: TableSums,
    plan: Plan,
    part: Part,
    of_values: bool,
) -> None:
    """Launch dtable_kernel for a part of the workspace: for rel_value with P, or for rel_key and rel_bias with dS."""
    call.launch(
        "dtable",
        dtable_kernel,
        fitted(tile, call.common.sequences.max_seqlen_q, 8 * stored.element_size()),
        sums.grid,
        vectors=strided(vectors),
        stored=strided(stored),
        d_rows=sums.partial("rel_value" if of_values else "rel_key"),
        d_biases=None if of_values else sums.partial("rel_bias"),
        first_program=part.first_program,
        stop_program=part.stop_program,
        LAYOUT=plan.layout,
        OF_VALUES=of_values,
        PER_HEAD=sums.per_head,
        ADDS=sums.adds,
    )

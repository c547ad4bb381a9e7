"""Backward, third kernel: the gradient of a table, from what the dkv kernel has stored of each pair.

    d_rel_key[r] = sum_i dS[i, i + r] q_i     d_rel_bias[r] = sum_i dS[i, i + r]     d_rel_value[r] = sum_i P[i, i + r] d_out_i

A program owns a block of table rows and loops over the queries. No two programs add to the same number, so there are no atomics
and the result repeats bit for bit. Where there are fewer blocks of rows than a GPU can work on at once, several programs share
a block, each with a partial sum of its own.
"""

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl

from .call import Call, strided
from .config.selection import TileConfig
from .tile.addressing import head_matrix, load_rows, row_vector, store_rows
from .tile.masking import clamp_margin, locate, near_keys
from .tile.scores import rel_unit
from .workspace.planning import Part, Plan
from .workspace.stored import (
    items_of,
    key_of_column,
    load_tile,
    queries_apart,
    rows_of_program,
    stored_part,
    stored_positions,
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

    Beyond a clamped table there are keys that dq_kernel, with tiles of its own, does not count as far. They are summed by
    distance in rows of their own: the partial sums have clamp_margin more rows on either side, and then one more for the far keys
    (table_sums.py).

    Grid: (row blocks * table heads, splits), row blocks fastest; a program takes every splits-th block of queries of all items
    that use its table.
    """
    TABLE: tl.constexpr = TILE.value_tile if OF_VALUES else TILE
    APART: tl.constexpr = queries_apart(stored[0].dtype.element_ty.primitive_bitwidth)
    MARGIN: tl.constexpr = clamp_margin(LAYOUT.dq_block_m, LAYOUT.dq_block_n) if TILE.coverage == "clamp" else 0
    STEP: tl.constexpr = rows_of_program(TILE.block_n, APART)
    num_blocks = tl.cdiv(last - first + 1 + 2 * MARGIN, STEP)
    block = tl.program_id(0) % num_blocks
    table_head = tl.program_id(0) // num_blocks if PER_HEAD else 0
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    lowest_row = first - MARGIN + block * STEP
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
    lowest, highest = stored_positions(first, last, call.window, LAYOUT, TILE)
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
            # Numbers of hidden pairs may never have been stored. Those of far keys do not count: the dq kernel has summed them.
            key_low, key_high = first_key, tl.cdiv(tl.minimum(place.num_keys, stop_key), APART) * APART
            if TILE.coverage == "clamp":
                rows_start = (offs_m // LAYOUT.dq_block_m * LAYOUT.dq_block_m)[:, None]
                near_start, near_stop = near_keys(
                    rows_start, first, last, place.query_offset, LAYOUT.dq_block_m, LAYOUT.dq_block_n, TILE
                )
                key_low, key_high = tl.maximum(near_start, key_low), tl.minimum(near_stop, key_high)
            if LAYOUT.is_band:  # numbers of other positions may lie before the workspace's first or behind its last
                first_stored = (offs_m + (place.query_offset + lowest)) // APART * APART
                stop_stored = tl.cdiv(offs_m + (place.query_offset + highest + 1), APART) * APART
                key_low = tl.maximum(key_low, first_stored[:, None])
                key_high = tl.minimum(key_high, stop_stored[:, None])
            column_keys = key_of_column(offs_m, place.query_offset, first_key, lowest, LAYOUT)
            matrix = head_matrix(stored, 0, item - first_item, 0, False)
            key_high = tl.where(valid_m[:, None], key_high, 0)
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
    row = lowest_row - (APART - 1) - first + MARGIN
    valid = (position >= lowest_row) & (position < lowest_row + STEP) & (position <= last + MARGIN)
    row = row + 1 if TILE.coverage == "clamp" else row
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


@functools.lru_cache(maxsize=1024)
def fitted(tile: TileConfig, num_queries: int, bits: int) -> TileConfig:
    """Return the configuration for a call with so many queries: of a block of queries, which are spread over
    queries_apart times as many, no half is empty."""
    block_m, apart = tile.block_m, queries_apart(bits)
    while block_m > 16 and block_m // 2 * apart >= num_queries:
        block_m //= 2
    return tile if block_m == tile.block_m else replace(tile, block_m=block_m)


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

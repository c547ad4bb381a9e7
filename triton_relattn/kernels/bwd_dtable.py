"""Backward, third kernel: a program owns a block of table rows and walks the diagonal band of pairs that use them.

No two programs add to the same number, so there are no atomics and the result repeats bit for bit. Where there are fewer
blocks of rows than a GPU can work on at once, several programs share a block, each with a partial sum of its own.
"""

import torch
import triton
import triton.language as tl

from .arguments import Call, PerQuery, TableGradients, TableRows, strided
from .band import (
    band_column,
    band_within,
    cut_terms,
    empty_band,
    from_tiles,
    glued,
    in_tiles,
    rotate,
    rotated_tile,
    term_dtype,
)
from .configs import TileConfig
from .dropout import keep_mask
from .key_terms import key_terms, mirrored, natural_keys
from .masking import exists, locate, visible_band
from .scores import (
    apply_softcap_and_mask,
    exponent_scale,
    load_softmax_stats,
    probabilities,
    rel_unit,
    score_gradients,
    tile_scores,
)
from .table import Table, block_of_rows, table_rows
from .tiles import head_matrix, head_vector, key_order, load_rows, row_vector, store_rows
from .walk import clamp_margin, near_keys


@triton.jit
def band_terms(vectors, rows, table, relative, TILE: tl.constexpr):
    """Multiply vectors with a block of table rows; return the terms [M, N] in the columns where from_tiles puts the pairs that
    use them. For rotations in registers return them in the columns that from_tiles takes the pairs from: there they are the
    accumulator of the pairs' products."""
    TERM: tl.constexpr = term_dtype(TILE)
    block = block_of_rows(vectors, rows, table, relative, TILE)
    parts = rotate(cut_terms(block, TILE), TILE)
    if TILE.rotation != "gather":
        parts = in_tiles(parts, TILE)
    return glued(parts, TILE, TERM).to(tl.float32)


@triton.jit(do_not_specialize=["first", "last", "num_sequences", "num_heads"])
def dtable_kernel(
    inputs,
    d_outs,
    d_tables,
    per_query,
    call,
    first,
    last,
    num_sequences,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute partial sums of the gradients of BLOCK_N table rows: d_tables [splits, heads or 1, R, D], that of the bias
    [splits, heads or 1, R]. Any may be None.

    Beyond a clamped table there are keys that dq_kernel, with tiles of its own, does not count as far. They are summed by
    distance in rows of their own: the partial sums have clamp_margin more rows on either side, and then one more for
    dtable_ends_kernel.

    Grid: (row blocks * table heads, splits), row blocks fastest. A program takes every splits-th sequence or, with tables that
    the heads share (ROWS.per_head is false), every splits-th pair of sequence and head.
    """
    VALUE_TILE: tl.constexpr = TILE.value_tile
    MARGIN: tl.constexpr = clamp_margin(ROWS.dq_block_m, ROWS.dq_block_n) if TILE.coverage == "clamp" else 0
    num_blocks = tl.cdiv(last - first + 1 + 2 * MARGIN, TILE.block_n)
    block = tl.program_id(0) % num_blocks
    table_head = tl.program_id(0) // num_blocks if ROWS.per_head else 0
    split, num_splits = tl.program_id(1), tl.num_programs(1)

    tile_m = tl.arange(0, TILE.block_m)
    tile_n = key_order(TILE)
    relative = first - MARGIN + block * TILE.block_n
    # Heads have tables of their own only where ROWS.per_head is true.
    term = Table(
        None if inputs.rel_key is None else head_matrix(inputs.rel_key, 0, table_head, 0, SHAPE.wide_index),
        call.scaling.rel_scale,
        None if inputs.rel_bias is None else head_vector(inputs.rel_bias, table_head),
        call.scaling.bias_scale,
        first,
        last,
    )
    HAS_TERM: tl.constexpr = inputs.rel_key is not None or inputs.rel_bias is not None
    rows = None
    if inputs.rel_key is not None:
        rows = table_rows(term, relative, TILE)
    if inputs.rel_value is not None:
        value_table = Table(head_matrix(inputs.rel_value, 0, table_head, 0, SHAPE.wide_index), None, None, None, first, last)
        value_rows = table_rows(value_table, relative, VALUE_TILE)
    if d_tables.rel_key is not None:
        acc = tl.full([TILE.block_n, SHAPE.block_dr], 0.0, tl.float32)
    if d_tables.rel_value is not None:
        value_acc = tl.full([TILE.block_n, SHAPE.block_dv], 0.0, tl.float32)
    if d_tables.rel_bias is not None:
        # Summed over the queries at the end only, because that sum goes across warps.
        bias_acc = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
    WANTS_SCORES: tl.constexpr = d_tables.rel_key is not None or d_tables.rel_bias is not None
    HAS_VALUE_TERM: tl.constexpr = WANTS_SCORES and inputs.rel_value is not None

    num_units = num_sequences if ROWS.per_head else num_sequences * num_heads
    # Rotations in registers let tiles be so large that there is no register to spare. So terms are the accumulators of products,
    # and addresses and masks are computed anew in each turn (as for some other calls that would spill).
    IN_REGISTERS: tl.constexpr = TILE.rotation != "gather"
    ANEW: tl.constexpr = IN_REGISTERS or (SHAPE.block_d > 64 and (inputs.rel_key is None or SHAPE.block_dr < SHAPE.block_d))
    for unit in tl.range(split, num_units, num_splits, disable_licm=ANEW):
        sequence = unit if ROWS.per_head else (tl.cast(unit, tl.uint32) // tl.cast(num_heads, tl.uint32)).to(tl.int32)
        place = locate(call.sequences, call.window, sequence)
        head = table_head if ROWS.per_head else unit - sequence * num_heads
        head_queries = head_matrix(inputs.query, place.entry, head, place.query_start, SHAPE.wide_index)
        head_keys = head_matrix(inputs.key, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
        head_values = head_matrix(inputs.value, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
        head_d_outs = head_matrix(d_outs, place.entry, head, place.query_start, SHAPE.wide_index)
        if inputs.rel_query is not None:
            head_rel_queries = head_matrix(inputs.rel_query, place.entry, head, place.query_start, SHAPE.wide_index)
        if inputs.rel_p2c is not None:
            p2c_matrix = head_matrix(inputs.rel_p2c, 0, head, 0, SHAPE.wide_index)
            key_table = Table(mirrored(p2c_matrix, first, last), call.scaling.rel_scale, None, None, -last, -first)
        mask = None if inputs.attn_mask is None else head_matrix(inputs.attn_mask, place.entry, head, 0, True)
        scale = exponent_scale(call.scaling, mask)

        # The queries that have a key at one of these relative positions.
        start = tl.maximum(-place.query_offset - relative - (TILE.block_n - 1), 0) // TILE.block_m * TILE.block_m
        stop = tl.minimum(place.num_queries, place.num_keys - place.query_offset - relative)
        if call.window[1] is not None:
            stop = tl.where(relative > call.window[1], 0, stop)
        if call.window[0] is not None:
            stop = tl.where(relative + (TILE.block_n - 1) < -call.window[0], 0, stop)
        for row_start in tl.range(start, stop, TILE.block_m, disable_licm=ANEW):
            offs_m = row_start + tile_m
            valid_m = offs_m < place.num_queries
            query = load_rows(head_queries, row_start, tile_m, valid_m, SHAPE.head_dim, SHAPE.block_d)
            d_out = load_rows(head_d_outs, row_start, tile_m, valid_m, SHAPE.value_dim, SHAPE.block_dv)
            key_start = row_start + place.query_offset + relative
            rel_query = query
            if inputs.rel_query is not None:
                rel_query = load_rows(head_rel_queries, row_start, tile_m, valid_m, SHAPE.rel_dim, SHAPE.block_dr)
            nothing = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
            terms, value_terms = nothing, nothing
            if IN_REGISTERS and HAS_TERM:
                terms = band_terms(rel_query, rows, term, relative, TILE)
            if IN_REGISTERS and HAS_VALUE_TERM:
                value_terms = band_terms(d_out, value_rows, value_table, relative, VALUE_TILE)
            scores_carried, d_probs_carried = empty_band(TILE, tl.float32), empty_band(TILE, tl.float32)
            for ahead in tl.static_range(TILE.block_m // TILE.block_n + 1):
                first_key = key_start + ahead * TILE.block_n
                valid_n = exists(first_key + tile_n, place, call.window)
                key = load_rows(head_keys, first_key, tile_n, valid_n, SHAPE.head_dim, SHAPE.block_d)
                scores = tile_scores(query, key, terms, TILE)
                if inputs.rel_p2c is not None:
                    natural_key = natural_keys(key, head_keys, first_key, place, call.window, TILE, SHAPE)
                    scores += key_terms(natural_key, key_table, relative + ahead * TILE.block_n, TILE)
                scores, scores_carried = from_tiles(scores, scores_carried, TILE, tl.float32)
                if WANTS_SCORES:
                    value = load_rows(head_values, first_key, tile_n, valid_n, SHAPE.value_dim, SHAPE.block_dv)
                    d_probs = tile_scores(d_out, value, value_terms, TILE)
                    d_probs, d_probs_carried = from_tiles(d_probs, d_probs_carried, TILE, tl.float32)
            scores = glued(scores, TILE, tl.float32)
            if not IN_REGISTERS and HAS_TERM:
                scores += band_terms(rel_query, rows, term, relative, TILE)
            first_keys = offs_m + (place.query_offset + relative)
            low, high = visible_band(offs_m, first_keys, relative, place, call.window)
            if TILE.coverage == "clamp":
                rows_start = offs_m // ROWS.dq_block_m * ROWS.dq_block_m
                near_start, near_stop = near_keys(
                    rows_start, first, last, place.query_offset, ROWS.dq_block_m, ROWS.dq_block_n, TILE
                )
                low, high = tl.maximum(low, near_start - first_keys), tl.minimum(high, near_stop - first_keys)
            # Queries that do not exist are excluded here. As rows of zeros, they would turn a table row of NaN into NaN for all.
            seen = band_within(low, high, TILE)
            offs_n = first_keys[:, None] + band_column(TILE)
            scores, seen, slope = apply_softcap_and_mask(scores, seen, offs_m[:, None], offs_n, mask, call.scaling)
            row_max, log_sum = load_softmax_stats(per_query.softmax_stats, place, head, offs_m, valid_m)
            probs = probabilities(scores, seen, scale, row_max, log_sum)
            keep = None
            if call.dropout.seed is not None:
                keep = keep_mask(call.dropout, place.batch, head, offs_m[:, None], offs_n)

            if d_tables.rel_value is not None:
                kept_probs = probs if call.dropout.seed is None else tl.where(keep, probs, 0.0)
                kept_band = rotated_tile(kept_probs, TILE, query.dtype, BACK=True)
                # [N, M] @ [M, Dv] -> [N, Dv]
                value_acc = tl.dot(tl.trans(kept_band), d_out, value_acc, input_precision=TILE.precision)
            if WANTS_SCORES:
                d_probs = glued(d_probs, TILE, tl.float32)
                if not IN_REGISTERS and HAS_VALUE_TERM:
                    d_probs += band_terms(d_out, value_rows, value_table, relative, VALUE_TILE)
                delta = row_vector(per_query.deltas, place.entry, head, place.query_start)
                delta = tl.load(delta + offs_m, mask=valid_m, other=0.0)
                d_scores = score_gradients(probs, d_probs, delta, seen, keep, call, HAS_VALUE_TERM)
                if call.scaling.softcap is not None:
                    d_scores *= slope
                # Rotating 16 bits takes half the shuffles. With a bias it is float32: its gradient is summed before rounding.
                d_band = rotated_tile(d_scores, TILE, query.dtype if d_tables.rel_bias is None else tl.float32, BACK=True)
                if d_tables.rel_bias is not None:
                    bias_acc += d_band
                if d_tables.rel_key is not None:
                    # [N, M] @ [M, Dr] -> [N, Dr]
                    acc = tl.dot(tl.trans(d_band.to(query.dtype)), rel_query, acc, input_precision=TILE.precision)

    row = relative - first + MARGIN
    valid = relative + tile_n <= last + MARGIN
    row = row + 1 if TILE.coverage == "clamp" else row
    if d_tables.rel_key is not None:
        store_rows(
            head_matrix(d_tables.rel_key, split, table_head, 0, SHAPE.wide_index),
            row,
            tile_n,
            valid,
            acc * rel_unit(call.scaling),
            SHAPE.rel_dim,
            SHAPE.block_dr,
        )
    if d_tables.rel_value is not None:
        if call.dropout.seed is not None:
            value_acc *= tl.cast(call.dropout.keep_scale, tl.float32)
        d_rel_values = head_matrix(d_tables.rel_value, split, table_head, 0, SHAPE.wide_index)
        store_rows(d_rel_values, row, tile_n, valid, value_acc, SHAPE.value_dim, SHAPE.block_dv)
    if d_tables.rel_bias is not None:
        tl.store(row_vector(d_tables.rel_bias, split, table_head, row) + tile_n, tl.sum(bias_acc, axis=0), mask=valid)


def launch_dtable(
    call: Call,
    tile: TileConfig,
    per_query: PerQuery,
    d_out: torch.Tensor,
    d_tables: TableGradients,
    rows: TableRows,
    grid: tuple[int, int],
) -> None:
    """Launch dtable_kernel; see there."""
    call.launch(
        "dtable",
        dtable_kernel,
        tile,
        grid,
        d_outs=strided(d_out),
        d_tables=d_tables,
        per_query=per_query,
        num_sequences=call.num_sequences,
        ROWS=rows,
    )

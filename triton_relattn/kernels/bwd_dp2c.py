"""Backward, fourth kernel: the gradient of the table that meets the keys.

A program owns a block of the table's rows and walks the keys: the dtable kernel with queries and keys exchanged. For each block
of keys it computes the two tiles of queries that the rows belong to, and takes of each the half that does. No two programs add to
the same number.
"""

import torch
import triton
import triton.language as tl

from .arguments import Call, PerQuery, TableGradients, TableRows, cdiv, strided
from .band import whole_tile
from .configs import TileConfig
from .dropout import keep_mask
from .key_terms import key_terms, keys_at, mirrored, natural_keys, near_queries, rotate_columns
from .masking import exists, locate, visible
from .scores import (
    apply_softcap_and_mask,
    exponent_scale,
    load_softmax_stats,
    probabilities,
    rel_unit,
    score_gradients,
    tile_scores,
)
from .table import Table
from .tiles import head_matrix, head_vector, key_order, load_rows, row_vector, store_rows


@triton.jit(do_not_specialize=["first", "last", "num_sequences", "num_heads"])
def dp2c_kernel(
    inputs,
    d_outs,
    d_rel_p2c,
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
    """Compute partial sums [splits, heads or 1, R, D] of BLOCK_M rows of rel_p2c's gradient.

    Beyond a clamped table there are queries that dkv_kernel does not count as far: as in dtable_kernel, they are summed by
    distance in ROWS.p2c_margin more rows on either side, and there is one more for dtable_ends_kernel.

    Grid: (row blocks * table heads, splits), row blocks fastest. A program takes every splits-th sequence; with a table that the
    heads share (ROWS.per_head is false), every splits-th pair of sequence and head.
    """
    VALUE_TILE: tl.constexpr = TILE.value_tile
    MARGIN: tl.constexpr = ROWS.p2c_margin if TILE.coverage == "clamp" else 0
    num_blocks = tl.cdiv(last - first + 1 + 2 * MARGIN, TILE.block_m)
    highest = last + MARGIN - tl.program_id(0) % num_blocks * TILE.block_m  # relative position of the first row; they fall
    table_head = tl.program_id(0) // num_blocks if ROWS.per_head else 0
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    tile_m = tl.arange(0, TILE.block_m)
    tile_n = key_order(TILE)
    acc = tl.full([TILE.block_m, SHAPE.block_d], 0.0, tl.float32)

    HAS_TERM: tl.constexpr = inputs.rel_key is not None or inputs.rel_bias is not None
    num_units = num_sequences if ROWS.per_head else num_sequences * num_heads
    for unit in tl.range(split, num_units, num_splits):
        sequence = unit if ROWS.per_head else (tl.cast(unit, tl.uint32) // tl.cast(num_heads, tl.uint32)).to(tl.int32)
        place = locate(call.sequences, call.window, sequence)
        head = table_head if ROWS.per_head else unit - sequence * num_heads
        head_queries = head_matrix(inputs.query, place.entry, head, place.query_start, SHAPE.wide_index)
        head_keys = head_matrix(inputs.key, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
        head_values = head_matrix(inputs.value, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
        head_d_outs = head_matrix(d_outs, place.entry, head, place.query_start, SHAPE.wide_index)
        if inputs.rel_query is not None:
            head_rel_queries = head_matrix(inputs.rel_query, place.entry, head, place.query_start, SHAPE.wide_index)
        mask = None if inputs.attn_mask is None else head_matrix(inputs.attn_mask, place.entry, head, 0, True)
        scale = exponent_scale(call.scaling, mask)
        term = Table(
            None if inputs.rel_key is None else head_matrix(inputs.rel_key, 0, head, 0, SHAPE.wide_index),
            call.scaling.rel_scale,
            None if inputs.rel_bias is None else head_vector(inputs.rel_bias, head),
            call.scaling.bias_scale,
            first,
            last,
        )
        if inputs.rel_value is not None:
            value_table = Table(head_matrix(inputs.rel_value, 0, head, 0, SHAPE.wide_index), None, None, None, first, last)
        p2c_matrix = head_matrix(inputs.rel_p2c, 0, head, 0, SHAPE.wide_index)
        key_table = Table(mirrored(p2c_matrix, first, last), call.scaling.rel_scale, None, None, -last, -first)

        start, stop = keys_at(highest, place.first_key, place.num_keys, place, call.window, TILE)
        for key_start in tl.range(start, stop, TILE.block_n):
            offs_n = key_start + tile_n
            valid_n = exists(offs_n, place, call.window)
            key = load_rows(head_keys, key_start, tile_n, valid_n, SHAPE.head_dim, SHAPE.block_d)
            value = load_rows(head_values, key_start, tile_n, valid_n, SHAPE.value_dim, SHAPE.block_dv)
            natural_key = natural_keys(key, head_keys, key_start, place, call.window, TILE, SHAPE)
            d_tile = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
            for ahead in tl.static_range(2):
                row_start = key_start - place.query_offset - highest + ahead * TILE.block_m
                relative = highest - ahead * TILE.block_m
                offs_m = row_start + tile_m
                valid_m = (offs_m >= 0) & (offs_m < place.num_queries)
                query = load_rows(head_queries, row_start, tile_m, valid_m, SHAPE.head_dim, SHAPE.block_d)
                d_out = load_rows(head_d_outs, row_start, tile_m, valid_m, SHAPE.value_dim, SHAPE.block_dv)
                scores = key_terms(natural_key, key_table, relative, TILE)
                if HAS_TERM:
                    rel_query = query
                    if inputs.rel_query is not None:
                        rel_query = load_rows(head_rel_queries, row_start, tile_m, valid_m, SHAPE.rel_dim, SHAPE.block_dr)
                    scores += whole_tile(rel_query, term, relative, TILE)
                scores = tile_scores(query, key, scores, TILE)
                belongs = tile_m[:, None] >= tile_n[None, :] if ahead == 0 else tile_m[:, None] < tile_n[None, :]
                seen = visible(offs_m[:, None], offs_n[None, :], place, call.window) & valid_m[:, None] & belongs
                if TILE.coverage == "clamp":
                    start_m, stop_m = near_queries(offs_n[None, :], first, last, place, ROWS, TILE)
                    seen = seen & (offs_m[:, None] >= start_m) & (offs_m[:, None] < stop_m)
                scores, seen, slope = apply_softcap_and_mask(scores, seen, offs_m[:, None], offs_n[None, :], mask, call.scaling)
                row_max, log_sum = load_softmax_stats(per_query.softmax_stats, place, head, offs_m, valid_m)
                probs = probabilities(scores, seen, scale, row_max, log_sum)
                d_probs = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
                if inputs.rel_value is not None:
                    d_probs = whole_tile(d_out, value_table, relative, VALUE_TILE)
                d_probs = tile_scores(d_out, value, d_probs, TILE)
                keep = None
                if call.dropout.seed is not None:
                    keep = keep_mask(call.dropout, place.batch, head, offs_m[:, None], offs_n[None, :])
                delta = row_vector(per_query.deltas, place.entry, head, place.query_start)
                delta = tl.load(delta + offs_m, mask=valid_m, other=0.0)
                d_scores = score_gradients(probs, d_probs, delta, seen, keep, call, inputs.rel_value is not None)
                if call.scaling.softcap is not None:
                    d_scores *= slope
                d_tile = tl.where(belongs, d_scores, d_tile)
            d_band = rotate_columns(d_tile.to(key.dtype), TILE)
            # [M, N] @ [N, D] -> [M, D]
            acc = tl.dot(d_band, key, acc, input_precision=TILE.precision)

    d_rel_p2c = head_matrix(d_rel_p2c, split, table_head, 0, SHAPE.wide_index)
    row, valid = highest - first + MARGIN, highest - tile_m >= first - MARGIN
    row = row + 1 if TILE.coverage == "clamp" else row
    store_rows(d_rel_p2c, row, -tile_m, valid, acc * rel_unit(call.scaling), SHAPE.head_dim, SHAPE.block_d)


def launch_dp2c(
    call: Call, tile: TileConfig, per_query: PerQuery, d_out: torch.Tensor, d_tables: TableGradients, rows: TableRows
) -> None:
    """Launch dp2c_kernel; see there."""
    assert d_tables.rel_p2c is not None
    splits, table_heads, num_rows, _ = d_tables.rel_p2c[0].shape
    num_rows -= 2 * (call.coverage == "clamp")  # the rows of dtable_ends_kernel
    call.launch(
        "dp2c",
        dp2c_kernel,
        tile,
        (cdiv(num_rows, tile.block_m) * table_heads, splits),
        d_outs=strided(d_out),
        d_rel_p2c=d_tables.rel_p2c,
        per_query=per_query,
        num_sequences=call.num_sequences,
        ROWS=rows,
    )

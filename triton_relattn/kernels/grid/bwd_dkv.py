"""Backward on a grid, second kernel: a program owns a tile of keys and loops over all queries."""

import torch
import triton
import triton.language as tl

from ..call import PerQuery, strided
from ..config.selection import TileConfig
from ..tile.addressing import head_matrix, load_rows, row_vector, store_rows
from ..tile.dropout import keep_mask
from ..tile.masking import locate
from ..tile.scores import LN_2, exponent_scale, load_softmax_stats, probabilities, score_gradients, tile_scores
from .call import GridCall
from .tile import block_at, key_blocks, load_column_terms, load_row_terms, strip_at, tile_keys, with_terms


@triton.jit(do_not_specialize=["num_heads"])
def grid_dkv_kernel(
    inputs,
    d_outs,
    d_keys,
    d_values,
    per_query,
    call,
    key_grid,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    CUT: tl.constexpr,
):
    """Compute d_key and d_value of a tile of keys of one head. d_keys or d_values may be None.

    Grid: (tiles of keys * batch * heads,), tiles fastest.
    """
    num_blocks = key_blocks(key_grid, CUT)
    head = tl.program_id(0) // num_blocks % num_heads
    place = locate(call.sequences, call.window, tl.program_id(0) // num_blocks // num_heads)
    number, line = block_at(tl.program_id(0) % num_blocks, key_grid, CUT)
    strip = strip_at(number, key_grid, place.num_keys, CUT)
    start, rows, valid_n = tile_keys(strip, line, CUT)
    offs_n = start + rows

    tile_m = tl.arange(0, TILE.block_m)
    keys = head_matrix(inputs.key, place.entry, head, 0, SHAPE.wide_index)
    key = load_rows(keys, start, rows, valid_n, SHAPE.head_dim, SHAPE.block_d)
    queries = head_matrix(inputs.query, place.entry, head, 0, SHAPE.wide_index)
    d_outs = head_matrix(d_outs, place.entry, head, 0, SHAPE.wide_index)
    deltas = row_vector(per_query.deltas, place.entry, head, 0)
    if d_keys is not None:
        values = head_matrix(inputs.value, place.entry, head, 0, SHAPE.wide_index)
        value = load_rows(values, start, rows, valid_n, SHAPE.value_dim, SHAPE.block_dv)
        d_key = tl.full([TILE.block_n, SHAPE.block_d], 0.0, tl.float32)
    if d_values is not None:
        d_value = tl.full([TILE.block_n, SHAPE.block_dv], 0.0, tl.float32)
    nothing = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
    scale = exponent_scale(call.scaling, None)

    for row_start in tl.range(0, place.num_queries, TILE.block_m):
        offs_m = row_start + tile_m
        valid_m = offs_m < place.num_queries
        query = load_rows(queries, row_start, tile_m, valid_m, SHAPE.head_dim, SHAPE.block_d)
        of_columns = load_column_terms(key_grid, place.entry, head, strip, offs_m, valid_m, CUT)
        of_rows = load_row_terms(key_grid, place.entry, head, strip, line, offs_m, valid_m, CUT)
        row_max, log_sum = load_softmax_stats(per_query.softmax_stats, place, head, offs_m, valid_m)
        scores = tile_scores(query, key, nothing, TILE)
        scores = with_terms(scores, of_rows, of_columns, CUT)
        probs = probabilities(scores, valid_m[:, None] & valid_n[None, :], scale, row_max, log_sum)
        keep = None
        if call.dropout.seed is not None:
            keep = keep_mask(call.dropout, place.batch, head, offs_m[:, None], offs_n[None, :])
        d_out = load_rows(d_outs, row_start, tile_m, valid_m, SHAPE.value_dim, SHAPE.block_dv)
        if d_keys is not None:
            d_probs = tile_scores(d_out, value, nothing, TILE)
        # This product stands between those of dP and dK, so that the matrix units have work while dS is computed.
        if d_values is not None:
            kept_probs = probs if call.dropout.seed is None else tl.where(keep, probs, 0.0)
            # [N, M] @ [M, Dv] -> [N, Dv]
            d_value = tl.dot(tl.trans(kept_probs.to(d_out.dtype)), d_out, d_value, input_precision=TILE.precision)
        if d_keys is not None:
            delta = tl.load(deltas + offs_m, mask=valid_m, other=0.0)
            d_scores = score_gradients(probs, d_probs, delta, None, keep, call, False).to(query.dtype)
            # [N, M] @ [M, D] -> [N, D]
            d_key = tl.dot(tl.trans(d_scores), query, d_key, input_precision=TILE.precision)

    if d_keys is not None:
        unit = tl.cast(call.scaling.base_2_scale, tl.float32) * LN_2
        d_keys = head_matrix(d_keys, place.entry, head, 0, SHAPE.wide_index)
        store_rows(d_keys, start, rows, valid_n, d_key * unit, SHAPE.head_dim, SHAPE.block_d)
    if d_values is not None:
        if call.dropout.seed is not None:
            d_value *= tl.cast(call.dropout.keep_scale, tl.float32)
        d_values = head_matrix(d_values, place.entry, head, 0, SHAPE.wide_index)
        store_rows(d_values, start, rows, valid_n, d_value, SHAPE.value_dim, SHAPE.block_dv)


def launch_grid_dkv(
    call: GridCall,
    tile: TileConfig,
    per_query: PerQuery,
    d_out: torch.Tensor,
    d_key: torch.Tensor | None,
    d_value: torch.Tensor | None,
) -> None:
    """Launch grid_dkv_kernel for all keys; see there."""
    call.launch(
        "dkv",
        grid_dkv_kernel,
        tile,
        (call.key_tiles(tile.block_n) * call.num_sequences * call.heads,),
        d_outs=strided(d_out),
        d_keys=strided(d_key),
        d_values=strided(d_value),
        per_query=per_query,
    )

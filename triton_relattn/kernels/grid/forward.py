"""Attention on a grid, forward: online softmax over tiles of keys, whose scores begin with their terms."""

import torch
import triton
import triton.language as tl

from ..._core.spec import GridTensors
from ..call import cdiv
from ..config.tile_config import TileConfig
from ..draft import Draft
from ..plan import Key, Template, find
from ..tile.blocks import head_matrix, keep_mask, load_rows, locate_queries, store_past_future, store_rows
from ..tile.logits import exponent_scale, settled, softmax_update, tile_scores
from .call import GridCall
from .tile import first_strip, load_column_terms, load_row_terms, strip_at, tile_keys, with_terms


@triton.jit(do_not_specialize=["num_heads"])
def grid_forward_kernel(
    inputs, outs, softmax_stats, common, key_grid, num_heads, SHAPE: tl.constexpr, TILE: tl.constexpr, CUT: tl.constexpr
):
    """Compute out of BLOCK_M queries of one head, and their statistics, as forward_kernel has them. key_grid: tile.Grid.

    Grid: (query blocks * batch * heads,), query blocks fastest.
    """
    # The block's queries [M, D]
    row_start, head, place = locate_queries(common.sequences, common.window, num_heads, TILE.block_m)
    tile_m = tl.arange(0, TILE.block_m)
    offs_m = row_start + tile_m
    valid_m = offs_m < place.num_queries
    keys = head_matrix(inputs.key, place.entry, head, 0, SHAPE.wide_index)
    values = head_matrix(inputs.value, place.entry, head, 0, SHAPE.wide_index)
    queries = head_matrix(inputs.query, place.entry, head, 0, SHAPE.wide_index)
    query = load_rows(queries, row_start, tile_m, valid_m, SHAPE.head_dim, SHAPE.block_d)

    # State of the online softmax: maximum and sum [M], out [M, Dv], not yet divided by the sum
    row_max = tl.full([TILE.block_m], -float("inf"), tl.float32)
    row_sum = tl.full([TILE.block_m], 0.0, tl.float32)
    acc = settled(tl.full([TILE.block_m, SHAPE.block_dv], 0.0, tl.float32))
    nothing = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
    scale = exponent_scale(common.scaling, None)

    # Strip by strip, whose tiles share the terms by column [M, columns]; tile by tile, each with terms by row [M, lines]
    for number in range(first_strip(key_grid), key_grid.strips):
        strip = strip_at(number, key_grid, place.num_keys, CUT)
        column_terms = load_column_terms(key_grid, place.entry, head, strip, offs_m, valid_m, CUT)
        for line in tl.range(0, strip.lines, CUT.lines):
            row_terms = load_row_terms(key_grid, place.entry, head, strip, line, offs_m, valid_m, CUT)
            start, rows, valid_n = tile_keys(strip, line, CUT)
            # S = Q K^T [M, N], and the terms
            key = load_rows(keys, start, rows, valid_n, SHAPE.head_dim, SHAPE.block_d)  # [N, D]
            scores = tile_scores(query, key, nothing, TILE)
            scores = with_terms(scores, row_terms, column_terms, CUT)
            if not CUT.is_even:
                scores = tl.where(valid_n[None, :], scores, -float("inf"))
            # P = exp(S - maximum) [M, N]; sums so far are rescaled if the maximum moves.
            probs, row_max, row_sum, rescale = softmax_update(scores, None, row_max, row_sum, scale)
            # Dropout, after the sum of the row: the softmax is that of all keys. Its factor comes at the end.
            if common.dropout.seed is not None:
                offs_n = start + rows
                probs = tl.where(keep_mask(common.dropout, place.batch, head, offs_m[:, None], offs_n[None, :]), probs, 0.0)
            # out += P V
            value = load_rows(values, start, rows, valid_n, SHAPE.value_dim, SHAPE.block_dv)  # [N, Dv]
            # [M, N] @ [N, Dv] -> [M, Dv]
            acc = tl.dot(probs.to(value.dtype), value, acc * rescale[:, None], input_precision=TILE.precision)

    # Divide by the sum, and store: out [M, Dv], and for the backward the maximum and log2 of the sum, [M] each.
    acc /= row_sum[:, None]
    if common.dropout.seed is not None:
        acc *= tl.cast(common.dropout.keep_scale, tl.float32)
    outs = head_matrix(outs, place.entry, head, 0, SHAPE.wide_index)
    store_rows(outs, row_start, tile_m, valid_m, acc, SHAPE.value_dim, SHAPE.block_dv)
    store_past_future(softmax_stats, place.entry, head, place.query_start, offs_m, valid_m, row_max, tl.log2(row_sum))


def forward(tensors: GridTensors, scale: float, dropout_p: float, config: TileConfig | None = None) -> list[torch.Tensor | None]:
    """Return out (B, H, Nq, Dv) in query's dtype, and statistics for the backward as forward.forward has them."""
    return find(plan_forward, tensors, (scale, dropout_p, config))(*tensors)


def plan_forward(key: Key) -> Template:
    """Decide how to compute what forward returns."""
    draft = Draft(key)
    tensors, (scale, dropout_p, config) = GridTensors(*draft.given), key.options
    query = tensors.query
    out = draft.new((*query.shape[:3], tensors.value.shape[3]), query.dtype)
    softmax_stats = draft.new((*query.shape[:2], 2, query.shape[2]), torch.float32)
    if out.numel() > 0:
        call = GridCall(draft, tensors, scale, dropout_p, (out,))
        tile = call.tile("forward", config)
        programs = cdiv(query.shape[2], tile.block_m) * call.num_sequences * call.heads
        call.launch("forward", grid_forward_kernel, tile, (programs,), outs=out.strided, softmax_stats=softmax_stats.strided)
    return draft.compile(out, softmax_stats)

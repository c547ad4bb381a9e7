"""The forward kernel and its launcher: online softmax over key tiles with the relative terms from the rotating band."""

import torch
import triton
import triton.language as tl

from .._core.dtypes import new_like
from .._core.spec import AttentionSpec, AttentionTensors
from .arguments import Call, cdiv, strided, with_aligned_operands, with_positive_scale
from .band import add_tile, blocks_before, next_terms
from .configs import TileConfig
from .dropout import kept
from .fitting import until_it_fits
from .masking import exists, first_key, last_key, locate, visible
from .scores import LN_2, exponent_scale, finished, softmax_update, tile_scores
from .table import Table, add_end_rows, far_terms, reached_positions, reached_rows
from .tiles import head_matrix, head_vector, key_order, load_rows, row_vector, side_vector, store_rows
from .walk import FAR, NEAR, near_keys, part_range, walk_position


@triton.jit(do_not_specialize=["first", "last", "num_heads"])
def forward_kernel(
    queries,
    keys,
    values,
    rel_queries,
    rel_keys,
    rel_values,
    rel_bias,
    attn_mask,
    outs,
    lses,
    statistics,
    sequences,
    window,
    dropout,
    scaling,
    first,
    last,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    REL_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_DR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROTATION: tl.constexpr,
    WARPS: tl.constexpr,
    CARRY: tl.constexpr,
    OUTSIDE: tl.constexpr,
    ROUND_TERMS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDE_INDEX: tl.constexpr,
):
    """out and lse of BLOCK_M queries of one head, and what the backward makes probabilities of: statistics [B, H, 2, Nq], the
    maximum of a query's scores and the base-2 logarithm of the sum of its exponentials.

    Grid: (query blocks * batch * heads,), query blocks fastest.
    """
    num_blocks = tl.cdiv(sequences.max_seqlen_q, BLOCK_M)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % num_heads
    place = locate(sequences, window, tl.program_id(0) // num_blocks // num_heads)
    if window[1] is not None:
        block = num_blocks - 1 - block  # the longest walks first
    row_start = block * BLOCK_M
    if sequences.cu_seqlens_q is not None:
        if row_start >= place.num_queries:
            return

    TILE: tl.constexpr = (BLOCK_M, BLOCK_N, ROTATION, WARPS, ROUND_TERMS)
    tile_m = tl.arange(0, BLOCK_M)
    offs_m = row_start + tile_m
    tile_n = key_order(TILE)
    valid_m = offs_m < place.num_queries
    keys = head_matrix(keys, place.entry, head // GROUP, place.key_start, WIDE_INDEX)
    values = head_matrix(values, place.entry, head // GROUP, place.key_start, WIDE_INDEX)
    queries = head_matrix(queries, place.entry, head, place.query_start, WIDE_INDEX)
    query = load_rows(queries, row_start, tile_m, valid_m, HEAD_DIM, BLOCK_D)
    mask = None if attn_mask is None else head_matrix(attn_mask, place.entry, head, 0, True)

    last_query = tl.minimum(row_start + BLOCK_M, place.num_queries) - 1
    key_first = first_key(row_start, place, window, BLOCK_N)
    key_stop = last_key(last_query, place, window)
    near_start = key_first
    near_stop = key_first if OUTSIDE is None else key_stop
    if OUTSIDE == "clamp" or OUTSIDE == "zero":
        near_start, near_stop = near_keys(row_start, first, last, place.query_offset, BLOCK_M, BLOCK_N, OUTSIDE)
        near_start, near_stop = tl.maximum(near_start, key_first), tl.maximum(near_stop, key_first)

    HAS_TERM: tl.constexpr = rel_keys is not None or rel_bias is not None
    rel_query = query
    if rel_queries is not None:
        rel_queries = head_matrix(rel_queries, place.entry, head, place.query_start, WIDE_INDEX)
        rel_query = load_rows(rel_queries, row_start, tile_m, valid_m, REL_DIM, BLOCK_DR)
    term = Table(
        None if rel_keys is None else head_matrix(rel_keys, 0, head, 0, WIDE_INDEX),
        scaling.rel_scale,
        None if rel_bias is None else head_vector(rel_bias, head),
        scaling.bias_scale,
        first,
        last,
    )
    if HAS_TERM and OUTSIDE == "clamp":
        far_past, far_future = far_terms(rel_query, term, REL_DIM, BLOCK_DR, BLOCK_M, ROUND_TERMS, INPUT_PRECISION)
    if rel_values is not None:
        value_table = Table(head_matrix(rel_values, 0, head, 0, WIDE_INDEX), None, None, None, first, last)
        lowest, highest = reached_positions(row_start, last_query, place, window)
        reached = reached_rows(value_table, lowest, highest, OUTSIDE)

    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    past, future = row_sum, row_sum  # of what is kept of the probabilities of far keys
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    scale = exponent_scale(scaling, mask)

    for PART in tl.static_range(NEAR if OUTSIDE == "none" else FAR, FAR + 1 if OUTSIDE is None else NEAR + 1):
        start, stop = part_range(PART, key_first, key_stop, near_start, near_stop)
        if PART == NEAR and HAS_TERM:
            relative = start - row_start - place.query_offset
            carried = blocks_before(rel_query, term, relative, REL_DIM, BLOCK_DR, TILE, OUTSIDE, INPUT_PRECISION, CARRY)

        for position in tl.range(start, stop, BLOCK_N):
            key_start = walk_position(PART, position, near_start, near_stop, OUTSIDE)
            offs_n = key_start + tile_n
            valid_n = exists(offs_n, place, window)
            relative = key_start - row_start - place.query_offset
            if PART == NEAR and HAS_TERM:
                scores, carried = next_terms(
                    rel_query, term, carried, relative, REL_DIM, BLOCK_DR, TILE, OUTSIDE, INPUT_PRECISION, CARRY
                )
            else:
                scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if PART == FAR and HAS_TERM and OUTSIDE == "clamp":
                far = tl.where(key_start < near_start, far_past, far_future)
                scores = tl.broadcast_to(far[:, None], (BLOCK_M, BLOCK_N))
            key = load_rows(keys, key_start, tile_n, valid_n, HEAD_DIM, BLOCK_D)
            scores = tile_scores(query, key, scores, INPUT_PRECISION)
            seen = visible(offs_m[:, None], offs_n[None, :], place, window)
            if mask is not None:
                seen = seen & valid_m[:, None]
            scores, seen, _ = finished(scores, seen, offs_m[:, None], offs_n[None, :], mask, scaling)
            scores = tl.where(seen, scores, -float("inf"))
            probs, row_max, row_sum, rescale = softmax_update(scores, row_max, row_sum, scale)
            if dropout is not None:
                probs = tl.where(kept(dropout, place.batch, head, offs_m[:, None], offs_n[None, :]), probs, 0.0)
            value = load_rows(values, key_start, tile_n, valid_n, VALUE_DIM, BLOCK_DV)
            # [M, N] @ [N, Dv] -> [M, Dv]
            acc = tl.dot(probs.to(value.dtype), value, acc * rescale[:, None], input_precision=INPUT_PRECISION)
            if rel_values is not None:
                if OUTSIDE == "clamp":
                    past, future = past * rescale, future * rescale
                if PART == NEAR:
                    acc = add_tile(acc, probs, reached, relative, VALUE_DIM, BLOCK_DV, TILE, OUTSIDE, INPUT_PRECISION)
                elif OUTSIDE == "clamp":
                    kept_sum = tl.sum(probs, axis=1)
                    past += tl.where(key_start < near_start, kept_sum, 0.0)
                    future += tl.where(key_start < near_start, 0.0, kept_sum)

    if rel_values is not None and OUTSIDE == "clamp":
        acc = add_end_rows(acc, past, future, value_table, lowest, highest, VALUE_DIM, BLOCK_DV)
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # sees nothing: out = 0, and lse = -inf by row_max
    acc /= row_sum[:, None]
    if dropout is not None:
        acc *= tl.cast(dropout.keep_scale, tl.float32)
    outs = head_matrix(outs, place.entry, head, place.query_start, WIDE_INDEX)
    store_rows(outs, row_start, tile_m, valid_m, acc, VALUE_DIM, BLOCK_DV)
    lse = row_vector(lses, place.entry, head, place.query_start)
    log_sum = tl.log2(row_sum)
    tl.store(lse + offs_m, row_max * (scale * LN_2) + log_sum * LN_2, mask=valid_m)
    row_max = tl.where(row_max == -float("inf"), 0.0, row_max)
    tl.store(side_vector(statistics, place.entry, head, 0, place.query_start) + offs_m, row_max, mask=valid_m)
    tl.store(side_vector(statistics, place.entry, head, 1, place.query_start) + offs_m, log_sum, mask=valid_m)


@until_it_fits
def forward(
    tensors: AttentionTensors, spec: AttentionSpec, config: TileConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out (B, H, Nq, Dv) in the inputs' dtype and memory order, lse (B, H, Nq) float32, and statistics for the backward.

    The statistics, (B, H, 2, Nq) float32, are each query's maximum of scores and logarithm of the sum: lse, which is both in one
    number, has no digits left for the sum where logits are large.
    """
    query = tensors.query
    heads, seqlen_q = query.shape[1:3]
    out = new_like(query, tensors.value.shape[-1])
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    statistics = query.new_empty(query.shape[0], heads, 2, seqlen_q, dtype=torch.float32)
    if out.numel() > 0:
        tensors, spec = with_positive_scale(tensors, spec)
        tensors = with_aligned_operands(tensors)
        call = Call(tensors, spec, (out,))
        tile = call.tile("forward", config)
        programs = cdiv(spec.max_seqlen_q, tile.block_m) * call.num_sequences * heads
        call.launch(
            *("forward", forward_kernel, tile, (programs,)),
            *map(strided, (tensors.query, tensors.key, tensors.value, tensors.rel_query)),
            *call.tables,
            *map(strided, (call.attn_mask, out, lse, statistics)),
        )
    return out, lse, statistics

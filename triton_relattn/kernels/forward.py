"""The forward kernel and its launcher: online softmax over key tiles with the relative term from the rotating band."""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..blockwise import new_like
from ..spec import AttentionSpec
from . import configs
from .arguments import call_arguments, strided, tile_arguments
from .band import FAR, NEAR, empty_band, far_scores, near_keys, next_tile, part_range, table_block, walk_position
from .masking import key_length, last_key, visible
from .scores import LN_2, softmax_update, tile_scores
from .tiles import head_matrix, key_order, load_rows, store_rows


@triton.jit
def forward_kernel(
    queries,
    keys,
    values,
    table,
    outs,
    key_lengths_ptr,
    lse_ptr,
    num_heads,
    seqlen_q,
    seqlen_k,
    base_2_scale,
    first,
    last,
    query_offset,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OUTSIDE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDE_INDEX: tl.constexpr,
):
    """out and lse of BLOCK_M queries of one head. Grid: (query blocks * batch * heads,), query blocks fastest."""
    num_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % num_heads
    batch = tl.program_id(0) // num_blocks // num_heads
    if IS_CAUSAL:
        block = num_blocks - 1 - block  # the longest walks first

    row_start = block * BLOCK_M
    tile_m = tl.arange(0, BLOCK_M)
    offs_m = row_start + tile_m
    tile_n = key_order(BLOCK_N)
    valid_m = offs_m < seqlen_q
    keys = head_matrix(keys, batch, head, WIDE_INDEX)
    values = head_matrix(values, batch, head, WIDE_INDEX)
    queries = head_matrix(queries, batch, head, WIDE_INDEX)
    query = load_rows(queries, row_start, tile_m, valid_m, HEAD_DIM, BLOCK_D)

    num_keys = key_length(key_lengths_ptr, batch, seqlen_k)
    key_stop = last_key(tl.minimum(row_start + BLOCK_M, seqlen_q) - 1, num_keys, query_offset, IS_CAUSAL)
    near_start = 0
    near_stop = 0 if OUTSIDE is None else key_stop
    if OUTSIDE is not None:
        table = head_matrix(table, batch, head, WIDE_INDEX)
    if OUTSIDE == "clamp":
        far_past, far_future = far_scores(query, table, first, last, HEAD_DIM, BLOCK_D, INPUT_PRECISION)
    if OUTSIDE == "clamp" or OUTSIDE == "zero":
        near_start, near_stop = near_keys(row_start, first, last, query_offset, BLOCK_M, BLOCK_N, OUTSIDE)

    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    base_2_scale = tl.cast(base_2_scale, tl.float32)

    for PART in tl.static_range(NEAR if OUTSIDE == "none" else FAR, FAR + 1 if OUTSIDE is None else NEAR + 1):
        start, stop = part_range(PART, 0, key_stop, near_start, near_stop)
        if PART == NEAR:
            carried = empty_band(BLOCK_M, BLOCK_N)
            for ago in tl.static_range(BLOCK_M // BLOCK_N, 0, -1):
                relative = start - ago * BLOCK_N - row_start - query_offset
                band = table_block(query, table, relative, first, last, HEAD_DIM, BLOCK_D, BLOCK_N, OUTSIDE, INPUT_PRECISION)
                _, carried = next_tile(band, carried, BLOCK_M, BLOCK_N)

        for position in tl.range(start, stop, BLOCK_N):
            key_start = walk_position(PART, position, near_start, near_stop, OUTSIDE)
            offs_n = key_start + tile_n
            valid_n = offs_n < num_keys
            if PART == NEAR:
                relative = key_start - row_start - query_offset
                band = table_block(query, table, relative, first, last, HEAD_DIM, BLOCK_D, BLOCK_N, OUTSIDE, INPUT_PRECISION)
                scores, carried = next_tile(band, carried, BLOCK_M, BLOCK_N)
            elif OUTSIDE == "clamp":
                far = tl.where(key_start < near_start, far_past, far_future)
                scores = tl.broadcast_to(far[:, None], (BLOCK_M, BLOCK_N))
            else:
                scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            key = load_rows(keys, key_start, tile_n, valid_n, HEAD_DIM, BLOCK_D)
            scores = tile_scores(query, key, scores, INPUT_PRECISION)
            seen = visible(offs_m[:, None], offs_n[None, :], num_keys, query_offset, IS_CAUSAL)
            scores = tl.where(seen, scores, -float("inf"))
            probs, row_max, row_sum, rescale = softmax_update(scores, row_max, row_sum, base_2_scale)
            value = load_rows(values, key_start, tile_n, valid_n, VALUE_DIM, BLOCK_DV)
            # [M, N] @ [N, Dv] -> [M, Dv]
            acc = tl.dot(probs.to(value.dtype), value, acc * rescale[:, None], input_precision=INPUT_PRECISION)

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # sees nothing: out = 0, and lse = -inf by row_max
    outs = head_matrix(outs, batch, head, WIDE_INDEX)
    store_rows(outs, row_start, tile_m, valid_m, acc / row_sum[:, None], VALUE_DIM, BLOCK_DV)
    lse = lse_ptr + (batch * num_heads + head).to(tl.int64) * seqlen_q
    tl.store(lse + offs_m, row_max * base_2_scale * LN_2 + tl.log(row_sum), mask=valid_m)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    spec: AttentionSpec,
    config: configs.TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B, H, Nq, Dv) in the inputs' dtype and memory order, lse (B, H, Nq) float32."""
    batch, heads, seqlen_q, head_dim = query.shape
    value_dim = value.shape[-1]
    out = new_like(query, value_dim)
    lse = query.new_empty(batch, heads, seqlen_q, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse

    if spec.scale <= 0:  # rare, and exact: the kernel takes positive scales
        query = -query if spec.scale else torch.zeros_like(query)
    table = None if rel_key is None else rel_key.expand(batch, heads, -1, -1)  # a view: shared tables have stride 0
    arguments = call_arguments(query, value, table, replace(spec, scale=abs(spec.scale or 1.0)), (query, key, value, out))
    arch = configs.architecture(query.device)
    if config is None:
        config = configs.select("forward", arch, query.dtype, head_dim, value_dim, arguments["OUTSIDE"], spec.is_causal)
    elif reason := config.why_invalid(arch, rel_key is not None):
        raise ValueError(f"{config} is not valid on {arch}: {reason}")
    forward_kernel[(triton.cdiv(seqlen_q, config.block_m) * batch * heads,)](
        strided(query),
        strided(key),
        strided(value),
        strided(table),
        strided(out),
        key_lengths,
        lse,
        **arguments,
        **tile_arguments(config),
    )
    return out, lse

"""Few queries and many keys: several programs share the keys of a block of queries, and one more kernel merges their results.

Without that, a step of decoding would keep no more than one multiprocessor busy per head and sequence (Dao et al.,
"Flash-Decoding", 2023).
"""

import triton
import triton.language as tl

from .call import Call, cdiv
from .config.tile_config import TileConfig
from .draft import Slot, strided
from .tile.blocks import head_matrix, load_rows, row_vector, side_vector, store_past_future, store_rows
from .tile.logits import LN_2, exponent_scale

LEAST_KEYS = 1024  # keys of a program, at least: for fewer, merging takes longer than it saves
BLOCK_M = 16


@triton.jit
def split_range(key_first, key_stop, near_start, near_stop, TILE: tl.constexpr):
    """Return blocks.key_range for program_id(1) of the num_programs(1) programs that share the keys."""
    # As many whole tiles per program
    tiles = tl.cdiv(tl.maximum(key_stop - key_first, 0), TILE.block_n)
    keys = tl.cdiv(tiles, tl.num_programs(1)) * TILE.block_n
    first = tl.minimum(key_first + tl.program_id(1) * keys, key_stop)
    stop = tl.minimum(first + keys, key_stop)
    # Its part of the near tiles, which may be none
    near_start = tl.minimum(tl.maximum(near_start, first), stop)
    near_stop = tl.minimum(tl.maximum(near_stop, first), stop)
    return first, stop, near_start, near_stop


@triton.jit(do_not_specialize=["splits", "num_heads", "num_queries"])
def merge_kernel(
    parts,
    part_statistics,
    outs,
    lses,
    softmax_stats,
    scaling,
    mask,
    splits,
    num_heads,
    num_queries,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Merge out [B, splits * H, Nq, Dv] and softmax_stats [B, splits * H, 2, Nq] of the splits into out, lse, which may be None,
    and softmax_stats.

    Grid: (batch * query blocks, heads).
    """
    blocks = tl.cdiv(num_queries, BLOCK_M)
    row_start, head, entry = tl.program_id(0) % blocks * BLOCK_M, tl.program_id(1), tl.program_id(0) // blocks
    tile_m = tl.arange(0, BLOCK_M)
    offs_m = row_start + tile_m
    valid_m = offs_m < num_queries
    scale = exponent_scale(scaling, mask)

    # The largest of the splits' maxima [M]
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    for split in range(splits):
        maxima = side_vector(part_statistics, entry, head + split * num_heads, 0, 0)
        row_max = tl.maximum(row_max, tl.load(maxima + offs_m, mask=valid_m, other=0.0))
    shift = tl.where(row_max == -float("inf"), 0.0, row_max)
    # A split's out counts by its sum of exponentials, as of the common maximum: weight = exp(part_max - max) * sum [M].
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, BLOCK_WIDTH], 0.0, tl.float32)
    for split in range(splits):
        part = head + split * num_heads
        part_max = tl.load(side_vector(part_statistics, entry, part, 0, 0) + offs_m, mask=valid_m, other=0.0)
        log_sum = tl.load(side_vector(part_statistics, entry, part, 1, 0) + offs_m, mask=valid_m, other=0.0)
        weight = tl.exp2((part_max - shift) * scale + log_sum)
        matrix = head_matrix(parts, entry, part, 0, True)
        # [M, 1] * [M, Dv] -> [M, Dv]
        acc += weight[:, None] * load_rows(matrix, row_start, tile_m, valid_m, WIDTH, BLOCK_WIDTH)
        total += weight

    total = tl.where(total == 0.0, 1.0, total)  # a query that sees nothing
    store_rows(head_matrix(outs, entry, head, 0, True), row_start, tile_m, valid_m, acc / total[:, None], WIDTH, BLOCK_WIDTH)
    log_sum = tl.log2(total)
    if lses is not None:
        tl.store(row_vector(lses, entry, head, 0) + offs_m, row_max * (scale * LN_2) + log_sum * LN_2, mask=valid_m)
    store_past_future(softmax_stats, entry, head, 0, offs_m, valid_m, shift, log_sum)


def num_key_splits(call: Call, tile: TileConfig, programs: int) -> int:
    """Return how many programs share the keys of a block of queries: more than one if all queries of a head are one block, and
    multiprocessors are left beside ``programs``."""
    spec = call.spec
    if spec.max_seqlen_q > tile.block_m:
        return 1
    keys = spec.max_seqlen_k
    if spec.window_left >= 0 and spec.window_right >= 0:
        keys = min(keys, spec.window_left + spec.window_right + tile.block_m)
    return max(1, min(call.draft.key.surroundings.multiprocessors // programs, keys // LEAST_KEYS))


def launch_merge(call: Call, parts: Slot, part_statistics: Slot, out: Slot, lse: Slot | None, softmax_stats: Slot) -> None:
    """Launch merge_kernel; see there."""
    entries, heads, queries, _ = out.shape
    arguments = {
        "parts": parts.strided,
        "part_statistics": part_statistics.strided,
        "outs": out.strided,
        "lses": strided(lse),
        "softmax_stats": softmax_stats.strided,
        "scaling": call.common.scaling,
        "mask": call.inputs.attn_mask,
        "splits": parts.shape[1] // heads,
        "num_heads": heads,
        "num_queries": queries,
        "WIDTH": call.shape.value_dim,
        "BLOCK_WIDTH": call.shape.block_dv,
        "BLOCK_M": BLOCK_M,
    }
    call.draft.launch("merge", merge_kernel, None, (entries * cdiv(queries, BLOCK_M), heads), arguments)

"""The terms that keys have beyond the ends of a clamped rel_p2c: two numbers for each key and head, computed once for a call."""

import torch
import triton
import triton.language as tl

from .call import Call, cdiv, strided
from .config.selection import TileConfig
from .logits import key_table
from .tile.addressing import head_matrix, load_rows, store_sides
from .tile.masking import exists, locate
from .tile.table import far_terms

CONFIG = TileConfig(64, 64, 4, 1)


@triton.jit(do_not_specialize=["first", "last", "num_heads"])
def far_keys_kernel(inputs, far_keys, call, first, last, num_heads, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Store ``k . F[end]`` of BLOCK_N keys of one head, in far_keys [B, H, 2, Nk]: with the first row of rel_p2c, which keys in
    the past meet, and with the last.

    Grid: (key blocks * batch * heads,), key blocks fastest.
    """
    KEY_TILE: tl.constexpr = TILE.key_tile
    num_blocks = tl.cdiv(call.sequences.max_seqlen_k, TILE.block_n)
    key_start = tl.program_id(0) % num_blocks * TILE.block_n
    head = tl.program_id(0) // num_blocks % num_heads
    place = locate(call.sequences, call.window, tl.program_id(0) // num_blocks // num_heads)
    rows = tl.arange(0, TILE.block_n)
    offs_n = key_start + rows
    valid_n = exists(offs_n, place, call.window)
    keys = head_matrix(inputs.key, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
    key = load_rows(keys, key_start, rows, valid_n, SHAPE.head_dim, SHAPE.block_d)
    # As seen from the keys, what comes first is the last row.
    future, past = far_terms(key, key_table(inputs, call, head, first, last, SHAPE, TILE), KEY_TILE)
    store_sides(far_keys, place.entry, head, place.key_start, offs_n, valid_n, past, future)


def launch_far_keys(call: Call, key: torch.Tensor) -> None:
    """Launch far_keys_kernel if there may be keys beyond a clamped rel_p2c, and give its results to the call's kernels."""
    if call.inputs.rel_p2c is None or call.coverage != "clamp":
        return
    far_keys = key.new_empty(key.shape[0], call.heads, 2, key.shape[2], dtype=torch.float32)
    programs = cdiv(call.common.sequences.max_seqlen_k, CONFIG.block_n) * call.num_sequences * call.heads
    call.launch("far_keys", far_keys_kernel, CONFIG, (programs,), far_keys=strided(far_keys))
    call.add_far_keys(far_keys)

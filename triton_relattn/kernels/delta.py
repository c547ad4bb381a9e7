"""Backward, first kernel: numbers of each query that the other kernels need.

delta is rowsum(out * d_out) - d_lse, from out and its residual: what rounding took from it. The gradient of a score is
dS = P * (dP - delta). If delta is off, all dS of a query are off by P times the same number. In the gradient of a table that adds
up. Two roundings have changed out:

* out was rounded. The forward keeps the residual in a tensor of its own.
* P was rounded, to P', for the product with the values: to 16 bits, or to tf32. So the residual is that of sum P' v / sum P',
  whose delta is off by sum (P - P') * (dP - delta) / sum P', no more than rounding dS changes its sum. Division by sum P, as for
  out, would make that error |delta| / |dP - delta| times as large: 17 times in a call with sharp attention.

With a clamped table there are also the terms of keys beyond its ends, with its first and its last row: of each query those that
they add to scores and to dP, and with rel_p2c of each key those of the key itself, for the forward as well (far_keys_kernel).
"""

import triton
import triton.language as tl

from .call import Call, cdiv
from .config.tile_config import TileConfig
from .draft import Slot
from .tile.band import far_terms
from .tile.blocks import exists, head_matrix, load_rows, locate, row_vector, store_past_future
from .tile.logits import key_table, lane_consistent, score_table, value_table

CONFIG = TileConfig(64, 64, 4, 1)
RESIDUAL_SCALE = tl.constexpr(2048.0)
"""Residuals are stored times this, which is at most out itself. Else those of small outs would be below float16's range."""


@triton.jit
def row_products(out, d_out, tile_m, TILE: tl.constexpr):
    """Compute rowsum(out * d_out) [M] of a float32 out [M, Dv]."""
    if d_out.dtype == tl.float32:
        # As dP is computed: if a query sees one key, out is that key's value, and dP - delta is 0, not rounding noise.
        if TILE.precision == "tf32":  # which rounds d_out as for dP, but must not round out
            high = (out.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        else:
            high = out
        # [M, Dv] @ [Dv, M] -> [M, M]
        products = tl.dot(d_out, tl.trans(high), input_precision=TILE.precision)
        # and what is left of out
        if TILE.precision == "tf32":
            products = tl.dot(d_out, tl.trans(out - high), products, input_precision=TILE.precision)
        # The diagonal: [M, M] -> [M]
        delta = tl.sum(tl.where(tile_m[:, None] == tile_m[None, :], products, 0.0), axis=1)
    else:
        # The sum along axis 0 of the transposed: a sum along axis 1 has a layout that took up to 20 more registers in the loop.
        delta = tl.sum(tl.trans(out * d_out.to(tl.float32)), axis=0)  # [Dv, M] -> [M]
    return delta


@triton.jit(do_not_specialize=["num_queries", "first", "last", "num_heads"])
def delta_kernel(
    inputs,
    outs,
    residuals,
    d_outs,
    d_lses,
    per_query,
    num_queries,
    common,
    first,
    last,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute per_query.deltas [B, H, Nq], far_scores and far_values [B, H, 2, Nq] of BLOCK_M queries of a head.

    residuals may be None, and d_lses, zeros. Queries are counted in the tensors: those of a pack follow one another.
    Grid: (query blocks * batch * heads,), query blocks fastest.
    """
    # Queries [M], and their rows of out and d_out [M, Dv]
    blocks = tl.cdiv(num_queries, TILE.block_m)
    row_start, bh = tl.program_id(0) % blocks * TILE.block_m, tl.program_id(0) // blocks
    head, entry = bh % num_heads, bh // num_heads
    tile_m = tl.arange(0, TILE.block_m)
    offs_m = row_start + tile_m
    valid_m = offs_m < num_queries
    outs = head_matrix(outs, entry, head, 0, SHAPE.wide_index)
    out = load_rows(outs, row_start, tile_m, valid_m, SHAPE.value_dim, SHAPE.block_dv)
    d_outs = head_matrix(d_outs, entry, head, 0, SHAPE.wide_index)
    d_out = load_rows(d_outs, row_start, tile_m, valid_m, SHAPE.value_dim, SHAPE.block_dv)
    # out before it was rounded
    exact = out.to(tl.float32)
    if residuals is not None:
        residuals = head_matrix(residuals, entry, head, 0, SHAPE.wide_index)
        residual = load_rows(residuals, row_start, tile_m, valid_m, SHAPE.value_dim, SHAPE.block_dv)
        exact += residual.to(tl.float32) * (1.0 / RESIDUAL_SCALE)
    # rowsum(out * dO) less d_lse [M]
    delta = row_products(exact, d_out, tile_m, TILE)
    if d_lses is not None:
        delta -= tl.load(row_vector(d_lses, entry, head, 0) + offs_m, mask=valid_m, other=0.0)
    delta = lane_consistent(delta, SHAPE.block_dv)
    tl.store(row_vector(per_query.deltas, entry, head, 0) + offs_m, delta, mask=valid_m)

    # Terms with the end rows of a clamped table [M]: with rel_key those of scores, with rel_value those of dP
    if per_query.far_scores is not None:
        if inputs.rel_query is not None:
            queries = head_matrix(inputs.rel_query, entry, head, 0, SHAPE.wide_index)
        else:
            queries = head_matrix(inputs.query, entry, head, 0, SHAPE.wide_index)
        query = load_rows(queries, row_start, tile_m, valid_m, SHAPE.rel_dim, SHAPE.block_dr)  # [M, Dr]
        table = score_table(inputs, common, head, first, last, SHAPE, TILE)
        past, future = far_terms(query, table, TILE)
        store_past_future(per_query.far_scores, entry, head, 0, offs_m, valid_m, past, future)
    if per_query.far_values is not None:
        VALUE_TILE: tl.constexpr = TILE.value_tile
        past, future = far_terms(d_out, value_table(inputs, head, first, last, SHAPE), VALUE_TILE)
        store_past_future(per_query.far_values, entry, head, 0, offs_m, valid_m, past, future)


@triton.jit(do_not_specialize=["first", "last", "num_heads"])
def far_keys_kernel(inputs, far_keys, common, first, last, num_heads, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Store ``k . F[end]`` of BLOCK_N keys of one head, in far_keys [B, H, 2, Nk]: with the first row of rel_p2c, which keys in
    the past meet, and with the last.

    Grid: (key blocks * batch * heads,), key blocks fastest.
    """
    KEY_TILE: tl.constexpr = TILE.key_tile
    # This program's block of keys [N, D]
    num_blocks = tl.cdiv(common.sequences.max_seqlen_k, TILE.block_n)
    key_start = tl.program_id(0) % num_blocks * TILE.block_n
    head = tl.program_id(0) // num_blocks % num_heads
    place = locate(common.sequences, common.window, tl.program_id(0) // num_blocks // num_heads)
    rows = tl.arange(0, TILE.block_n)
    offs_n = key_start + rows
    valid_n = exists(offs_n, place, common.window)
    keys = head_matrix(inputs.key, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
    key = load_rows(keys, key_start, rows, valid_n, SHAPE.head_dim, SHAPE.block_d)
    # As seen from the keys, what comes first is the last row.
    future, past = far_terms(key, key_table(inputs, common, head, first, last, SHAPE, TILE), KEY_TILE)
    store_past_future(far_keys, place.entry, head, place.key_start, offs_n, valid_n, past, future)


def launch_far_keys(call: Call, key: Slot) -> None:
    """Launch far_keys_kernel if there may be keys beyond a clamped rel_p2c, and give its results to the call's kernels."""
    if call.inputs.rel_p2c is None or call.coverage != "clamp":
        return
    far_keys = call.draft.temporary((key.shape[0], call.heads, 2, key.shape[2]))
    programs = cdiv(call.spec.max_seqlen_k, CONFIG.block_n) * call.num_sequences * call.heads
    call.launch("far_keys", far_keys_kernel, CONFIG, (programs,), far_keys=far_keys.strided)
    call.add_far_keys(far_keys)

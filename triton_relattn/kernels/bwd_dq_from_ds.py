"""Backward, in place of the first kernel: the gradient of the query from the dS that the dkv kernel has stored.

    d_query_i = scale (sum_j dS[i, j] k_j + sum_r dS[i, i + r] E[r])

A program owns a block of queries and loops over their keys and relative positions side by side: two products, where the dq
kernel has five. Each dS is read twice, the second time from L2.
"""

import torch
import triton
import triton.language as tl

from .call import Call, cdiv, strided
from .config.selection import TileConfig
from .logits import score_table
from .tile.addressing import head_matrix, load_rows, store_rows
from .tile.masking import exists, first_key, last_key, locate
from .tile.scores import LN_2, rel_unit
from .tile.table import reached_positions, reached_table, table_rows
from .workspace.planning import Part, Plan
from .workspace.stored import load_tile, queries_apart


@triton.jit
def seen_keys(offs_m, place, window, APART: tl.constexpr):
    """Return (low, high), each [M, 1]: the keys whose dS are read. They are those that a query sees, and others beside them,
    whose dS are 0, up to multiples of APART. A query that does not exist has none."""
    low = tl.full(offs_m.shape, 0, tl.int32)
    high = tl.broadcast_to(place.num_keys, offs_m.shape)
    if window[0] is not None:
        low = tl.maximum(offs_m + (place.query_offset - window[0]), 0)
    if window[1] is not None:
        high = tl.minimum(high, offs_m + (place.query_offset + window[1] + 1))
    high = tl.where(offs_m < place.num_queries, tl.maximum(high, 0), 0)
    return (low // APART * APART)[:, None], (tl.cdiv(high, APART) * APART)[:, None]


@triton.jit(do_not_specialize=["first_program", "first", "last", "num_heads"])
def dq_from_ds_kernel(
    inputs,
    ds,
    d_queries,
    d_rel_queries,
    first_program,
    call,
    first,
    last,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Compute d_query and d_rel_query, which may be None, from ds [1, items, Nq, columns], which has all keys of its items, from
    that of the dkv kernel's first_program on. Queries of a block lie queries_apart.

    Grid: (query blocks * items,), query blocks fastest.
    """
    APART: tl.constexpr = queries_apart(ds[0].dtype.element_ty.primitive_bitwidth)
    num_blocks = tl.cdiv(call.sequences.max_seqlen_q, TILE.block_m * APART) * APART
    block = tl.program_id(0) % num_blocks
    if call.window[1] is not None:
        block = num_blocks - 1 - block  # the longest loops first
    number = tl.program_id(0) // num_blocks
    first_item = first_program // tl.cdiv(call.sequences.max_seqlen_k, LAYOUT.dkv_block_n) * SHAPE.group
    head = (first_item + number) % num_heads
    place = locate(call.sequences, call.window, (first_item + number) // num_heads)
    row_start = block // APART * (TILE.block_m * APART)
    rows = block % APART + tl.arange(0, TILE.block_m) * APART
    tile_n = tl.arange(0, TILE.block_n)
    offs_m = row_start + rows
    valid_m = offs_m < place.num_queries
    low, high = seen_keys(offs_m, place, call.window, APART)
    matrix = head_matrix(ds, 0, number, 0, False)

    last_query = tl.minimum(row_start + TILE.block_m * APART, place.num_queries) - 1
    WANTS_BAND: tl.constexpr = (
        inputs.rel_key is not None and (d_queries if inputs.rel_query is None else d_rel_queries) is not None
    )
    # Both products add to one sum, if it has one unit.
    HAS_ONE_SUM: tl.constexpr = d_queries is not None and inputs.rel_query is None and call.scaling.rel_scale is None
    iterations = 0
    if d_queries is not None:
        acc = tl.full([TILE.block_m, SHAPE.block_d], 0.0, tl.float32)
        keys_matrix = head_matrix(inputs.key, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
        start_key = first_key(row_start, place, call.window, TILE.block_n)
        iterations = tl.cdiv(tl.maximum(last_key(last_query, place, call.window) - start_key, 0), TILE.block_n)
    if WANTS_BAND:
        rel_acc = tl.full([TILE.block_m, SHAPE.block_dr], 0.0, tl.float32)
        lowest, highest = reached_positions(row_start, last_query, place, call.window)
        table = reached_table(score_table(inputs, call, head, first, last, SHAPE, TILE), lowest, highest, TILE)
        # dS at the first position of a tile begin at multiples of 16 bytes.
        start_position = lowest - ((block % APART + place.query_offset + lowest) & (APART - 1))
        iterations = tl.maximum(iterations, tl.cdiv(tl.maximum(highest + 1 - start_position, 0), TILE.block_n))
    for iteration in tl.range(iterations):
        if WANTS_BAND:
            relative = start_position + iteration * TILE.block_n
            d_band = load_tile(matrix, offs_m, offs_m + (place.query_offset + relative), 0, low, high, TILE.block_n)
            band_rows = table_rows(table, relative, TILE)
            # [M, N] @ [N, Dr] -> [M, Dr]
            if HAS_ONE_SUM:
                acc = tl.dot(d_band, band_rows, acc, input_precision=TILE.precision)
            else:
                rel_acc = tl.dot(d_band, band_rows, rel_acc, input_precision=TILE.precision)
        if d_queries is not None:
            key_start = start_key + iteration * TILE.block_n
            valid_n = exists(key_start + tile_n, place, call.window)
            d_scores = load_tile(matrix, offs_m, key_start, 0, low, high, TILE.block_n)
            key = load_rows(keys_matrix, key_start, tile_n, valid_n, SHAPE.head_dim, SHAPE.block_d)
            # [M, N] @ [N, D] -> [M, D]
            acc = tl.dot(d_scores, key, acc, input_precision=TILE.precision)

    if d_queries is not None:
        if WANTS_BAND and inputs.rel_query is None and not HAS_ONE_SUM:
            acc += rel_acc * tl.cast(call.scaling.rel_scale, tl.float32)
        unit = tl.cast(call.scaling.base_2_scale, tl.float32) * LN_2
        d_queries = head_matrix(d_queries, place.entry, head, place.query_start, SHAPE.wide_index)
        store_rows(d_queries, row_start, rows, valid_m, acc * unit, SHAPE.head_dim, SHAPE.block_d)
    if d_rel_queries is not None:
        d_rel_queries = head_matrix(d_rel_queries, place.entry, head, place.query_start, SHAPE.wide_index)
        store_rows(d_rel_queries, row_start, rows, valid_m, rel_acc * rel_unit(call.scaling), SHAPE.rel_dim, SHAPE.block_dr)


def launch_dq_from_ds(
    call: Call,
    tile: TileConfig,
    ds: torch.Tensor,
    d_query: torch.Tensor | None,
    d_rel_query: torch.Tensor | None,
    plan: Plan,
    part: Part,
) -> None:
    """Launch dq_from_ds_kernel for a part of the workspace, which has all keys of its items; see there."""
    apart = queries_apart(8 * ds.element_size())
    blocks = cdiv(call.common.sequences.max_seqlen_q, tile.block_m * apart) * apart
    call.launch(
        "dq_from_ds",
        dq_from_ds_kernel,
        tile,
        (blocks * plan.items_of(part),),
        ds=strided(ds),
        d_queries=strided(d_query),
        d_rel_queries=strided(d_rel_query),
        first_program=part.first_program,
        LAYOUT=plan.layout,
    )

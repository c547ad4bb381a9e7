"""Backward, third kernel: the gradient of the query from the dS that the dkv kernel has stored.

    d_query_i = scale (sum_j dS[i, j] k_j + sum_r dS[i, i + r] E[r])

A program owns a block of queries and loops over their keys and relative positions side by side: two products. Each dS is read
twice, the second time from L2. Keys beyond a clamped table have its first or last row: their dS are summed for each query, which
the gradient of the table needs, too.
"""

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl

from .call import Call, cdiv, strided
from .config.selection import TileConfig
from .logits import score_table
from .tile.addressing import head_matrix, load_rows, side_vector, store_rows
from .tile.masking import exists, first_key, last_key, locate
from .tile.scores import LN_2, rel_unit
from .tile.table import add_end_rows, reached_positions, reached_table, table_rows
from .workspace.planning import Part, Plan
from .workspace.stored import key_of_column, load_tile, queries_apart, seen_keys, stored_part


@triton.jit
def add_to_sides(tensor, place, head, offs_m, valid_m, past, future, ADDS: tl.constexpr):
    """Store two numbers of each query as sides 0 and 1 of a (B, H, 2, N) tensor, or add them to what is there."""
    pointers = side_vector(tensor, place.entry, head, 0, place.query_start) + offs_m
    future_pointers = side_vector(tensor, place.entry, head, 1, place.query_start) + offs_m
    if ADDS:
        past += tl.load(pointers, mask=valid_m, other=0.0)
        future += tl.load(future_pointers, mask=valid_m, other=0.0)
    tl.store(pointers, past, mask=valid_m)
    tl.store(future_pointers, future, mask=valid_m)


@triton.jit(do_not_specialize=["first_program", "stop_program", "first", "last", "num_heads"])
def dq_kernel(
    inputs,
    stored,
    d_queries,
    d_rel_queries,
    far_sums,
    first_program,
    stop_program,
    call,
    first,
    last,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Compute d_query and d_rel_query of BLOCK_M queries of one head from stored, dS [1, items, Nq, columns], and far_sums
    [B, H, 2, Nq], the sums of what is stored of the keys before and behind a clamped table. Each of the three may be None.

    first_program, stop_program: the programs of the dkv kernel whose pairs the workspace has. ADDS: results are float32, and are
    added to what is there: other programs have other keys of the same queries.

    Queries of a block lie queries_apart. Grid: (query blocks * items,), query blocks fastest.
    """
    APART: tl.constexpr = queries_apart(stored[0].dtype.element_ty.primitive_bitwidth)
    num_blocks = tl.cdiv(call.sequences.max_seqlen_q, TILE.block_m * APART) * APART
    block = tl.program_id(0) % num_blocks
    if call.window[1] is not None:
        block = num_blocks - 1 - block  # the longest loops first
    number = tl.program_id(0) // num_blocks
    first_item, _, stored_first, stored_stop = stored_part(first_program, stop_program, call.sequences, LAYOUT, SHAPE.group)
    head = (first_item + number) % num_heads
    place = locate(call.sequences, call.window, (first_item + number) // num_heads)
    row_start = block // APART * (TILE.block_m * APART)
    if call.sequences.cu_seqlens_q is not None:
        if row_start >= place.num_queries:
            return
    rows = block % APART + tl.arange(0, TILE.block_m) * APART
    tile_n = tl.arange(0, TILE.block_n)
    offs_m = row_start + rows
    valid_m = offs_m < place.num_queries
    low, high = seen_keys(offs_m, place, call.window, stored_first, stored_stop, APART)
    matrix = head_matrix(stored, 0, number, 0, False)
    column_keys = key_of_column(offs_m, place.query_offset, stored_first, call.window, LAYOUT)

    last_query = tl.minimum(row_start + TILE.block_m * APART, place.num_queries) - 1
    WANTS_BAND: tl.constexpr = (
        inputs.rel_key is not None and (d_queries if inputs.rel_query is None else d_rel_queries) is not None
    )
    # Both products add to one sum, if it has one unit.
    HAS_ONE_SUM: tl.constexpr = d_queries is not None and inputs.rel_query is None and call.scaling.rel_scale is None
    iterations = 0
    if d_queries is not None or far_sums is not None:
        start_key = first_key(row_start, place, call.window, TILE.block_n)
        start_key = tl.maximum(start_key, stored_first // TILE.block_n * TILE.block_n)
        stop_key = tl.minimum(last_key(last_query, place, call.window), stored_stop)
        iterations = tl.cdiv(tl.maximum(stop_key - start_key, 0), TILE.block_n)
    if d_queries is not None:
        acc = tl.full([TILE.block_m, SHAPE.block_d], 0.0, tl.float32)
        keys_matrix = head_matrix(inputs.key, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
    if far_sums is not None:
        past = tl.full([TILE.block_m], 0.0, tl.float32)
        future = past
    if WANTS_BAND:
        rel_acc = tl.full([TILE.block_m, SHAPE.block_dr], 0.0, tl.float32)
        lowest, highest = reached_positions(row_start, last_query, place, call.window)
        whole_table = score_table(inputs, call, head, first, last, SHAPE, TILE)
        table = reached_table(whole_table, lowest, highest, TILE)
        # dS at the first position of a tile begin at multiples of 16 bytes.
        start_position = tl.maximum(lowest, first)
        start_position -= (block % APART + place.query_offset + start_position) & (APART - 1)
        num_positions = tl.maximum(tl.minimum(highest, last) + 1 - start_position, 0)
        iterations = tl.maximum(iterations, tl.cdiv(num_positions, TILE.block_n))
    for iteration in tl.range(iterations):
        if WANTS_BAND:
            relative = start_position + iteration * TILE.block_n
            d_band = load_tile(matrix, offs_m, offs_m + (place.query_offset + relative), column_keys, low, high, TILE.block_n)
            band_rows = table_rows(table, relative, TILE)
            # [M, N] @ [N, Dr] -> [M, Dr]
            if HAS_ONE_SUM:
                acc = tl.dot(d_band, band_rows, acc, input_precision=TILE.precision)
            else:
                rel_acc = tl.dot(d_band, band_rows, rel_acc, input_precision=TILE.precision)
        if d_queries is not None or far_sums is not None:
            key_start = start_key + iteration * TILE.block_n
            d_scores = load_tile(matrix, offs_m, key_start, column_keys, low, high, TILE.block_n)
            if d_queries is not None:
                valid_n = exists(key_start + tile_n, place, call.window)
                key = load_rows(keys_matrix, key_start, tile_n, valid_n, SHAPE.head_dim, SHAPE.block_d)
                # [M, N] @ [N, D] -> [M, D]
                acc = tl.dot(d_scores, key, acc, input_precision=TILE.precision)
            if far_sums is not None:
                position = (key_start - place.query_offset) + tile_n[None, :] - offs_m[:, None]
                past += tl.sum(tl.where(position < first, d_scores.to(tl.float32), 0.0), axis=1)
                future += tl.sum(tl.where(position > last, d_scores.to(tl.float32), 0.0), axis=1)

    if far_sums is not None:
        if WANTS_BAND:
            if HAS_ONE_SUM:
                acc = add_end_rows(acc, past, future, whole_table, lowest, highest, TILE)
            else:
                rel_acc = add_end_rows(rel_acc, past, future, whole_table, lowest, highest, TILE)
        add_to_sides(far_sums, place, head, offs_m, valid_m, past, future, ADDS)
    if d_queries is not None:
        if WANTS_BAND and inputs.rel_query is None and not HAS_ONE_SUM:
            acc += rel_acc * tl.cast(call.scaling.rel_scale, tl.float32)
        acc *= tl.cast(call.scaling.base_2_scale, tl.float32) * LN_2
        d_queries = head_matrix(d_queries, place.entry, head, place.query_start, SHAPE.wide_index)
        if ADDS:
            acc += load_rows(d_queries, row_start, rows, valid_m, SHAPE.head_dim, SHAPE.block_d)
        store_rows(d_queries, row_start, rows, valid_m, acc, SHAPE.head_dim, SHAPE.block_d)
    if d_rel_queries is not None:
        rel_acc *= rel_unit(call.scaling)
        d_rel_queries = head_matrix(d_rel_queries, place.entry, head, place.query_start, SHAPE.wide_index)
        if ADDS:
            rel_acc += load_rows(d_rel_queries, row_start, rows, valid_m, SHAPE.rel_dim, SHAPE.block_dr)
        store_rows(d_rel_queries, row_start, rows, valid_m, rel_acc, SHAPE.rel_dim, SHAPE.block_dr)


@functools.lru_cache(maxsize=1024)
def fitted(tile: TileConfig, num_queries: int, bits: int) -> TileConfig:
    """Return the configuration for a call with so many queries: of a block of queries, which are spread over
    queries_apart times as many, no half is empty."""
    block_m, apart = tile.block_m, queries_apart(bits)
    while block_m > 16 and block_m // 2 * apart >= num_queries:
        block_m //= 2
    return tile if block_m == tile.block_m else replace(tile, block_m=block_m)


def launch_dq(
    call: Call,
    tile: TileConfig,
    stored: torch.Tensor,
    d_query: torch.Tensor | None,
    d_rel_query: torch.Tensor | None,
    far_sums: torch.Tensor | None,
    plan: Plan,
    part: Part,
) -> None:
    """Launch dq_kernel for a part of the workspace; see there."""
    bits = 8 * stored.element_size()
    tile = fitted(tile, call.common.sequences.max_seqlen_q, bits)
    apart = queries_apart(bits)
    blocks = cdiv(call.common.sequences.max_seqlen_q, tile.block_m * apart) * apart
    call.launch(
        "dq",
        dq_kernel,
        tile,
        (blocks * plan.items_of(part),),
        stored=strided(stored),
        d_queries=strided(d_query),
        d_rel_queries=strided(d_rel_query),
        far_sums=strided(far_sums),
        first_program=part.first_program,
        stop_program=part.stop_program,
        LAYOUT=plan.layout,
        ADDS=not plan.has_whole_heads,
    )

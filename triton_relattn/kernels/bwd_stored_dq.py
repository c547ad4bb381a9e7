"""Backward, third kernel: the gradient of the query from the dS that the dkv kernel has stored.

    d_query_i = scale (sum_j dS[i, j] k_j + sum_r dS[i, i + r] E[r])

A program owns a block of queries and loops over their keys and relative positions side by side: two products, of dS [M, N] with
keys [N, D], and of dS along the diagonals [M, N] with rows of the table [N, D] (bwd_dtable.py explains how a tile is read along
them). Each dS is read twice, the second time from L2. If the table has rows for some positions only, dS is stored for these only:
then this kernel computes the second sum, and dq_kernel the first.
"""

import triton
import triton.language as tl

from .tile.band import reached_positions, reached_table, table_rows
from .tile.blocks import exists, first_key, head_matrix, last_key, load_rows, locate, store_rows
from .tile.logits import LN_2, rel_unit, score_table, settled
from .workspace.stored import first_column_key, load_tile, query_step, readable_keys, stored_part, window_in_table


@triton.jit(do_not_specialize=["first_program", "stop_program", "first", "last", "num_heads"])
def stored_dq_kernel(
    inputs,
    stored,
    d_queries,
    d_rel_queries,
    first_program,
    stop_program,
    common,
    first,
    last,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Compute d_query and d_rel_query of BLOCK_M queries of one head from stored, dS [1, heads, Nq, columns]; either may be None.
    Without a row of the table for every pair, the results are only the table's part of these gradients.

    first_program, stop_program: the programs of the dkv kernel whose pairs the workspace has. ADDS: results are float32, and are
    added to what is there: other programs have other keys of the same queries.

    Queries of a block lie query_step apart. Grid: (query blocks * heads in the workspace,), query blocks fastest.
    """
    STEP: tl.constexpr = query_step(stored[0].dtype.element_ty.primitive_bitwidth)
    # This program's block of queries, of one of the heads that the workspace has
    num_blocks = tl.cdiv(common.sequences.max_seqlen_q, TILE.block_m * STEP) * STEP
    block = tl.program_id(0) % num_blocks
    if common.window[1] is not None:
        block = num_blocks - 1 - block  # the longest loops first
    number = tl.program_id(0) // num_blocks
    first_bh, _, stored_first, stored_stop = stored_part(first_program, stop_program, common.sequences, LAYOUT, SHAPE.group)
    head = (first_bh + number) % num_heads
    place = locate(common.sequences, common.window, (first_bh + number) // num_heads)
    row_start = block // STEP * (TILE.block_m * STEP)
    if common.sequences.cu_seqlens_q is not None:
        if row_start >= place.num_queries:
            return
    # Its queries [M], STEP apart: their diagonals begin at multiples of 16 bytes
    rows = block % STEP + tl.arange(0, TILE.block_m) * STEP
    tile_n = tl.arange(0, TILE.block_n)
    offs_m = row_start + rows
    valid_m = offs_m < place.num_queries
    window = common.window
    if TILE.coverage != "full":
        window = window_in_table(window, first, last)
    # Where dS of each query lies: from which key to which [M, 1], and the key in column 0
    low, high = readable_keys(offs_m, place, window, stored_first, stored_stop, STEP)
    matrix = head_matrix(stored, 0, number, 0, False)
    column_keys = first_column_key(offs_m, place.query_offset, stored_first, window, LAYOUT)

    # Along the keys: those that the queries see and the workspace has
    last_query = tl.minimum(row_start + TILE.block_m * STEP, place.num_queries) - 1
    WANTS_BAND: tl.constexpr = (
        inputs.rel_key is not None and (d_queries if inputs.rel_query is None else d_rel_queries) is not None
    )
    WANTS_KEYS: tl.constexpr = d_queries is not None and TILE.coverage == "full"
    # Both products add to one sum, if it has one unit.
    HAS_ONE_SUM: tl.constexpr = d_queries is not None and inputs.rel_query is None and common.scaling.rel_scale is None
    key_iterations, band_iterations = 0, 0
    if d_queries is not None:
        acc = tl.full([TILE.block_m, SHAPE.block_d], 0.0, tl.float32)
    if WANTS_KEYS:
        start_key = first_key(row_start, place, common.window, TILE.block_n)
        start_key = tl.maximum(start_key, stored_first // TILE.block_n * TILE.block_n)
        stop_key = tl.minimum(last_key(last_query, place, common.window), stored_stop)
        key_iterations = tl.cdiv(tl.maximum(stop_key - start_key, 0), TILE.block_n)
        keys_matrix = head_matrix(inputs.key, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
    # Along the diagonals: the relative positions that the table has rows for
    if WANTS_BAND:
        rel_acc = tl.full([TILE.block_m, SHAPE.block_dr], 0.0, tl.float32)
        lowest, highest = reached_positions(row_start, last_query, place, common.window)
        table = reached_table(score_table(inputs, common, head, first, last, SHAPE, TILE), lowest, highest, TILE)
        # dS at the first position of a tile begin at multiples of 16 bytes.
        start_position = tl.maximum(lowest, first)
        start_position -= (block % STEP + place.query_offset + start_position) & (STEP - 1)
        num_positions = tl.maximum(tl.minimum(highest, last) + 1 - start_position, 0)
        band_iterations = tl.cdiv(num_positions, TILE.block_n)
    # The diagonal of the last query runs along with the keys, that of the first one M * STEP keys behind. The keys begin as late
    # as the diagonals leave time for: both products then read a number at about the same time, the second one from L2.
    late = tl.maximum(band_iterations - key_iterations, 0) // 2

    for iteration in tl.range(tl.maximum(key_iterations, band_iterations)):
        # d_query += dS [M, N], read along the diagonals, @ E [N, Dr]
        if WANTS_BAND:
            relative = start_position + iteration * TILE.block_n
            d_band = load_tile(matrix, offs_m, offs_m + (place.query_offset + relative), column_keys, low, high, TILE.block_n)
            band_rows = table_rows(table, relative, TILE)  # [N, Dr]
            # [M, N] @ [N, Dr] -> [M, Dr]
            if HAS_ONE_SUM:
                acc = settled(tl.dot(d_band, band_rows, acc, input_precision=TILE.precision))
            else:
                rel_acc = settled(tl.dot(d_band, band_rows, rel_acc, input_precision=TILE.precision))
        # d_query += dS [M, N], tile by tile of the keys, @ K [N, D]
        if WANTS_KEYS:
            key_start = start_key + (iteration - late) * TILE.block_n
            d_scores = load_tile(matrix, offs_m, key_start, column_keys, low, high, TILE.block_n)  # [M, N]
            valid_n = exists(key_start + tile_n, place, common.window)
            key = load_rows(keys_matrix, key_start, tile_n, valid_n, SHAPE.head_dim, SHAPE.block_d)  # [N, D]
            # [M, N] @ [N, D] -> [M, D]
            acc = settled(tl.dot(d_scores, key, acc, input_precision=TILE.precision))

    # Units, and store: d_query [M, D], d_rel_query [M, Dr].
    if d_queries is not None:
        if WANTS_BAND and inputs.rel_query is None and not HAS_ONE_SUM:
            acc += rel_acc * tl.cast(common.scaling.rel_scale, tl.float32)
        acc *= tl.cast(common.scaling.base_2_scale, tl.float32) * LN_2
        d_queries = head_matrix(d_queries, place.entry, head, place.query_start, SHAPE.wide_index)
        store_rows(d_queries, row_start, rows, valid_m, acc, SHAPE.head_dim, SHAPE.block_d, ADDS)
    if d_rel_queries is not None:
        rel_acc *= rel_unit(common.scaling)
        d_rel_queries = head_matrix(d_rel_queries, place.entry, head, place.query_start, SHAPE.wide_index)
        store_rows(d_rel_queries, row_start, rows, valid_m, rel_acc, SHAPE.rel_dim, SHAPE.block_dr, ADDS)

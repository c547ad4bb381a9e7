"""Backward, third kernel: a program owns a block of table rows and walks the diagonal band of pairs that use them.

No two programs add to the same number, so there are no atomics and the result repeats bit for bit. Where there are fewer
blocks of rows than a GPU can work on, several programs share one, each with a partial sum of its own.
"""

import triton
import triton.language as tl

from .band import (
    band_column,
    band_within,
    cut_terms,
    empty_band,
    for_values,
    from_tiles,
    glued,
    in_tiles,
    rotate,
    rotated_tile,
    term_dtype,
)
from .dropout import kept
from .masking import exists, locate, visible_band
from .scores import LN_2, exponent_scale, finished, load_normaliser, probabilities, tile_scores
from .table import Table, block_of_rows, table_rows
from .tiles import head_matrix, head_vector, key_order, load_rows, row_vector, side_vector, store_rows
from .walk import clamp_margin, near_keys


@triton.jit
def band_terms(vectors, rows, table, relative, TILE: tl.constexpr, OUTSIDE: tl.constexpr, INPUT_PRECISION: tl.constexpr):
    """[M, N]: products of the vectors with a block of table rows, where from_tiles puts the pairs that use them; for rotations
    in registers where it takes them from, to be what their products are added to."""
    TERM: tl.constexpr = term_dtype(TILE)
    block = block_of_rows(vectors, rows, table, relative, TILE, OUTSIDE, INPUT_PRECISION)
    parts = rotate(cut_terms(block, TILE), TILE)
    if TILE[2] != "gather":
        parts = in_tiles(parts, TILE)
    return glued(parts, TILE, TERM).to(tl.float32)


@triton.jit(do_not_specialize=["first", "last", "num_sequences", "num_heads"])
def table_kernel(
    queries,
    keys,
    values,
    rel_queries,
    rel_keys,
    rel_values,
    rel_bias,
    attn_mask,
    d_outs,
    d_rel_keys,
    d_rel_values,
    d_rel_bias,
    statistics,
    deltas,
    sequences,
    window,
    dropout,
    scaling,
    first,
    last,
    num_sequences,
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
    OUTSIDE: tl.constexpr,
    PER_HEAD: tl.constexpr,
    ROWS_BLOCK_M: tl.constexpr,
    ROWS_BLOCK_N: tl.constexpr,
    ROUND_TERMS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDE_INDEX: tl.constexpr,
):
    """Partial sums [splits, heads or 1, R, D] (of the bias [splits, heads or 1, R]) of BLOCK_N table rows, in their dtypes; any
    may be None.

    Beyond a clamped table there are keys that rows_kernel, with tiles of ROWS_BLOCK_M and ROWS_BLOCK_N, does not count as far.
    They are summed by distance in rows of their own: the partial sums have clamp_margin more rows on either side, and then one
    more for table_ends_kernel.

    Grid: (row blocks * table heads, splits), row blocks fastest. A program takes every splits-th sequence; with tables
    that the heads share (PER_HEAD is false), every splits-th pair of sequence and head.
    """
    MARGIN: tl.constexpr = clamp_margin(ROWS_BLOCK_M, ROWS_BLOCK_N) if OUTSIDE == "clamp" else 0
    num_blocks = tl.cdiv(last - first + 1 + 2 * MARGIN, BLOCK_N)
    block = tl.program_id(0) % num_blocks
    table_head = tl.program_id(0) // num_blocks if PER_HEAD else 0
    split, num_splits = tl.program_id(1), tl.num_programs(1)

    TILE: tl.constexpr = (BLOCK_M, BLOCK_N, ROTATION, WARPS, ROUND_TERMS)
    tile_m = tl.arange(0, BLOCK_M)
    tile_n = key_order(TILE)
    relative = first - MARGIN + block * BLOCK_N
    # Heads have tables of their own only where PER_HEAD is true.
    term = Table(
        None if rel_keys is None else head_matrix(rel_keys, 0, table_head, 0, WIDE_INDEX),
        scaling.rel_scale,
        None if rel_bias is None else head_vector(rel_bias, table_head),
        scaling.bias_scale,
        first,
        last,
    )
    HAS_TERM: tl.constexpr = rel_keys is not None or rel_bias is not None
    rows = None
    if rel_keys is not None:
        rows = table_rows(term, relative, REL_DIM, BLOCK_DR, TILE, OUTSIDE)
    if rel_values is not None:
        value_table = Table(head_matrix(rel_values, 0, table_head, 0, WIDE_INDEX), None, None, None, first, last)
        value_rows = table_rows(value_table, relative, VALUE_DIM, BLOCK_DV, TILE, OUTSIDE)
    if d_rel_keys is not None:
        acc = tl.zeros([BLOCK_N, BLOCK_DR], tl.float32)
    if d_rel_values is not None:
        value_acc = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    if d_rel_bias is not None:
        bias_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # summed over the queries at the end: across warps, that is dear
    WANTS_SCORES: tl.constexpr = d_rel_keys is not None or d_rel_bias is not None
    HAS_VALUE_TERM: tl.constexpr = WANTS_SCORES and rel_values is not None

    num_units = num_sequences if PER_HEAD else num_sequences * num_heads
    # Rotations in registers let tiles be so large that there is no register to spare: terms are what products are added to, not
    # added to them, and addresses and masks are computed anew in each turn (so they are for some calls that would spill, too).
    IN_REGISTERS: tl.constexpr = ROTATION != "gather"
    ANEW: tl.constexpr = IN_REGISTERS or (BLOCK_D > 64 and (rel_keys is None or BLOCK_DR < BLOCK_D))
    for unit in tl.range(split, num_units, num_splits, disable_licm=ANEW):
        sequence = unit if PER_HEAD else (tl.cast(unit, tl.uint32) // tl.cast(num_heads, tl.uint32)).to(tl.int32)
        place = locate(sequences, window, sequence)
        head = table_head if PER_HEAD else unit - sequence * num_heads
        head_queries = head_matrix(queries, place.entry, head, place.query_start, WIDE_INDEX)
        head_keys = head_matrix(keys, place.entry, head // GROUP, place.key_start, WIDE_INDEX)
        head_values = head_matrix(values, place.entry, head // GROUP, place.key_start, WIDE_INDEX)
        head_d_outs = head_matrix(d_outs, place.entry, head, place.query_start, WIDE_INDEX)
        if rel_queries is not None:
            head_rel_queries = head_matrix(rel_queries, place.entry, head, place.query_start, WIDE_INDEX)
        mask = None if attn_mask is None else head_matrix(attn_mask, place.entry, head, 0, True)
        scale = exponent_scale(scaling, mask)

        # Queries that have a key at one of these distances.
        start = tl.maximum(-place.query_offset - relative - (BLOCK_N - 1), 0) // BLOCK_M * BLOCK_M
        stop = tl.minimum(place.num_queries, place.num_keys - place.query_offset - relative)
        if window[1] is not None:
            stop = tl.where(relative > window[1], 0, stop)
        if window[0] is not None:
            stop = tl.where(relative + (BLOCK_N - 1) < -window[0], 0, stop)
        for row_start in tl.range(start, stop, BLOCK_M, disable_licm=ANEW):
            offs_m = row_start + tile_m
            valid_m = offs_m < place.num_queries
            query = load_rows(head_queries, row_start, tile_m, valid_m, HEAD_DIM, BLOCK_D)
            d_out = load_rows(head_d_outs, row_start, tile_m, valid_m, VALUE_DIM, BLOCK_DV)
            key_start = row_start + place.query_offset + relative
            rel_query = query
            if rel_queries is not None:
                rel_query = load_rows(head_rel_queries, row_start, tile_m, valid_m, REL_DIM, BLOCK_DR)
            nothing = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            terms, value_terms = nothing, nothing
            if IN_REGISTERS and HAS_TERM:
                terms = band_terms(rel_query, rows, term, relative, TILE, OUTSIDE, INPUT_PRECISION)
            if IN_REGISTERS and HAS_VALUE_TERM:
                value_terms = band_terms(d_out, value_rows, value_table, relative, for_values(TILE), OUTSIDE, INPUT_PRECISION)
            scores_carried, d_probs_carried = empty_band(TILE, tl.float32), empty_band(TILE, tl.float32)
            for ahead in tl.static_range(BLOCK_M // BLOCK_N + 1):
                first_key = key_start + ahead * BLOCK_N
                valid_n = exists(first_key + tile_n, place, window)
                key = load_rows(head_keys, first_key, tile_n, valid_n, HEAD_DIM, BLOCK_D)
                scores = tile_scores(query, key, terms, INPUT_PRECISION)
                scores, scores_carried = from_tiles(scores, scores_carried, TILE, tl.float32)
                if WANTS_SCORES:
                    value = load_rows(head_values, first_key, tile_n, valid_n, VALUE_DIM, BLOCK_DV)
                    d_probs = tile_scores(d_out, value, value_terms, INPUT_PRECISION)
                    d_probs, d_probs_carried = from_tiles(d_probs, d_probs_carried, TILE, tl.float32)
            scores = glued(scores, TILE, tl.float32)
            if not IN_REGISTERS and HAS_TERM:
                scores += band_terms(rel_query, rows, term, relative, TILE, OUTSIDE, INPUT_PRECISION)
            first_keys = offs_m + (place.query_offset + relative)
            low, high = visible_band(offs_m, first_keys, relative, place, window)
            if OUTSIDE == "clamp":
                rows_start = offs_m // ROWS_BLOCK_M * ROWS_BLOCK_M
                near_start, near_stop = near_keys(
                    rows_start, first, last, place.query_offset, ROWS_BLOCK_M, ROWS_BLOCK_N, OUTSIDE
                )
                low, high = tl.maximum(low, near_start - first_keys), tl.minimum(high, near_stop - first_keys)
            # Not by zeros: a query that does not exist would turn a table row of NaN into NaN for all rows.
            seen = band_within(low, high, TILE)
            offs_n = first_keys[:, None] + band_column(TILE)
            scores, seen, slope = finished(scores, seen, offs_m[:, None], offs_n, mask, scaling)
            row_max, log_sum = load_normaliser(statistics, place, head, offs_m, valid_m)
            probs = probabilities(scores, seen, scale, row_max, log_sum)
            if dropout is not None:
                stays = kept(dropout, place.batch, head, offs_m[:, None], offs_n)

            if d_rel_values is not None:
                kept_probs = probs if dropout is None else tl.where(stays, probs, 0.0)
                kept_band = rotated_tile(kept_probs, TILE, query.dtype, BACK=True)
                # [N, M] @ [M, Dv] -> [N, Dv]
                value_acc = tl.dot(tl.trans(kept_band), d_out, value_acc, input_precision=INPUT_PRECISION)
            if WANTS_SCORES:
                d_probs = glued(d_probs, TILE, tl.float32)
                if not IN_REGISTERS and HAS_VALUE_TERM:
                    d_probs += band_terms(d_out, value_rows, value_table, relative, for_values(TILE), OUTSIDE, INPUT_PRECISION)
                if HAS_VALUE_TERM:
                    d_probs = tl.where(seen, d_probs, 0.0)  # the row of a pair that nobody sees may be NaN
                if dropout is not None:
                    d_probs = tl.where(stays, d_probs * tl.cast(dropout.keep_scale, tl.float32), 0.0)
                delta = row_vector(deltas, place.entry, head, place.query_start)
                delta = tl.load(delta + offs_m, mask=valid_m, other=0.0)
                d_scores = probs * (d_probs - delta[:, None])
                if scaling.softcap is not None:
                    d_scores *= slope
                # Rotating 16 bits takes half the shuffles; the bias sums before rounding.
                d_band = rotated_tile(d_scores, TILE, query.dtype if d_rel_bias is None else tl.float32, BACK=True)
                if d_rel_bias is not None:
                    bias_acc += d_band
                if d_rel_keys is not None:
                    # [N, M] @ [M, Dr] -> [N, Dr]
                    acc = tl.dot(tl.trans(d_band.to(query.dtype)), rel_query, acc, input_precision=INPUT_PRECISION)

    row = relative - first + MARGIN
    valid = relative + tile_n <= last + MARGIN
    row = row + 1 if OUTSIDE == "clamp" else row
    if d_rel_keys is not None:
        unit = tl.cast(scaling.base_2_scale, tl.float32) * LN_2
        if scaling.rel_scale is not None:
            unit *= tl.cast(scaling.rel_scale, tl.float32)
        store_rows(head_matrix(d_rel_keys, split, table_head, 0, WIDE_INDEX), row, tile_n, valid, acc * unit, REL_DIM, BLOCK_DR)
    if d_rel_values is not None:
        if dropout is not None:
            value_acc *= tl.cast(dropout.keep_scale, tl.float32)
        d_rel_values = head_matrix(d_rel_values, split, table_head, 0, WIDE_INDEX)
        store_rows(d_rel_values, row, tile_n, valid, value_acc, VALUE_DIM, BLOCK_DV)
    if d_rel_bias is not None:
        tl.store(row_vector(d_rel_bias, split, table_head, row) + tile_n, tl.sum(bias_acc, axis=0), mask=valid)


@triton.jit(do_not_specialize=["num_entries", "num_heads", "num_rows"])
def table_ends_kernel(
    rows,
    sums,
    d_tables,
    factor,
    num_entries,
    num_heads,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PER_HEAD: tl.constexpr,
    WIDE_INDEX: tl.constexpr,
):
    """The first and the last row of a clamped table's partial sums, d_tables: the far keys. ``factor * sum_i sums_i rows_i`` over
    the vectors that the table is multiplied with, rows [B, H, Nq, D], and rows_kernel's sums [B, H, 2, Nq].

    Grid: (table heads, splits), divided as in table_kernel.
    """
    table_head = tl.program_id(0)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    tile_m = tl.arange(0, BLOCK_M)
    past = tl.zeros([BLOCK_WIDTH], tl.float32)
    future = tl.zeros([BLOCK_WIDTH], tl.float32)
    num_units = num_entries if PER_HEAD else num_entries * num_heads
    for unit in range(split, num_units, num_splits):
        entry = unit if PER_HEAD else unit // num_heads
        head = table_head if PER_HEAD else unit % num_heads
        head_rows = head_matrix(rows, entry, head, 0, WIDE_INDEX)
        past_sums = side_vector(sums, entry, head, 0, 0)
        future_sums = side_vector(sums, entry, head, 1, 0)
        for row_start in tl.range(0, num_rows, BLOCK_M):
            valid_m = row_start + tile_m < num_rows
            tile = load_rows(head_rows, row_start, tile_m, valid_m, WIDTH, BLOCK_WIDTH).to(tl.float32)
            past_sum = tl.load(past_sums + row_start + tile_m, mask=valid_m, other=0.0)
            future_sum = tl.load(future_sums + row_start + tile_m, mask=valid_m, other=0.0)
            past += tl.sum(tile * past_sum[:, None], axis=0)
            future += tl.sum(tile * future_sum[:, None], axis=0)

    factor = tl.cast(factor, tl.float32)
    columns = tl.arange(0, BLOCK_WIDTH)
    first_row = head_matrix(d_tables, split, table_head, 0, WIDE_INDEX)[0] + columns
    last_row = head_matrix(d_tables, split, table_head + 1, 0, WIDE_INDEX)[0] - WIDTH + columns
    tl.store(first_row, past * factor, mask=columns < WIDTH)
    tl.store(last_row, future * factor, mask=columns < WIDTH)

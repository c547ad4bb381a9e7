"""Backward, second kernel: a program owns a block of keys and walks the queries that see them."""

import triton
import triton.language as tl

from .band import for_values, whole_tile
from .dropout import kept
from .masking import exists, first_query, last_query, locate, visible
from .scores import LN_2, exponent_scale, finished, load_normaliser, probabilities, tile_scores
from .table import Table
from .tiles import head_matrix, head_vector, key_order, load_rows, row_vector, side_vector, store_rows
from .walk import FAR, NEAR, near_keys, part_range, walk_position
from .words import key_of_column, store_words


@triton.jit(do_not_specialize=["first_program", "lowest", "highest", "first", "last", "num_heads"])
def columns_kernel(
    queries,
    keys,
    values,
    rel_queries,
    rel_keys,
    rel_values,
    rel_bias,
    attn_mask,
    d_outs,
    d_keys,
    d_values,
    statistics,
    deltas,
    far_scores,
    far_values,
    words,
    first_program,
    lowest,
    highest,
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
    OUTSIDE: tl.constexpr,
    SKEW: tl.constexpr,
    ROUND_TERMS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    WIDE_INDEX: tl.constexpr,
):
    """d_key and d_value of BLOCK_N keys of one head. d_keys or d_values may be None; deltas and far_* as of rows_kernel.

    words [1, items, Nq, columns], or None: where gradients of scores go for diagonals_kernel, those of relative positions from
    lowest to highest at least; see words.py for SKEW. Beside a clamped table these are near; so they are without words if lowest
    and highest are there, to give the same bits.

    Grid: (key blocks * batch * key heads,), key blocks fastest; with a causal mask the first have the longest walks. With words a
    part of that, from first_program on: whole heads, or some blocks of one.
    """
    num_blocks = tl.cdiv(sequences.max_seqlen_k, BLOCK_N)
    program = tl.program_id(0)
    if words is not None:
        program += first_program
    block = program % num_blocks
    key_head = program // num_blocks % (num_heads // GROUP)
    place = locate(sequences, window, program // num_blocks // (num_heads // GROUP))
    key_start = block * BLOCK_N
    if sequences.cu_seqlens_k is not None:
        if key_start >= place.key_rows:
            return

    TILE: tl.constexpr = (BLOCK_M, BLOCK_N, ROTATION, WARPS, ROUND_TERMS)
    tile_m = tl.arange(0, BLOCK_M)
    tile_n = key_order(TILE)
    offs_n = key_start + tile_n
    valid_n = exists(offs_n, place, window)
    keys = head_matrix(keys, place.entry, key_head, place.key_start, WIDE_INDEX)
    key = load_rows(keys, key_start, tile_n, valid_n, HEAD_DIM, BLOCK_D)
    WANTS_SCORES: tl.constexpr = d_keys is not None or words is not None
    if WANTS_SCORES:
        values = head_matrix(values, place.entry, key_head, place.key_start, WIDE_INDEX)
        value = load_rows(values, key_start, tile_n, valid_n, VALUE_DIM, BLOCK_DV)
    if d_keys is not None:
        d_key = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if d_values is not None:
        d_value = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    # Along the queries the relative position falls: keys in the future of the table come first.
    row_first = first_query(key_start, place, window, BLOCK_M)
    row_stop = tl.where(key_start < place.num_keys, last_query(key_start + BLOCK_N - 1, place, window), 0)
    near_start = row_first
    near_stop = row_first if OUTSIDE is None else row_stop
    if OUTSIDE == "clamp" or OUTSIDE == "zero":
        # As seen from the keys: i - j has the sign and the limits turned round.
        near_first, near_last = first, last
        if lowest is not None and OUTSIDE == "clamp":  # far tiles leave no words
            near_first, near_last = tl.minimum(first, lowest - 1), tl.maximum(last, highest + 1)
        near_start, near_stop = near_keys(key_start, -near_last, -near_first, -place.query_offset, BLOCK_N, BLOCK_M, OUTSIDE)
        near_start, near_stop = tl.maximum(near_start, row_first), tl.maximum(near_stop, row_first)

    HAS_TERM: tl.constexpr = rel_keys is not None or rel_bias is not None
    for member in range(GROUP):
        head = key_head * GROUP + member
        head_queries = head_matrix(queries, place.entry, head, place.query_start, WIDE_INDEX)
        head_d_outs = head_matrix(d_outs, place.entry, head, place.query_start, WIDE_INDEX)
        mask = None if attn_mask is None else head_matrix(attn_mask, place.entry, head, 0, True)
        if rel_queries is not None:
            head_rel_queries = head_matrix(rel_queries, place.entry, head, place.query_start, WIDE_INDEX)
        term = Table(
            None if rel_keys is None else head_matrix(rel_keys, 0, head, 0, WIDE_INDEX),
            scaling.rel_scale,
            None if rel_bias is None else head_vector(rel_bias, head),
            scaling.bias_scale,
            first,
            last,
        )
        if rel_values is not None:
            value_table = Table(head_matrix(rel_values, 0, head, 0, WIDE_INDEX), None, None, None, first, last)
        scale = exponent_scale(scaling, mask)
        if words is not None:
            item = (program // num_blocks - first_program // num_blocks) * GROUP + member
            head_words = head_matrix(words, 0, item, 0, False)

        for PART in tl.static_range(NEAR if OUTSIDE == "none" else FAR, FAR + 1 if OUTSIDE is None else NEAR + 1):
            start, stop = part_range(PART, row_first, row_stop, near_start, near_stop)
            for position in tl.range(start, stop, BLOCK_M, disable_licm=ROTATION != "gather"):
                row_start = walk_position(PART, position, near_start, near_stop, OUTSIDE)
                offs_m = row_start + tile_m
                valid_m = offs_m < place.num_queries
                relative = key_start - row_start - place.query_offset
                query = load_rows(head_queries, row_start, tile_m, valid_m, HEAD_DIM, BLOCK_D)
                side = tl.where(row_start < near_start, 1, 0)
                if PART == NEAR and HAS_TERM:
                    rel_query = query
                    if rel_queries is not None:
                        rel_query = load_rows(head_rel_queries, row_start, tile_m, valid_m, REL_DIM, BLOCK_DR)
                    scores = whole_tile(rel_query, term, relative, REL_DIM, BLOCK_DR, TILE, OUTSIDE, INPUT_PRECISION)
                else:
                    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                row_max, log_sum = load_normaliser(statistics, place, head, offs_m, valid_m)
                if PART == FAR and HAS_TERM and OUTSIDE == "clamp":
                    far = side_vector(far_scores, place.entry, head, side, place.query_start)
                    far = tl.load(far + offs_m, mask=valid_m, other=0.0)
                    scores = tl.broadcast_to(far[:, None], (BLOCK_M, BLOCK_N))
                scores = tile_scores(query, key, scores, INPUT_PRECISION)
                # A query that does not exist is zeros, which a table row of NaN would turn into NaN for all keys.
                seen = visible(offs_m[:, None], offs_n[None, :], place, window) & valid_m[:, None]
                scores, seen, slope = finished(scores, seen, offs_m[:, None], offs_n[None, :], mask, scaling)
                probs = probabilities(scores, seen, scale, row_max, log_sum)
                if dropout is not None:
                    stays = kept(dropout, place.batch, head, offs_m[:, None], offs_n[None, :])
                d_out = load_rows(head_d_outs, row_start, tile_m, valid_m, VALUE_DIM, BLOCK_DV)
                if WANTS_SCORES:
                    if PART == NEAR and rel_values is not None:
                        d_probs = whole_tile(
                            d_out, value_table, relative, VALUE_DIM, BLOCK_DV, for_values(TILE), OUTSIDE, INPUT_PRECISION
                        )
                    elif rel_values is not None and OUTSIDE == "clamp":
                        far = side_vector(far_values, place.entry, head, side, place.query_start)
                        far = tl.load(far + offs_m, mask=valid_m, other=0.0)
                        d_probs = tl.broadcast_to(far[:, None], (BLOCK_M, BLOCK_N))
                    else:
                        d_probs = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                    d_probs = tile_scores(d_out, value, d_probs, INPUT_PRECISION)
                # Between the two, so that the matrix units have work while dS is computed.
                if d_values is not None:
                    kept_probs = probs if dropout is None else tl.where(stays, probs, 0.0)
                    # [N, M] @ [M, Dv] -> [N, Dv]
                    d_value = tl.dot(tl.trans(kept_probs.to(d_out.dtype)), d_out, d_value, input_precision=INPUT_PRECISION)
                if WANTS_SCORES:
                    if dropout is not None:
                        d_probs = tl.where(stays, d_probs * tl.cast(dropout.keep_scale, tl.float32), 0.0)
                    delta = row_vector(deltas, place.entry, head, place.query_start)
                    delta = tl.load(delta + offs_m, mask=valid_m, other=0.0)
                    if rel_values is not None:
                        d_probs = tl.where(seen, d_probs, 0.0)  # the row of a pair that nobody sees may be NaN
                    d_scores = probs * (d_probs - delta[:, None])
                    if scaling.softcap is not None:
                        d_scores *= slope
                    d_words = d_scores.to(query.dtype)
                    if words is not None and PART == NEAR:
                        part_start = first_program % num_blocks * BLOCK_N
                        column = key_start - key_of_column(row_start, place.query_offset, part_start, lowest, SKEW)
                        store_words(head_words, d_words, row_start, tile_m, valid_m, column, TILE, SKEW)
                    if d_keys is not None:
                        # [N, M] @ [M, D] -> [N, D]
                        d_key = tl.dot(tl.trans(d_words), query, d_key, input_precision=INPUT_PRECISION)

    valid_n = offs_n < place.key_rows  # padding has a gradient, too: zero
    if d_keys is not None:
        unit = tl.cast(scaling.base_2_scale, tl.float32) * LN_2
        d_keys = head_matrix(d_keys, place.entry, key_head, place.key_start, WIDE_INDEX)
        store_rows(d_keys, key_start, tile_n, valid_n, d_key * unit, HEAD_DIM, BLOCK_D)
    if d_values is not None:
        if dropout is not None:
            d_value *= tl.cast(dropout.keep_scale, tl.float32)
        d_values = head_matrix(d_values, place.entry, key_head, place.key_start, WIDE_INDEX)
        store_rows(d_values, key_start, tile_n, valid_n, d_value, VALUE_DIM, BLOCK_DV)

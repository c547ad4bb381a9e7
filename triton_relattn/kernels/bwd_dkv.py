"""Backward, second kernel: dK and dV, and for the other kernels dS.

    P = exp(logits - lse)     dP = dO V^T     dS = P (dP - delta)     dV = P^T dO     dK = scale dS^T Q

A program owns a block of keys and loops over the queries that see them, of all heads that share these keys. It stores dS, and P
if there is a rel_value, in the workspace.
"""

import triton
import triton.language as tl

from .tile.band import blocks_before, reached_table, whole_tile
from .tile.blocks import (
    FAR,
    NEAR,
    exists,
    first_part,
    head_matrix,
    keep_mask,
    key_order,
    load_rows,
    locate,
    loop_position,
    part_range,
    query_range,
    row_vector,
    side_vector,
    stop_part,
    store_end_rows,
    store_rows,
)
from .tile.key_terms import (
    add_far_queries,
    add_key_end_rows,
    add_key_rows,
    far_query_sums,
    in_natural_order,
    natural_keys,
    reached_by_keys,
)
from .tile.logits import (
    LN_2,
    Keys,
    Queries,
    exponent_scale,
    is_linear,
    key_table,
    load_softmax_stats,
    probabilities,
    rel_unit,
    relative_terms,
    score_gradients,
    score_table,
    settled,
    tile_logits,
    tile_scores,
    value_table,
)
from .workspace.stored import first_column_key, store_tile, window_in_table


@triton.jit(do_not_specialize=["first_program", "first", "last", "num_heads"])
def dkv_kernel(
    inputs,
    d_outs,
    d_keys,
    d_values,
    per_query,
    ds,
    stored_probs,
    first_program,
    common,
    first,
    last,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Compute d_key and d_value of BLOCK_N keys of one head; either may be None. per_query is as delta_kernel left it.

    ds and stored_probs, [1, heads, Nq, columns] or None: the workspace for dS and for the probabilities that dropout keeps, of
    pairs in tiles near the table; see stored.py.

    Grid: a part of (key blocks * batch * key heads,), key blocks fastest, from first_program on: whole heads, or some blocks of
    one head. With a causal mask the first blocks have the longest loops.
    """
    VALUE_TILE: tl.constexpr = TILE.value_tile
    KEY_TILE: tl.constexpr = TILE.key_tile
    # This program's block of keys, of one head of a sequence
    num_blocks = tl.cdiv(common.sequences.max_seqlen_k, TILE.block_n)
    program = tl.program_id(0) + first_program
    STORES: tl.constexpr = ds is not None or stored_probs is not None
    # The pairs that are stored: those with a row of the table
    window = common.window
    if TILE.coverage != "full":
        window = window_in_table(window, first, last)
    block = program % num_blocks
    key_head = program // num_blocks % (num_heads // SHAPE.group)
    place = locate(common.sequences, common.window, program // num_blocks // (num_heads // SHAPE.group))
    key_start = block * TILE.block_n
    if common.sequences.cu_seqlens_k is not None:
        if key_start >= place.key_rows:
            return

    # The block's keys [N, D] and values [N, Dv], and their gradients
    tile_m = tl.arange(0, TILE.block_m)
    tile_n = key_order(TILE)
    offs_n = key_start + tile_n
    valid_n = exists(offs_n, place, common.window)
    keys = head_matrix(inputs.key, place.entry, key_head, place.key_start, SHAPE.wide_index)
    key = load_rows(keys, key_start, tile_n, valid_n, SHAPE.head_dim, SHAPE.block_d)  # [N, D]
    WANTS_SCORES: tl.constexpr = d_keys is not None or ds is not None or per_query.end_rows is not None
    if WANTS_SCORES:
        values = head_matrix(inputs.value, place.entry, key_head, place.key_start, SHAPE.wide_index)
        value = load_rows(values, key_start, tile_n, valid_n, SHAPE.value_dim, SHAPE.block_dv)  # [N, Dv]
    if d_keys is not None:
        d_key = tl.full([TILE.block_n, SHAPE.block_d], 0.0, tl.float32)
    if d_values is not None:
        d_value = tl.full([TILE.block_n, SHAPE.block_dv], 0.0, tl.float32)

    # Along the queries the relative position falls: keys in the future of the table come first.
    row_first, row_stop, near_start, near_stop = query_range(key_start, first, last, place, common.window, TILE)

    HAS_TERM: tl.constexpr = TILE.has_matrix or TILE.has_bias
    # What rel_p2c meets: the keys in their natural order [N, D]
    natural_key = key
    if inputs.rel_p2c is not None:
        natural_key = natural_keys(keys, key_start, place, common.window, TILE, SHAPE)
        key_lowest, key_highest = reached_by_keys(key_start, place, common.window, TILE)
    for member in range(SHAPE.group):  # all heads of queries that share these keys
        head = key_head * SHAPE.group + member
        head_queries = head_matrix(inputs.query, place.entry, head, place.query_start, SHAPE.wide_index)
        head_d_outs = head_matrix(d_outs, place.entry, head, place.query_start, SHAPE.wide_index)
        mask = None if inputs.attn_mask is None else head_matrix(inputs.attn_mask, place.entry, head, 0, True)
        if inputs.rel_query is not None:
            head_rel_queries = head_matrix(inputs.rel_query, place.entry, head, place.query_start, SHAPE.wide_index)
        table = score_table(inputs, common, head, first, last, SHAPE, TILE)
        keys_table = key_table(inputs, common, head, first, last, SHAPE, TILE)
        if inputs.rel_p2c is not None:
            reached = reached_table(keys_table, key_lowest, key_highest, KEY_TILE)  # makes the gradient of the key
            far_sums = tl.full([TILE.block_n, 16], 0.0, tl.float32)  # of dS over far queries; see add_far_queries
        if inputs.rel_value is not None:
            values_table = value_table(inputs, head, first, last, SHAPE)
        scale = exponent_scale(common.scaling, mask)
        # Where the workspace has the pairs of this head: in one of its matrices, from part_start on
        if STORES:
            bh = (program // num_blocks - first_program // num_blocks) * SHAPE.group + member
            part_start = first_program % num_blocks * TILE.block_n

        # The far queries, then the near ones
        for PART in tl.static_range(first_part(TILE), stop_part(TILE)):
            start, stop = part_range(PART, row_first, row_stop, near_start, near_stop)
            # Along the queries, only terms of the keys can be carried from tile to tile (band.py).
            carried, keys_carried = 0, 0
            if PART == NEAR and inputs.rel_p2c is not None and KEY_TILE.carry is not None:
                relative = key_start - start - place.query_offset
                keys_carried = blocks_before(natural_key, keys_table, -relative, KEY_TILE)
            for position in tl.range(start, stop, TILE.block_m, disable_licm=TILE.rotation != "gather"):
                row_start = loop_position(PART, position, near_start, near_stop, TILE)
                offs_m = row_start + tile_m
                valid_m = offs_m < place.num_queries
                relative = key_start - row_start - place.query_offset
                query = load_rows(head_queries, row_start, tile_m, valid_m, SHAPE.head_dim, SHAPE.block_d)  # [M, D]
                is_past = row_start >= near_start  # the tile's keys, as these queries see them
                side = tl.where(is_past, 0, 1)
                rel_query, far_term = query, None
                if PART == NEAR and inputs.rel_query is not None and HAS_TERM:
                    # What rel_key meets [M, Dr]
                    rel_query = load_rows(head_rel_queries, row_start, tile_m, valid_m, SHAPE.rel_dim, SHAPE.block_dr)
                # P = exp(S - lse) [M, N], S the forward's logits: the relative terms, and Q K^T added to them
                row_max, log_sum = load_softmax_stats(per_query.softmax_stats, place, head, offs_m, valid_m)
                if PART == FAR and HAS_TERM and TILE.coverage == "clamp":
                    far_term = side_vector(per_query.far_scores, place.entry, head, side, place.query_start)
                    far_term = tl.load(far_term + offs_m, mask=valid_m, other=0.0)  # [M]
                tile_queries = Queries(rel_query, table, far_term, offs_m, valid_m)
                tile_keys = Keys(natural_key, keys_table, inputs.far_keys, offs_n, valid_n)
                terms, carried, keys_carried = relative_terms(
                    tile_queries, tile_keys, carried, keys_carried, relative, is_past, place, head, PART, TILE
                )
                scores, is_visible, slope = tile_logits(
                    query, key, terms, tile_queries, tile_keys, relative, mask, place, common, True, PART, TILE
                )
                beyond = far_term if is_linear(common.scaling.softcap, mask) else None
                probs = probabilities(scores, beyond, is_visible, scale, row_max, log_sum)
                keep = None
                if common.dropout.seed is not None:
                    keep = keep_mask(common.dropout, place.batch, head, offs_m[:, None], offs_n[None, :])
                # dP = dO V^T [M, N], and dO times the rows of rel_value along the diagonals
                d_out = load_rows(head_d_outs, row_start, tile_m, valid_m, SHAPE.value_dim, SHAPE.block_dv)  # [M, Dv]
                if WANTS_SCORES:
                    if PART == NEAR and inputs.rel_value is not None:
                        d_probs = whole_tile(d_out, values_table, relative, VALUE_TILE)
                    elif inputs.rel_value is not None and TILE.coverage == "clamp":
                        far_term = side_vector(per_query.far_values, place.entry, head, side, place.query_start)
                        far_term = tl.load(far_term + offs_m, mask=valid_m, other=0.0)  # [M]
                        d_probs = tl.broadcast_to(far_term[:, None], (TILE.block_m, TILE.block_n))
                    else:
                        d_probs = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
                    d_probs = tile_scores(d_out, value, d_probs, TILE)
                # The probabilities that dropout keeps, in the dtype of dO; of near tiles to the workspace, from this column on
                IS_STORED: tl.constexpr = STORES and PART == NEAR
                if IS_STORED:
                    column = key_start - first_column_key(row_start, place.query_offset, part_start, window, LAYOUT)
                kept_probs = (probs if common.dropout.seed is None else tl.where(keep, probs, 0.0)).to(d_out.dtype)
                if IS_STORED and stored_probs is not None:
                    probs_matrix = head_matrix(stored_probs, 0, bh, 0, False)
                    store_tile(probs_matrix, kept_probs, row_start, tile_m, valid_m, column, TILE, LAYOUT)
                # dV += P^T dO. This product stands between those of dP and dK: the matrix units have work while dS is computed.
                if d_values is not None:
                    # [N, M] @ [M, Dv] -> [N, Dv]
                    d_value = tl.dot(tl.trans(kept_probs), d_out, d_value, input_precision=TILE.precision)
                # dS = P (dP - delta) [M, N], to the workspace
                if WANTS_SCORES:
                    delta = row_vector(per_query.deltas, place.entry, head, place.query_start)
                    delta = tl.load(delta + offs_m, mask=valid_m, other=0.0)  # [M]
                    d_scores = score_gradients(probs, d_probs, delta, is_visible, keep, common, inputs.rel_value is not None)
                    if common.scaling.softcap is not None:  # through c tanh(x / c)
                        d_scores *= slope
                    d_scores = d_scores.to(query.dtype)
                    if IS_STORED and ds is not None:
                        store_tile(head_matrix(ds, 0, bh, 0, False), d_scores, row_start, tile_m, valid_m, column, TILE, LAYOUT)
                    if inputs.rel_p2c is not None:
                        d_scores = in_natural_order(d_scores, TILE)
                    if PART == FAR and inputs.far_keys is not None:
                        far_sums = add_far_queries(far_sums, d_scores, is_past, TILE)
                    # dK += dS^T Q, and dS^T along the diagonals times the rows of rel_p2c
                    if d_keys is not None:
                        # [N, M] @ [M, D] -> [N, D]
                        d_key = settled(tl.dot(tl.trans(d_scores), query, d_key, input_precision=TILE.precision))
                        if PART == NEAR and inputs.rel_p2c is not None:
                            d_key = add_key_rows(d_key, d_scores, reached, relative, common.scaling, TILE)
        # Queries beyond a clamped rel_p2c have one of its end rows
        if inputs.far_keys is not None and WANTS_SCORES:
            past, future = far_query_sums(far_sums)  # [N], [N]
            if per_query.end_rows is not None:
                unit = rel_unit(common.scaling)
                rows, width, of_past, of_future = per_query.end_rows, SHAPE.head_dim, past * unit, future * unit
                are_keys = exists(key_start + tl.arange(0, TILE.block_n), place, common.window)
                store_end_rows(rows, head, place.batch, block, are_keys, of_past, of_future, natural_key, width, SHAPE.block_d)
            if d_keys is not None:
                d_key = add_key_end_rows(d_key, past, future, keys_table, key_lowest, key_highest, TILE)

    # Units, and store dK [N, D] and dV [N, Dv].
    valid_n = offs_n < place.key_rows  # padding has a gradient as well: zero
    if d_keys is not None:
        unit = tl.cast(common.scaling.base_2_scale, tl.float32) * LN_2
        d_keys = head_matrix(d_keys, place.entry, key_head, place.key_start, SHAPE.wide_index)
        rows, valid = tile_n, valid_n
        if inputs.rel_p2c is not None:  # in their natural order
            rows = tl.arange(0, TILE.block_n)
            valid = key_start + rows < place.key_rows
        store_rows(d_keys, key_start, rows, valid, d_key * unit, SHAPE.head_dim, SHAPE.block_d)
    if d_values is not None:
        if common.dropout.seed is not None:
            d_value *= tl.cast(common.dropout.keep_scale, tl.float32)
        d_values = head_matrix(d_values, place.entry, key_head, place.key_start, SHAPE.wide_index)
        store_rows(d_values, key_start, tile_n, valid_n, d_value, SHAPE.value_dim, SHAPE.block_dv)

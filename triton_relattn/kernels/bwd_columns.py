"""Backward, second kernel: a program owns a block of keys and walks the queries that see them."""

import triton
import triton.language as tl

from .band import FAR, NEAR, delayed, empty_band, near_keys, part_range, rotate, table_block, walk_position
from .masking import first_query, key_length, visible
from .scores import LN_2, LOG2_E, probabilities, tile_scores
from .tiles import head_matrix, key_order, load_rows, row_vector, store_rows


@triton.jit
def columns_kernel(
    queries,
    keys,
    values,
    table,
    d_outs,
    d_keys,
    d_values,
    key_lengths_ptr,
    lse_ptr,
    delta_ptr,
    far_lse_ptr,
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
    """d_key and d_value of BLOCK_N keys of one head. d_keys or d_values may be None; delta and far_lse as of rows_kernel.

    Grid: (key blocks * batch * heads,), key blocks fastest; with a causal mask the first have the longest walks.
    """
    num_blocks = tl.cdiv(seqlen_k, BLOCK_N)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % num_heads
    batch = tl.program_id(0) // num_blocks // num_heads

    key_start = block * BLOCK_N
    tile_m = tl.arange(0, BLOCK_M)
    tile_n = key_order(BLOCK_N)
    offs_n = key_start + tile_n
    num_keys = key_length(key_lengths_ptr, batch, seqlen_k)
    valid_n = offs_n < num_keys
    queries = head_matrix(queries, batch, head, WIDE_INDEX)
    d_outs = head_matrix(d_outs, batch, head, WIDE_INDEX)
    key = load_rows(head_matrix(keys, batch, head, WIDE_INDEX), key_start, tile_n, valid_n, HEAD_DIM, BLOCK_D)
    if d_keys is not None:
        value = load_rows(head_matrix(values, batch, head, WIDE_INDEX), key_start, tile_n, valid_n, VALUE_DIM, BLOCK_DV)
        d_key = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if d_values is not None:
        d_value = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    head_index = batch * num_heads + head
    lse = row_vector(lse_ptr, head_index, seqlen_q)
    if OUTSIDE == "clamp":
        far_lse = row_vector(far_lse_ptr, 2 * head_index, seqlen_q)
    base_2_scale = tl.cast(base_2_scale, tl.float32)

    # Along the queries the relative position falls: keys in the future of the table come first.
    row_stop = tl.where(key_start < num_keys, seqlen_q, 0)
    row_first = first_query(key_start, query_offset, IS_CAUSAL) // BLOCK_M * BLOCK_M
    near_start = row_first
    near_stop = row_first if OUTSIDE is None else row_stop
    if OUTSIDE is not None:
        table = head_matrix(table, batch, head, WIDE_INDEX)
    if OUTSIDE == "clamp" or OUTSIDE == "zero":
        # As seen from the keys: i - j has the sign and the limits turned round.
        near_start, near_stop = near_keys(key_start, -last, -first, -query_offset, BLOCK_N, BLOCK_M, OUTSIDE)

    near_start, near_stop = tl.maximum(near_start, row_first), tl.maximum(near_stop, row_first)

    for PART in tl.static_range(NEAR if OUTSIDE == "none" else FAR, FAR + 1 if OUTSIDE is None else NEAR + 1):
        start, stop = part_range(PART, row_first, row_stop, near_start, near_stop)
        for position in tl.range(start, stop, BLOCK_M):
            row_start = walk_position(PART, position, near_start, near_stop, OUTSIDE)
            offs_m = row_start + tile_m
            valid_m = offs_m < seqlen_q
            query = load_rows(queries, row_start, tile_m, valid_m, HEAD_DIM, BLOCK_D)
            if PART == NEAR:
                relative = key_start - row_start - query_offset
                carried = empty_band(BLOCK_M, BLOCK_N)
                for ago in tl.static_range(BLOCK_M // BLOCK_N, -1, -1):
                    behind = relative - ago * BLOCK_N
                    band = table_block(query, table, behind, first, last, HEAD_DIM, BLOCK_D, BLOCK_N, OUTSIDE, INPUT_PRECISION)
                    band, carried = delayed(band, carried, BLOCK_M, BLOCK_N, BACK=False, ROTATED=False)
                scores = rotate(band, BLOCK_M, BLOCK_N)
            else:
                scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            scores = tile_scores(query, key, scores, INPUT_PRECISION)
            # A query that does not exist is zeros, which a table row of NaN would turn into NaN for all keys.
            seen = valid_m[:, None] & visible(offs_m[:, None], offs_n[None, :], num_keys, query_offset, IS_CAUSAL)
            if PART == FAR and OUTSIDE == "clamp":
                future = tl.where(row_start < near_start, seqlen_q, 0)
                base_2_lse = tl.load(far_lse + future + offs_m, mask=valid_m, other=0.0)
            else:
                base_2_lse = tl.load(lse + offs_m, mask=valid_m, other=0.0) * LOG2_E
            probs = probabilities(scores, seen, base_2_scale, base_2_lse)
            d_out = load_rows(d_outs, row_start, tile_m, valid_m, VALUE_DIM, BLOCK_DV)
            if d_values is not None:
                # [N, M] @ [M, Dv] -> [N, Dv]
                d_value = tl.dot(tl.trans(probs.to(d_out.dtype)), d_out, d_value, input_precision=INPUT_PRECISION)
            if d_keys is not None:
                # [M, Dv] @ [Dv, N] -> [M, N]
                d_probs = tl.dot(d_out, tl.trans(value), input_precision=INPUT_PRECISION)
                delta = tl.load(row_vector(delta_ptr, head_index, seqlen_q) + offs_m, mask=valid_m, other=0.0)
                d_scores = probs * (d_probs - delta[:, None])
                # [N, M] @ [M, D] -> [N, D]
                d_key = tl.dot(tl.trans(d_scores.to(query.dtype)), query, d_key, input_precision=INPUT_PRECISION)

    exists = offs_n < seqlen_k
    if d_keys is not None:
        store_rows(
            head_matrix(d_keys, batch, head, WIDE_INDEX),
            key_start,
            tile_n,
            exists,
            d_key * base_2_scale * LN_2,
            HEAD_DIM,
            BLOCK_D,
        )
    if d_values is not None:
        store_rows(head_matrix(d_values, batch, head, WIDE_INDEX), key_start, tile_n, exists, d_value, VALUE_DIM, BLOCK_DV)

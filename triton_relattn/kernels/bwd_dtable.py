"""Backward, fourth kernel: the gradient of a table, from what the dkv kernel has stored of each pair.

    d_rel_key[r]   = rel_scale sum_i dS[i, i + r] q_i
    d_rel_bias[r]  = sum_i dS[i, i + r]
    d_rel_value[r] = sum_i P[i, i + r] d_out_i

(minimal_backward.py has the same for one head in 20 lines: dtable_kernel.)

Row r of the table met the pairs (i, i + r): a diagonal of dS. In memory the dS of query i + 1 and key i + 1 + r lies one row and
one element behind that of i and i + r. So a tile of M queries and N successive r, ``band[m, n] = dS[i, i + r0 + n]``, is a load
with the row stride of dS plus one, and the sum over the queries is a product, ``band^T [N, M] @ Q [M, D] -> [N, D]``:

                r = -2 -1  0  1  2
    i = 0              .   .  0  1  2          the numbers are the keys i + r
    i = 1              .   0  1  2  .          a column is a diagonal of dS: one row of the table
    i = 2              0   1  2  .  .

A program owns a block of table rows and loops over the queries. No two programs add to the same number, so there are no atomics
and the result repeats bit for bit. Where there are fewer blocks of rows than a GPU can work on at once, several programs share
a block, each with a partial sum of its own (table_gradient.py adds these up).

Loads of 16 bytes. A row of a band begins at key i + r0, wherever that is, but 16 bytes begin at every STEP-th key only (8 of 16
bits, 4 of 32). So a tile has every STEP-th query, those for which i + r0 is a multiple of STEP, and STEP passes, each with r0 one
less than before, cover all queries. With STEP = 4 and r0 = 2, N = 4:

    pass 0, r0 =  2    queries 2, 6, 10, ...    keys  4..7,  8..11, 12..15, ...
    pass 1, r0 =  1    queries 3, 7, 11, ...    keys  4..7,  8..11, 12..15, ...
    pass 2, r0 =  0    queries 0, 4,  8, ...    keys  0..3,  4..7,   8..11, ...
    pass 3, r0 = -1    queries 1, 5,  9, ...    keys  0..3,  4..7,   8..11, ...

Column n of a band is at r0 + n, so from pass to pass the sum of a position moves on by one, from row n of the accumulator to
n + 1. Only positions that all passes have seen are complete: N - STEP + 1 of them, the ROWS of a program.
"""

import triton
import triton.language as tl

from .tile.blocks import head_matrix, load_rows, locate, row_vector, store_rows
from .tile.logits import rel_unit
from .workspace.stored import (
    first_column_key,
    load_tile,
    program_rows,
    query_step,
    readable_keys,
    stored_part,
    table_bh_range,
    table_share,
    window_in_table,
)


@triton.jit
def queries_at(relative, query_offset, first_key, stop_key, STEP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (start, stop) of the queries that have a key of first_key .. stop_key at one of N successive relative positions;
    start is a multiple of STEP."""
    start = tl.maximum(first_key - query_offset - relative - (BLOCK_N - 1), 0) // STEP * STEP
    return start, tl.maximum(stop_key - query_offset - relative, 0)


@triton.jit(do_not_specialize=["first_program", "stop_program", "first", "last", "num_heads"])
def dtable_kernel(
    inputs,
    vectors,
    stored,
    d_rows,
    d_biases,
    first_program,
    stop_program,
    common,
    first,
    last,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    FOR_VALUES: tl.constexpr,
    PER_HEAD: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Compute partial sums of the gradients of table rows: d_rows [splits, heads or 1, R, D], d_biases [splits, heads or 1, R].
    Either may be None. ADDS: add to the sums that are there.

    vectors: the queries, or what rel_key meets in their place, and stored is dS, [1, heads, Nq, columns]. FOR_VALUES: vectors are
    d_out, and stored is P. first_program, stop_program: the programs of the dkv kernel whose numbers the workspace has.

    Pairs beyond a clamped table are those of dq_kernel (table_gradient.py).

    Grid: as table_share has it; a program takes every splits-th block of queries of all heads that use its table.
    """
    TABLE: tl.constexpr = TILE.value_tile if FOR_VALUES else TILE
    STEP: tl.constexpr = query_step(stored[0].dtype.element_ty.primitive_bitwidth)
    ROWS: tl.constexpr = program_rows(TILE.block_n, STEP)  # of the N rows of a tile; the others are a neighbour's
    # This program's rows of the table, and its share of the queries
    num_blocks = tl.cdiv(last - first + 1, ROWS)
    block, table_head, split, num_splits = table_share(first, ROWS, num_blocks, common, num_heads, PER_HEAD)
    first_position = first + block * ROWS
    tile_m = tl.arange(0, TILE.block_m)
    tile_n = tl.arange(0, TILE.block_n)
    previous_row = tl.maximum(tile_n - 1, 0)[:, None]

    # The sums: of rows [N, D], of biases [N, 16]
    if d_rows is not None:
        acc = tl.full([TILE.block_n, TABLE.block_width], 0.0, tl.float32)
    if d_biases is not None:
        # A product with ones, the narrowest that matrix units take, sums over the queries: all columns are alike.
        bias_acc = tl.full([TILE.block_n, 16], 0.0, tl.float32)
        ones = tl.full([TILE.block_m, 16], 1.0, stored[0].dtype.element_ty)

    # The heads (bh: sequence * heads + head) and the keys that the workspace has; of these the heads that use this table
    first_bh, stop_bh, first_key, stop_key = stored_part(first_program, stop_program, common.sequences, LAYOUT, SHAPE.group)
    first_key = first_key // STEP * STEP  # changes nothing, but tells the compiler that it is a multiple
    stop_key = tl.minimum(stop_key, common.sequences.max_seqlen_k)
    bh_start, bh_step = table_bh_range(table_head, first_bh, num_heads, PER_HEAD)
    num_bh = tl.cdiv(tl.maximum(stop_bh - bh_start, 0), bh_step)
    window = common.window
    if TILE.coverage != "full":
        window = window_in_table(window, first, last)

    for pass_number in tl.range(STEP):
        relative = first_position - pass_number
        # The sum of a position moves on by a row; row 0 then has what is discarded at the end. (In the first pass all are zero.)
        if d_rows is not None:
            acc = tl.gather(acc, tl.broadcast_to(previous_row, acc.shape), axis=0)
        if d_biases is not None:
            bias_acc = tl.gather(bias_acc, tl.broadcast_to(previous_row, bias_acc.shape), axis=0)
        # Queries of a head that have a key of the workspace at one of these positions, at most; none beyond the window
        if common.sequences.query_offsets is None:
            start, stop = queries_at(relative, common.sequences.query_offset, first_key, stop_key, STEP, TILE.block_n)
            span = tl.minimum(stop, common.sequences.max_seqlen_q) - start
        else:
            span = tl.minimum(common.sequences.max_seqlen_q, stop_key - first_key + TILE.block_n + STEP)
        if common.window[1] is not None:
            span = tl.where(relative > common.window[1], 0, span)
        if common.window[0] is not None:
            span = tl.where(relative + (TILE.block_n - 1) < -common.window[0], 0, span)
        blocks_per_head = tl.cdiv(tl.maximum(span, 0), TILE.block_m * STEP)

        for block_number in tl.range(split, num_bh * blocks_per_head, num_splits):
            # A block of queries i of a head, those for which i + r is a multiple of STEP
            bh = bh_start + block_number // tl.maximum(blocks_per_head, 1) * bh_step
            place = locate(common.sequences, common.window, bh // num_heads)
            shift = place.query_offset + relative
            start, _ = queries_at(relative, place.query_offset, first_key, stop_key, STEP, TILE.block_n)
            block_start = start + block_number % tl.maximum(blocks_per_head, 1) * (TILE.block_m * STEP)
            offset = -shift & (STEP - 1)  # of the first query i for which i + r is a multiple of STEP
            offs_m = block_start + offset + tile_m * STEP
            valid_m = offs_m < place.num_queries
            # band [M, N] = dS[i, i + r]. Hidden pairs may never have been stored, and in a band have no place: they are 0.
            key_low, key_high = readable_keys(offs_m, place, window, first_key, stop_key, STEP)
            column_keys = first_column_key(offs_m, place.query_offset, first_key, window, LAYOUT)
            matrix = head_matrix(stored, 0, bh - first_bh, 0, False)
            band = load_tile(matrix, offs_m, offs_m + shift, column_keys, key_low, key_high, TILE.block_n)
            if d_biases is not None:
                # [N, M] @ [M, 16] -> [N, 16]
                bias_acc = tl.dot(tl.trans(band), ones, bias_acc, input_precision="ieee")
            if d_rows is not None:
                head_vectors = head_matrix(vectors, place.entry, bh % num_heads, place.query_start, SHAPE.wide_index)
                rows = offset + tile_m * STEP  # as offs_m, from block_start on
                # The queries, or rows of dO: [M, D]
                vector = load_rows(head_vectors, block_start, rows, valid_m, TABLE.width, TABLE.block_width)
                # [N, M] @ [M, D] -> [N, D]
                acc = tl.dot(tl.trans(band), vector, acc, input_precision=TILE.precision)

    # Each program stores its own rows; the others are incomplete. Sums of hidden positions are garbage, and become 0.
    position = first_position - (STEP - 1) + tile_n
    is_visible = position >= first_position
    if common.window[1] is not None:
        is_visible = is_visible & (position <= common.window[1])
    if common.window[0] is not None:
        is_visible = is_visible & (position >= -common.window[0])
    # After STEP passes row n of the sums is the position first_position - (STEP - 1) + n.
    row = first_position - (STEP - 1) - first
    valid = (position >= first_position) & (position < first_position + ROWS) & (position <= last)
    if d_rows is not None:
        unit = rel_unit(common.scaling)
        if FOR_VALUES:
            unit = 1.0 if common.dropout.seed is None else tl.cast(common.dropout.keep_scale, tl.float32)
        acc = tl.where(is_visible[:, None], acc * unit, 0.0)
        d_rows = head_matrix(d_rows, split, table_head, 0, SHAPE.wide_index)
        store_rows(d_rows, row, tile_n, valid, acc, TABLE.width, TABLE.block_width, ADDS)
    if d_biases is not None:
        bias = tl.where(is_visible, tl.max(bias_acc, axis=1), 0.0)  # [N, 16] -> [N]
        pointers = row_vector(d_biases, split, table_head, row) + tile_n
        if ADDS:
            bias += tl.load(pointers, mask=valid, other=0.0)  # [N]
        tl.store(pointers, bias, mask=valid)  # [N]

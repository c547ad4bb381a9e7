"""Addressing shared by the kernels. A matrix is (pointer, row stride, column stride) of one sequence and head."""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda


@triton.jit
def key_order(TILE: tl.constexpr):
    """Return the key, from the tile's first one on, of each column of a tile. For rotations in registers keys of its two halves
    take turns."""
    BLOCK_N: tl.constexpr = TILE.block_n
    n = tl.arange(0, BLOCK_N)
    if TILE.rotation == "gather":
        return n
    else:
        return n % 2 * (BLOCK_N // 2) + n // 2


@triton.jit
def head_matrix(tensor, entry, head, first_row, WIDE_INDEX: tl.constexpr):
    """Return the (length, width) matrix of one entry and head of a 4-d tensor, from first_row on. Its start is a 64-bit offset;
    with WIDE_INDEX, for 2**31 elements and more, so are those within it."""
    pointer, strides = tensor
    start = pointer + tl.cast(entry, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    start += tl.cast(first_row, tl.int64) * strides[2]
    if WIDE_INDEX:
        return start, tl.cast(strides[2], tl.int64), tl.cast(strides[3], tl.int64)
    else:
        return start, strides[2], strides[3]


@triton.jit
def head_vector(tensor, head):
    """Return (pointer, stride) of one head of a (1, H, R) tensor, which is given as (pointer, strides)."""
    pointer, strides = tensor
    return pointer + tl.cast(head, tl.int64) * strides[1], strides[2]


@triton.jit
def row_vector(tensor, entry, head, first_row):
    """Return the pointer to element [entry, head, first_row] of a (B, H, N) tensor of one number for each query."""
    pointer, strides = tensor
    return pointer + tl.cast(entry, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1] + first_row


@triton.jit
def side_vector(tensor, entry, head, side, first_row):
    """Return the pointer to [entry, head, side, first_row] of a (B, H, 2, N) tensor. Beyond a table, side 0 is the past, 1 the
    future."""
    pointer, strides = tensor
    start = pointer + tl.cast(entry, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    return start + tl.cast(side, tl.int64) * strides[2] + first_row


@triton.jit
def store_past_future(tensor, entry, head, first_row, offsets, valid, past, future):
    """Store two numbers of each valid query or key, as side 0 and side 1 of a (B, H, 2, N) tensor."""
    tl.store(side_vector(tensor, entry, head, 0, first_row) + offsets, past, mask=valid)
    tl.store(side_vector(tensor, entry, head, 1, first_row) + offsets, future, mask=valid)


@triton.jit
def store_end_rows(ends, head, sequence, block, valid, past, future, vectors, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Store the sums over the valid queries or keys of a block of past [M] and of future [M], times vectors [M, WIDTH], as the
    two rows of the block in ends (H, sequences, blocks, 2, WIDTH). vectors None: without them, WIDTH is 1."""
    strides = ends[1]
    rows = ends[0] + tl.cast(head, tl.int64) * strides[0] + tl.cast(sequence, tl.int64) * strides[1] + block * strides[2]
    columns = tl.arange(0, BLOCK_WIDTH)
    for SIDE in tl.static_range(2):
        sums = tl.where(valid, past if SIDE == 0 else future, 0.0)
        if vectors is None:
            tl.store(rows + SIDE, tl.sum(sums, axis=0))
        else:
            # What no pair has met may be NaN.
            row = tl.sum(tl.where(sums[:, None] == 0.0, 0.0, sums[:, None] * vectors.to(tl.float32)), axis=0)
            # Copies of a sum may differ, as in scores.lane_consistent.
            row = tl.max(tl.broadcast_to(row[None, :], vectors.shape), axis=0)
            tl.store(rows + SIDE * WIDTH + columns, row, mask=columns < WIDTH)


@triton.jit
def load_past_future(tensor, entry, head, first_row, offsets, valid):
    """Load what store_past_future has stored."""
    past = tl.load(side_vector(tensor, entry, head, 0, first_row) + offsets, mask=valid, other=0.0)
    future = tl.load(side_vector(tensor, entry, head, 1, first_row) + offsets, mask=valid, other=0.0)
    return past, future


@triton.jit
def row_pointers(matrix, start, rows, valid, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Return pointers [rows, BLOCK_WIDTH] to rows start + rows, and the mask of valid rows and, if padded, existing columns.
    start is a scalar, so that only one product has 64 bits."""
    columns = tl.arange(0, BLOCK_WIDTH)
    first_row = matrix[0] + tl.cast(start, tl.int64) * matrix[1]
    pointers = first_row + (rows[:, None] * matrix[1] + columns[None, :] * matrix[2])
    if WIDTH == BLOCK_WIDTH:
        return pointers, valid[:, None]
    else:
        return pointers, valid[:, None] & (columns < WIDTH)[None, :]


@triton.jit
def load_rows(matrix, start, rows, valid, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Load rows start + rows as [rows, BLOCK_WIDTH]. Rows that are not valid, and columns beyond WIDTH, are zero."""
    pointers, mask = row_pointers(matrix, start, rows, valid, WIDTH, BLOCK_WIDTH)
    # Past L1, where spilled registers lie. NVIDIA's copies to shared memory go past it, too; AMD's GPUs take this as "used once".
    CACHE: tl.constexpr = ".cg" if is_cuda() else ""
    return tl.load(pointers, mask=mask, other=0.0, cache_modifier=CACHE)


@triton.jit
def load_queries(inputs, place, head, row_start, tile_m, valid_m, SHAPE: tl.constexpr):
    """Load a block's queries [M, D], and what rel_key meets: the rows of rel_query [M, Dr] or, without it, the queries."""
    queries = head_matrix(inputs.query, place.entry, head, place.query_start, SHAPE.wide_index)
    query = load_rows(queries, row_start, tile_m, valid_m, SHAPE.head_dim, SHAPE.block_d)
    rel_query = query
    if inputs.rel_query is not None:
        rel_queries = head_matrix(inputs.rel_query, place.entry, head, place.query_start, SHAPE.wide_index)
        rel_query = load_rows(rel_queries, row_start, tile_m, valid_m, SHAPE.rel_dim, SHAPE.block_dr)
    return query, rel_query


@triton.jit
def store_rows(matrix, start, rows, valid, tile, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, ADDS: tl.constexpr = False):
    """Store the valid rows and existing columns of a tile [rows, BLOCK_WIDTH], in its dtype. ADDS: add to what is there."""
    if ADDS:
        tile += load_rows(matrix, start, rows, valid, WIDTH, BLOCK_WIDTH)
    pointers, mask = row_pointers(matrix, start, rows, valid, WIDTH, BLOCK_WIDTH)
    tl.store(pointers, tile.to(matrix[0].dtype.element_ty), mask=mask)

"""Addressing shared by the kernels. A matrix is (pointer, row stride, column stride) of one sequence and head."""

import triton
import triton.language as tl


@triton.jit
def key_order(TILE: tl.constexpr):
    """Logical index of each column of a tile, to load, mask and store keys.

    For rotations in registers (quads.py) columns of the tile's two chunks, its halves, take turns.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    n = tl.arange(0, BLOCK_N)
    if TILE.rotation == "gather":
        return n
    else:
        return n % 2 * (BLOCK_N // 2) + n // 2


@triton.jit
def head_matrix(tensor, entry, head, first_row, WIDE_INDEX: tl.constexpr):
    """The (length, width) matrix, from first_row on, of one batch entry and head of a 4-d tensor, given as (pointer, strides).

    Its start is a 64-bit offset; WIDE_INDEX makes the offsets within it 64-bit too, for matrices of 2**31 elements and more.
    """
    pointer, strides = tensor
    start = pointer + tl.cast(entry, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    start += tl.cast(first_row, tl.int64) * strides[2]
    if WIDE_INDEX:
        return start, tl.cast(strides[2], tl.int64), tl.cast(strides[3], tl.int64)
    else:
        return start, strides[2], strides[3]


@triton.jit
def head_vector(tensor, head):
    """(pointer, stride) of one head of a (1, H, R) tensor, given as (pointer, strides)."""
    pointer, strides = tensor
    return pointer + tl.cast(head, tl.int64) * strides[1], strides[2]


@triton.jit
def row_vector(tensor, entry, head, first_row):
    """Pointer to the number of first_row in a (B, H, N) tensor, given as (pointer, strides), that has one for every query."""
    pointer, strides = tensor
    return pointer + tl.cast(entry, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1] + first_row


@triton.jit
def side_vector(tensor, entry, head, side, first_row):
    """The same of a (B, H, 2, N) tensor that has two: for the keys in the past (side 0) and in the future (1) of the table."""
    pointer, strides = tensor
    start = pointer + tl.cast(entry, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    return start + tl.cast(side, tl.int64) * strides[2] + first_row


@triton.jit
def store_sides(tensor, place, head, offs_m, valid_m, past, future):
    """Store two numbers of each valid query: side 0 and side 1 of a (B, H, 2, N) tensor."""
    tl.store(side_vector(tensor, place.entry, head, 0, place.query_start) + offs_m, past, mask=valid_m)
    tl.store(side_vector(tensor, place.entry, head, 1, place.query_start) + offs_m, future, mask=valid_m)


@triton.jit
def row_pointers(matrix, start, rows, valid, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """[rows, BLOCK_WIDTH] pointers to rows start + rows, and the mask of valid rows and, if padded, existing columns.

    start is a scalar, so that only its product is computed anew from tile to tile, and in 64 bits.
    """
    columns = tl.arange(0, BLOCK_WIDTH)
    first_row = matrix[0] + tl.cast(start, tl.int64) * matrix[1]
    pointers = first_row + (rows[:, None] * matrix[1] + columns[None, :] * matrix[2])
    if WIDTH == BLOCK_WIDTH:
        return pointers, valid[:, None]
    else:
        return pointers, valid[:, None] & (columns < WIDTH)[None, :]


@triton.jit
def load_rows(matrix, start, rows, valid, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Load rows start + rows, [rows, BLOCK_WIDTH]; those that are not valid and columns beyond WIDTH are zero."""
    pointers, mask = row_pointers(matrix, start, rows, valid, WIDTH, BLOCK_WIDTH)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_rows(matrix, start, rows, valid, tile, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Store the valid rows and existing columns of [rows, BLOCK_WIDTH] in the matrix's dtype."""
    pointers, mask = row_pointers(matrix, start, rows, valid, WIDTH, BLOCK_WIDTH)
    tl.store(pointers, tile.to(matrix[0].dtype.element_ty), mask=mask)

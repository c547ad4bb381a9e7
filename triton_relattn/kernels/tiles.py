"""Addressing shared by the kernels. A matrix is (pointer, row stride, column stride) of one batch entry and head."""

import triton
import triton.language as tl


@triton.jit
def key_order(BLOCK_N: tl.constexpr):
    """Logical index of each tile column. Loads, masks and stores of keys take it from here, so that it may be permuted."""
    return tl.arange(0, BLOCK_N)


@triton.jit
def head_matrix(tensor, batch, head, WIDE_INDEX: tl.constexpr):
    """The (length, width) matrix of one batch entry and head of a 4-d tensor, given as (pointer, strides).

    Its start is a 64-bit offset; WIDE_INDEX makes the offsets within it 64-bit too, for matrices of 2**31 elements and more.
    """
    pointer, strides = tensor
    start = pointer + tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    if WIDE_INDEX:
        return start, tl.cast(strides[2], tl.int64), tl.cast(strides[3], tl.int64)
    else:
        return start, strides[2], strides[3]


@triton.jit
def row_vector(pointer, index, length):
    """One of the contiguous vectors of float32, each as long as the sequence, that hold a number for every query."""
    return pointer + tl.cast(index, tl.int64) * length


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

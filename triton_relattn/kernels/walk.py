"""The walk of a program along keys or queries, in two parts: near the diagonal, where the table is, and far from it."""

import triton
import triton.language as tl

# The two parts of a walk along keys or queries. Without a table there is only the first, with one that covers every pair only
# the second.
FAR = tl.constexpr(0)
NEAR = tl.constexpr(1)


@triton.jit
def near_keys(row_start, first, last, query_offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OUTSIDE: tl.constexpr):
    """(start, stop), multiples of BLOCK_N: the key tiles in which the term is not one number (or nothing) per query.

    Tiles before start have only r <= first (clamp) or r < first (zero); tiles from stop on only r >= last or r > last.
    """
    SLACK: tl.constexpr = 0 if OUTSIDE == "clamp" else 1
    last_past = first + row_start + query_offset - (BLOCK_N - 1) - SLACK
    first_future = last + row_start + (BLOCK_M - 1) + query_offset + SLACK
    start = tl.maximum(last_past + BLOCK_N, 0) // BLOCK_N * BLOCK_N
    stop = (tl.maximum(first_future, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return start, stop


@triton.constexpr_function
def clamp_margin(block_m, block_n):
    """How many relative positions beyond the table the near tiles can reach, and some more."""
    return block_m + block_n


@triton.jit
def part_range(PART: tl.constexpr, start, stop, near_start, near_stop):
    """(start, stop) of one part of a walk; the far part is what lies before and behind the near one, pushed together."""
    if PART == FAR:
        return start, tl.minimum(near_start, stop) + tl.maximum(stop - near_stop, 0)
    else:
        return near_start, tl.minimum(near_stop, stop)


@triton.jit
def walk_position(PART: tl.constexpr, position, near_start, near_stop, OUTSIDE: tl.constexpr):
    """Where the walk is: in the far part the near one is stepped over."""
    if PART == FAR and OUTSIDE is not None:
        return tl.where(position < near_start, position, position + near_stop - near_start)
    else:
        return position

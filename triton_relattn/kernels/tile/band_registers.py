"""The steps of band.py where rows are rotated in registers, for the layout of NVIDIA's matrix units (registers.py).

A tile is packed into parts, which are rotated and delayed: its two chunks [M, W] in float32, or words that hold a 16-bit element
of each.
"""

import triton
import triton.language as tl

from .registers import pack, rotate_rows, step_back_words, unpack


@triton.jit
def pack_tile(tile, TILE: tl.constexpr, DTYPE: tl.constexpr, SATURATE: tl.constexpr):
    """Return the parts of a tile [M, N]: two chunks or, if DTYPE has 16 bits, words. SATURATE: limit to float16's range."""
    low, high = tl.split(tl.reshape(tile, (TILE.block_m, TILE.block_n // 2, 2)))
    if DTYPE == tl.float32:
        return low, high
    else:
        return (pack(low, high, DTYPE, SATURATE),)


@triton.jit
def unpack_tile(parts, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Put a tile [M, N] together from its parts."""
    if len(parts) == 1:
        low, high = unpack(parts[0], DTYPE)
    else:
        low, high = parts
    return tl.reshape(tl.join(low, high), (TILE.block_m, TILE.block_n))


@triton.jit
def rotate(parts, TILE: tl.constexpr, BACK: tl.constexpr):
    """Rotate the rows of each part, as band.rotate does."""
    W: tl.constexpr = TILE.block_n // 2
    if len(parts) == 1:
        return (rotate_rows(parts[0], TILE.block_m, W, TILE.warps, BACK),)
    else:
        low = rotate_rows(parts[0], TILE.block_m, W, TILE.warps, BACK)
        return low, rotate_rows(parts[1], TILE.block_m, W, TILE.warps, BACK)


@triton.jit
def delay(parts, carried, group, wraps, GROUPS: tl.constexpr):
    """Return the parts that band.delay returns, and the state to carry on; also of the two chunks of a gather."""
    is_odd = group % 2 == 1
    if len(parts) == 1:
        due = parts[0]
        if GROUPS == 4:  # half of the groups are one whole tile behind
            due = tl.where(group >= 2, carried[1], due)
        latest = (step_back_words(due, carried[0], is_odd | wraps, is_odd & wraps),)
        return latest, ((due, parts[0]) if GROUPS == 4 else (due,))
    else:
        low, high = parts
        due_low, due_high = low, high
        if GROUPS == 4:
            due_low, due_high = tl.where(group >= 2, carried[2], low), tl.where(group >= 2, carried[3], high)
        late_low, late_high = tl.where(is_odd, carried[0], due_low), tl.where(is_odd, due_low, due_high)
        latest = tl.where(wraps, carried[1], late_low), tl.where(wraps, late_low, late_high)
        if GROUPS == 4:
            return latest, (due_high, late_high, low, high)
        else:
            return latest, (due_high, late_high)

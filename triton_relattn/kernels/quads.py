"""Rotation without shared memory: how the rows of a tile lie in a warp's registers. DERIVATION.md has a picture.

In the accumulator of matrix units (mma.m16n8, wgmma) a row lies in the four lanes of a quad: lane t of the quad holds columns
8 k + 2 t and 8 k + 2 t + 1, for all k. If the columns are those of keys in tiles.key_order, the two are column 4 k + t of the
tile's two chunks. To rotate both chunks by m is then, from its bits: other registers, chosen when compiling (8, or more than
all warps have rows) or by row (16, 32 and 4), and one exchange within quads. Written with tensors of one register, (warps, 8
rows, 4 lanes), which have the accumulator's layout: nothing is moved but that.

It is ordinary tensor code, right whatever the layout is. Where that is another one, conversions make it slow.
"""

# ruff: noqa: RUF005 - Triton's compiler has no starred elements in tuples.

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Selectors of prmt.b32 of a word and of the word before: by how many of a word's two elements to step back.
NEW = tl.constexpr(0x3210)
HALF_NEW = tl.constexpr(0x1076)
OLD = tl.constexpr(0x7654)
SWAPPED = tl.constexpr(0x1032)


@triton.constexpr_function
def registers_shape(block_m, width, warps):
    """(warps, 8 rows, 4 lanes, 2, ..., 2): as many twos as a thread has registers, in base 2."""
    count = block_m // (16 * warps) * 2 * (width // 4)
    return (warps, 8, 4) + (2,) * (count.bit_length() - 1)


@triton.jit
def step(registers, where, DISTANCE: tl.constexpr):
    """The registers of a row, those at a distance where the mask says so."""
    K: tl.constexpr = len(registers)
    stepped = ()
    for k in tl.static_range(K):
        stepped = stepped + (tl.where(where, registers[(k + DISTANCE) % K], registers[k]),)
    return stepped


@triton.jit
def rotate_rows(chunk, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr, BACK: tl.constexpr):
    """[M, W] -> [M, W]: row m by m places, ``rotated[m, n] = chunk[m, (n - m) mod W]``; BACK: the other way.

    16 * WARPS divides BLOCK_M, and row m = 16 (WARPS repeat + warp) + 8 half + row.
    """
    REPEATS: tl.constexpr = BLOCK_M // (16 * WARPS)
    K: tl.constexpr = WIDTH // 4
    SHAPE: tl.constexpr = registers_shape(BLOCK_M, WIDTH, WARPS)
    SIGN: tl.constexpr = 1 if BACK else -1
    warp = tl.broadcast_to(tl.arange(0, WARPS)[:, None, None], (WARPS, 8, 4))
    row = tl.broadcast_to(tl.arange(0, 8)[None, :, None], (WARPS, 8, 4))
    lane = tl.broadcast_to(tl.arange(0, 4)[None, None, :], (WARPS, 8, 4))
    by = row % 4

    chunk = tl.permute(tl.reshape(chunk, (REPEATS, WARPS, 2, 8, K, 4)), (1, 3, 5, 0, 2, 4))
    registers = (tl.reshape(chunk, SHAPE),)
    for _ in tl.static_range(len(SHAPE) - 3):
        low, high = (), ()
        for i in tl.static_range(len(registers)):
            first, second = tl.split(registers[i])
            low, high = low + (first,), high + (second,)
        registers = low + high

    rotated = ()
    for i in tl.static_range(2 * REPEATS):
        of_row = ()
        for k in tl.static_range(K):
            of_row = of_row + (registers[i * K + (k + SIGN * (2 * (i % 2) + 4 * WARPS * (i // 2))) % K],)
        for bit in tl.static_range(4):
            if 4 << bit < K:
                of_row = step(of_row, (warp >> bit) % 2 == 1, SIGN * (4 << bit))
        of_row = step(of_row, row >= 4, SIGN)
        # A lane offers the register that the lane it goes to is in need of: another one if that is round the corner.
        of_row = step(of_row, lane < by if BACK else lane + by >= 4, SIGN)
        for k in tl.static_range(K):
            rotated = rotated + (tl.gather(of_row[k], (lane + (by if BACK else 4 - by)) % 4, axis=2),)

    for _ in tl.static_range(len(SHAPE) - 3):
        joined = ()
        for i in tl.static_range(len(rotated) // 2):
            joined = joined + (tl.join(rotated[i], rotated[i + len(rotated) // 2]),)
        rotated = joined
    chunk = tl.permute(tl.reshape(rotated[0], (WARPS, 8, 4, REPEATS, 2, K)), (3, 0, 4, 1, 5, 2))
    return tl.reshape(chunk, (BLOCK_M, WIDTH))


@triton.constexpr_function
def conversion(dtype, saturate):
    """The instruction that makes a word of two float32 numbers."""
    kind = "bf16x2" if dtype == tl.bfloat16 else "satfinite.f16x2" if saturate else "f16x2"
    return f"cvt.rn.{kind}.f32 $0, $2, $1;"


@triton.jit
def bits(values):
    """16-bit numbers as the low halves of words."""
    return values.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def pack(low, high, DTYPE: tl.constexpr, SATURATE: tl.constexpr):
    """Words of two elements each, rounded to DTYPE, float16 (with SATURATE, beyond its range its largest number) or bfloat16."""
    if INTERPRETED:
        if DTYPE == tl.float16 and SATURATE:
            low, high = tl.clamp(low, -65504.0, 65504.0), tl.clamp(high, -65504.0, 65504.0)
        return bits(low.to(DTYPE)) | (bits(high.to(DTYPE)) << 16)
    else:
        CONVERT: tl.constexpr = conversion(DTYPE, SATURATE)
        return tl.inline_asm_elementwise(CONVERT, "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def unpack(words, DTYPE: tl.constexpr):
    """The two elements of each word."""
    return (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True), (words >> 16).to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def step_back_words(words, before, once, twice):
    """The words of a tile, each a chunk, or two, back where the masks say so: low element, high element, next word's low, ..."""
    if INTERPRETED:
        return tl.where(twice, before, tl.where(once, (words << 16) | (before >> 16), words))
    else:
        selector = tl.where(twice, OLD, tl.where(once, HALF_NEW, NEW))
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [words, before, selector], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def swap_elements(words, where):
    """Words, their two elements exchanged where the mask says so."""
    if INTERPRETED:
        return tl.where(where, (words << 16) | (words >> 16), words)
    else:
        selector = tl.where(where, SWAPPED, NEW)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, $2;", "=r,r,r", [words, selector], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def rotated_within(low, high, columns, WIDTH: tl.constexpr):
    """[M, N]: where ``low <= WIDTH chunk + (n - m) mod WIDTH < high``, of limits [M] and the logical columns, WIDTH chunk + n.

    A lane has every fourth column of a row, in an order that is rotated from row to row. A number with a bit for each, rotated
    as a whole, takes fewer instructions and registers than all their indices. WIDTH is at most 64.
    """
    WORDS: tl.constexpr = WIDTH // 4
    m = tl.arange(0, low.shape[0])[:, None]
    by = (columns[None, :] % 4 - m) & (WIDTH - 1)
    chunk = columns[None, :] // WIDTH
    start = (low[:, None] - by % 4 + 3 >> 2) - chunk * WORDS
    stop = (high[:, None] - by % 4 + 3 >> 2) - chunk * WORDS
    stop = tl.minimum(tl.maximum(stop, 0), WORDS)
    start = tl.minimum(tl.maximum(start, 0), stop)
    one = tl.full(start.shape, 1, tl.uint32)
    bits = (one << stop.to(tl.uint32)) - (one << start.to(tl.uint32))
    by = (by // 4).to(tl.uint32)
    bits = (bits >> by) | (bits << (WORDS - by))
    return (bits >> (columns % WIDTH // 4).to(tl.uint32)[None, :]) & 1 != 0

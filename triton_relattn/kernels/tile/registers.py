"""Rotation without shared memory: how the rows of a tile lie in a warp's registers. DERIVATION.md has a picture.

In the accumulator of matrix units (mma.m16n8, wgmma) a row lies in the four lanes of a quad: lane t of the quad holds columns
8 k + 2 t and 8 k + 2 t + 1, for all k. If keys are in the order of blocks.key_order, these two are column 4 k + t of the
tile's two chunks. To rotate both chunks by m, take m apart into its bits. Some only select other registers: when compiling (8,
and the multiples of 16 * warps), or by warp and row (16, 32 and 4). The rest takes one exchange within quads. The code works on
tensors of one register, (warps, 8 rows, 4 lanes), which have the accumulator's layout, so that nothing else is moved.

It is ordinary tensor code, right for any layout. With a layout other than that, conversions make it slow.
"""

# ruff: noqa: RUF005 - Triton's compiler has no starred elements in tuples.

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Selectors of prmt.b32 for a word and the word before. They step back by none (NEW), one or two of a word's two elements.
NEW = tl.constexpr(0x3210)
HALF_NEW = tl.constexpr(0x1076)
OLD = tl.constexpr(0x7654)


@triton.constexpr_function
def registers_shape(block_m, width, warps):
    """Return (warps, 8 rows, 4 lanes, 2, ..., 2), where the twos multiply to the registers that a thread has of the chunk."""
    count = block_m // (16 * warps) * 2 * (width // 4)
    return (warps, 8, 4) + (2,) * (count.bit_length() - 1)


@triton.jit
def step(registers, where, DISTANCE: tl.constexpr):
    """Shift a row's registers cyclically by DISTANCE, in the threads where the mask is set."""
    K: tl.constexpr = len(registers)
    stepped = ()
    for k in tl.static_range(K):
        stepped = stepped + (tl.where(where, registers[(k + DISTANCE) % K], registers[k]),)
    return stepped


@triton.jit
def join_registers(registers, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr):
    """Put a chunk [M, W] together from its registers, each of (warps, 8 rows, 4 lanes): those of a row side by side, as in
    rotate_rows."""
    REPEATS: tl.constexpr = BLOCK_M // (16 * WARPS)
    K: tl.constexpr = WIDTH // 4
    # Pairs of registers, then pairs of these, ...: one dimension of two more each time
    for _ in tl.static_range(len(registers_shape(BLOCK_M, WIDTH, WARPS)) - 3):
        joined = ()
        for i in tl.static_range(len(registers) // 2):
            joined = joined + (tl.join(registers[i], registers[i + len(registers) // 2]),)
        registers = joined
    # (warps, row, lane, repeat, half, k) -> (repeat, warps, half, row, k, lane) -> [M, W]
    chunk = tl.permute(tl.reshape(registers[0], (WARPS, 8, 4, REPEATS, 2, K)), (3, 0, 4, 1, 5, 2))
    return tl.reshape(chunk, (BLOCK_M, WIDTH))


@triton.jit
def rotate_rows(chunk, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr, BACK: tl.constexpr):
    """Rotate row m of a chunk [M, W] by m places: ``rotated[m, n] = chunk[m, (n - m) mod W]``. BACK: the other way.

    16 * WARPS divides BLOCK_M. Row m is 16 (WARPS repeat + warp) + 8 half + row; i below is 2 repeat + half.
    """
    REPEATS: tl.constexpr = BLOCK_M // (16 * WARPS)
    K: tl.constexpr = WIDTH // 4
    SHAPE: tl.constexpr = registers_shape(BLOCK_M, WIDTH, WARPS)
    SIGN: tl.constexpr = 1 if BACK else -1
    warp = tl.broadcast_to(tl.arange(0, WARPS)[:, None, None], (WARPS, 8, 4))
    row = tl.broadcast_to(tl.arange(0, 8)[None, :, None], (WARPS, 8, 4))
    lane = tl.broadcast_to(tl.arange(0, 4)[None, None, :], (WARPS, 8, 4))
    by = row % 4

    # Take the chunk apart: [M, W] -> (warps, row, lane, repeat, half, k), then one register after the other, (warps, row, lane)
    chunk = tl.permute(tl.reshape(chunk, (REPEATS, WARPS, 2, 8, K, 4)), (1, 3, 5, 0, 2, 4))
    registers = (tl.reshape(chunk, SHAPE),)
    for _ in tl.static_range(len(SHAPE) - 3):
        low, high = (), ()
        for i in tl.static_range(len(registers)):
            first, second = tl.split(registers[i])
            low, high = low + (first,), high + (second,)
        registers = low + high

    # Rotate by m in steps, m = 16 (WARPS repeat + warp) + 8 half + row; a step of one register is 4 columns.
    rotated = ()
    for i in tl.static_range(2 * REPEATS):
        # By 16 WARPS repeat + 8 half: other registers, known when compiling
        row_registers = ()
        for k in tl.static_range(K):
            row_registers = row_registers + (registers[i * K + (k + SIGN * (2 * (i % 2) + 4 * WARPS * (i // 2))) % K],)
        # By 16 warp, bit by bit, and by 4 in the lower half of the 8 rows
        for bit in tl.static_range(4):
            if 4 << bit < K:
                row_registers = step(row_registers, (warp >> bit) % 2 == 1, SIGN * (4 << bit))
        row_registers = step(row_registers, row >= 4, SIGN)
        # By row % 4: along the lanes of a quad. Each lane sends the register that its target lane needs: the neighbouring one if
        # the target wraps around the quad.
        row_registers = step(row_registers, lane < by if BACK else lane + by >= 4, SIGN)
        for k in tl.static_range(K):
            rotated = rotated + (tl.gather(row_registers[k], (lane + (by if BACK else 4 - by)) % 4, axis=2),)

    return join_registers(rotated, BLOCK_M, WIDTH, WARPS)


# A tile whose elements depend on n - m alone, n its key and m its query. A register of row
# 16 (warps * repeat + warp) + 8 half + row that holds column 4 k + lane of a chunk has
# n - m = lane - row - 16 warp + 4 (k + chunk * N / 8 - 2 half - 4 warps * repeat). What stands in brackets is the number of a
# diagonal. A thread has N / 4 + 2 of them for each repeat, for N elements.


@triton.jit
def diagonal_offsets(WARPS: tl.constexpr):
    """Return n - m on diagonal 0 of each thread, [warps * 8 rows * 4 lanes]; from one diagonal to the next it grows by 4."""
    thread = tl.arange(0, 32 * WARPS)
    # lane - row - 16 warp
    return thread % 4 - thread // 4 % 8 - 16 * (thread // 32)


@triton.constexpr_function
def first_diagonal(block_m, warps):
    """Return the lowest number of a diagonal; the highest one is N / 4 - 1."""
    return -2 - 4 * warps * (block_m // (16 * warps) - 1)


@triton.jit
def join_diagonals(diagonals, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Put a tile [M, N] together from the values on its diagonals, each of (warps, 8 rows, 4 lanes), from first_diagonal on."""
    K: tl.constexpr = BLOCK_N // 8
    FIRST: tl.constexpr = first_diagonal(BLOCK_M, WARPS)
    low, high = (), ()
    for repeat in tl.static_range(BLOCK_M // (16 * WARPS)):
        for half in tl.static_range(2):
            for k in tl.static_range(-2 * half - 4 * WARPS * repeat, K - 2 * half - 4 * WARPS * repeat):
                # Register k of either chunk; the second chunk lies N / 8 diagonals further.
                low, high = low + (diagonals[k - FIRST],), high + (diagonals[k + K - FIRST],)
    # Two chunks [M, N / 2] -> [M, N], whose columns take turns
    low = join_registers(low, BLOCK_M, BLOCK_N // 2, WARPS)
    high = join_registers(high, BLOCK_M, BLOCK_N // 2, WARPS)
    return tl.reshape(tl.join(low, high), (BLOCK_M, BLOCK_N))


@triton.constexpr_function
def conversion(dtype, saturate):
    """Return the PTX instruction that packs two float32 numbers into a word."""
    kind = "bf16x2" if dtype == tl.bfloat16 else "satfinite.f16x2" if saturate else "f16x2"
    return f"cvt.rn.{kind}.f32 $0, $2, $1;"


@triton.jit
def bits(values):
    """Return 16-bit numbers as the low halves of words."""
    return values.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def pack(low, high, DTYPE: tl.constexpr, SATURATE: tl.constexpr):
    """Pack two elements into each word, rounded to DTYPE: bfloat16 or float16 (SATURATE: limited to its range)."""
    if INTERPRETED:
        if DTYPE == tl.float16 and SATURATE:
            low, high = tl.clamp(low, -65504.0, 65504.0), tl.clamp(high, -65504.0, 65504.0)
        return bits(low.to(DTYPE)) | (bits(high.to(DTYPE)) << 16)
    else:
        CONVERT: tl.constexpr = conversion(DTYPE, SATURATE)
        return tl.inline_asm_elementwise(CONVERT, "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def unpack(words, DTYPE: tl.constexpr):
    """Return the two elements of each word."""
    return (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True), (words >> 16).to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def step_back_words(words, before, once, twice):
    """Step back by one chunk where ``once`` is set, by two where ``twice`` is. In order of chunks, the elements are: low and high
    of the word before, low and high of the word."""
    if INTERPRETED:
        return tl.where(twice, before, tl.where(once, (words << 16) | (before >> 16), words))
    else:
        selector = tl.where(twice, OLD, tl.where(once, HALF_NEW, NEW))
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [words, before, selector], dtype=tl.uint32, is_pure=True, pack=1
        )


# The steps of band.py. A tile is packed into parts, which are rotated and delayed: its two chunks [M, W] in float32, or words
# that hold a 16-bit element of each.


@triton.jit
def pack_tile(tile, TILE: tl.constexpr, DTYPE: tl.constexpr, SATURATE: tl.constexpr):
    """Return the parts of a tile [M, N]: two chunks or, if DTYPE has 16 bits, words. SATURATE: limit to float16's range."""
    # In blocks.key_order the columns of the two chunks take turns: [M, N] -> [M, N / 2], [M, N / 2]
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
    # A group of rows lags by one chunk more than the group before: two of them by a tile.
    is_odd = group % 2 == 1
    if len(parts) == 1:  # words of both chunks
        due = parts[0]
        if GROUPS == 4:  # half of the groups are one whole tile behind
            due = tl.where(group >= 2, carried[1], due)
        latest = (step_back_words(due, carried[0], is_odd | wraps, is_odd & wraps),)
        return latest, ((due, parts[0]) if GROUPS == 4 else (due,))
    else:  # two chunks: the same by selections
        low, high = parts
        due_low, due_high = low, high
        if GROUPS == 4:
            due_low, due_high = tl.where(group >= 2, carried[2], low), tl.where(group >= 2, carried[3], high)
        # One chunk back for odd groups, and one more where the rotation goes around
        late_low, late_high = tl.where(is_odd, carried[0], due_low), tl.where(is_odd, due_low, due_high)
        latest = tl.where(wraps, carried[1], late_low), tl.where(wraps, late_low, late_high)
        if GROUPS == 4:
            return latest, (due_high, late_high, low, high)
        else:
            return latest, (due_high, late_high)

"""Blocks of queries and keys: where their rows lie in memory, which pairs see each other, and the loop over the tiles.

All kernels use these functions, so that what a query sees is stated once. A loop over tiles has two parts: near the diagonal,
where the table has rows, and far from it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from ..._core.dropout import ROUNDS

# The two parts of a loop over keys or queries. Without a table there is only the far part; with a table that covers every pair,
# only the near part.
FAR = tl.constexpr(0)
NEAR = tl.constexpr(1)

DROPOUT_ROUNDS = tl.constexpr(ROUNDS)


class Place(NamedTuple):
    """A sequence of the batch: where it lies in the tensors, and which of its keys are read.

    Keys before first_key and from num_keys on are hidden from every query, by the window or a length. They are not read, so they
    may hold anything, even NaN. (A key that some query sees must not: it meets the zero probabilities of others in its tile.)
    """

    batch: Any  # number of the sequence
    entry: Any  # batch entry of the tensors; 0 if they are packed
    query_start: Any  # row of its first query
    key_start: Any
    num_queries: Any
    key_rows: Any  # keys with padding
    first_key: Any
    num_keys: Any
    query_offset: Any


@triton.jit
def locate(sequences, window, batch):
    """Return the place of a sequence. sequences: call.Sequences; window: (left, right), None where unbounded."""
    if sequences.query_offsets is None:
        query_offset = sequences.query_offset
    else:
        query_offset = tl.load(sequences.query_offsets + batch).to(tl.int32)
    # A batch entry, whose keys may be padded
    if sequences.cu_seqlens_q is None:
        entry, query_start, key_start = batch, 0, 0
        num_queries, key_rows = sequences.max_seqlen_q, sequences.max_seqlen_k
        num_keys = key_rows
        if sequences.key_lengths is not None:  # limited to [0, Nk]
            num_keys = tl.minimum(tl.maximum(tl.load(sequences.key_lengths + batch), 0), num_keys).to(tl.int32)
    # A sequence of a pack: rows of the only batch entry
    else:
        entry = 0
        query_start = tl.load(sequences.cu_seqlens_q + batch)
        key_start = tl.load(sequences.cu_seqlens_k + batch)
        num_queries = (tl.load(sequences.cu_seqlens_q + batch + 1) - query_start).to(tl.int32)
        key_rows = (tl.load(sequences.cu_seqlens_k + batch + 1) - key_start).to(tl.int32)
        num_keys = tl.where(num_queries > 0, key_rows, 0)  # of those that nobody sees none is read
    # The keys between what the first query sees of the past and the last one of the future
    first_key = 0
    if window[0] is not None:
        first_key = tl.maximum(query_offset - window[0], 0)
    if window[1] is not None:
        num_keys = tl.maximum(tl.minimum(num_keys, num_queries + query_offset + window[1]), 0)
    return Place(batch, entry, query_start, key_start, num_queries, key_rows, first_key, num_keys, query_offset)


@triton.jit
def locate_queries(sequences, window, num_heads, BLOCK_M: tl.constexpr):
    """Return (first query, head, place) of a program. Grid: (blocks of queries * batch * heads,), blocks fastest."""
    num_blocks = tl.cdiv(sequences.max_seqlen_q, BLOCK_M)
    block = tl.program_id(0) % num_blocks
    head = tl.program_id(0) // num_blocks % num_heads
    place = locate(sequences, window, tl.program_id(0) // num_blocks // num_heads)
    if window[1] is not None:
        block = num_blocks - 1 - block  # the longest loops first
    return block * BLOCK_M, head, place


# Rows of tensors. A matrix is (pointer, row stride, column stride) of one sequence and head.


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
def row_vector(tensor, entry, head, first_row):
    """Return the pointer to element [entry, head, first_row] of a (B, H, N) tensor, one number per query."""
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
def row_pointers(matrix, start, rows, valid, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Return pointers [rows, BLOCK_WIDTH] to rows start + rows, and the mask of valid rows and, if padded, existing columns.
    start is a scalar, so that only one product has 64 bits."""
    # A scalar + ([rows, 1] + [1, BLOCK_WIDTH])
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
    # Past L1, where spilled registers lie. NVIDIA's copies to shared memory also go past it; AMD's GPUs take this as "used once".
    CACHE: tl.constexpr = ".cg" if is_cuda() else ""
    return tl.load(pointers, mask=mask, other=0.0, cache_modifier=CACHE)  # [rows, BLOCK_WIDTH]


@triton.jit
def store_rows(matrix, start, rows, valid, tile, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, ADDS: tl.constexpr = False):
    """Store the valid rows and existing columns of a tile [rows, BLOCK_WIDTH], in its dtype. ADDS: add to what is there."""
    if ADDS:
        tile += load_rows(matrix, start, rows, valid, WIDTH, BLOCK_WIDTH)
    pointers, mask = row_pointers(matrix, start, rows, valid, WIDTH, BLOCK_WIDTH)
    tl.store(pointers, tile.to(matrix[0].dtype.element_ty), mask=mask)  # [rows, BLOCK_WIDTH]


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
def store_past_future(tensor, entry, head, first_row, offsets, valid, past, future):
    """Store two numbers of each valid query or key, two [M] or [N], as side 0 and side 1 of a (B, H, 2, N) tensor."""
    tl.store(side_vector(tensor, entry, head, 0, first_row) + offsets, past, mask=valid)
    tl.store(side_vector(tensor, entry, head, 1, first_row) + offsets, future, mask=valid)


@triton.jit
def load_past_future(tensor, entry, head, first_row, offsets, valid):
    """Load what store_past_future has stored, two [M] or [N]."""
    past = tl.load(side_vector(tensor, entry, head, 0, first_row) + offsets, mask=valid, other=0.0)
    future = tl.load(side_vector(tensor, entry, head, 1, first_row) + offsets, mask=valid, other=0.0)
    return past, future


@triton.jit
def store_end_rows(ends, head, sequence, block, valid, past, future, vectors, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Store the sums over the valid queries or keys of a block of past [M] and of future [M], times vectors [M, WIDTH], as the
    two rows of the block in ends (H, sequences, blocks, 2, WIDTH). vectors None: without them, WIDTH is 1."""
    strides = ends[1]
    rows = ends[0] + tl.cast(head, tl.int64) * strides[0] + tl.cast(sequence, tl.int64) * strides[1] + block * strides[2]
    columns = tl.arange(0, BLOCK_WIDTH)
    for SIDE in tl.static_range(2):
        sums = tl.where(valid, past if SIDE == 0 else future, 0.0)  # [M]
        if vectors is None:
            tl.store(rows + SIDE, tl.sum(sums, axis=0))  # [M] -> one number
        else:
            # sum_m sums[m] vectors[m]: [M, 1] * [M, WIDTH] -> [WIDTH]. What no pair has met may be NaN.
            row = tl.sum(tl.where(sums[:, None] == 0.0, 0.0, sums[:, None] * vectors.to(tl.float32)), axis=0)
            # Copies of a sum may differ, as in logits.lane_consistent.
            row = tl.max(tl.broadcast_to(row[None, :], vectors.shape), axis=0)
            tl.store(rows + SIDE * WIDTH + columns, row, mask=columns < WIDTH)


# Which pairs see each other, and which of them dropout keeps.


@triton.jit
def exists(offs_n, place, window):
    """Return the mask [N] of the keys that some query may see. The others are not read."""
    if window[0] is None:
        return offs_n.to(tl.uint32) < place.num_keys.to(tl.uint32)  # negative ones are large
    else:
        return (offs_n >= place.first_key) & (offs_n < place.num_keys)


@triton.jit
def visible(offs_m, offs_n, place, window):
    """Return the mask of the keys that each query sees, for query and key indices that broadcast, such as [M, 1] and [1, N]."""
    is_visible = offs_n.to(tl.uint32) < place.num_keys.to(tl.uint32)  # negative ones are large
    if window[1] is not None:
        is_visible = is_visible & (offs_n <= offs_m + (place.query_offset + window[1]))
    if window[0] is not None:
        is_visible = is_visible & (offs_n >= offs_m + (place.query_offset - window[0]))
    return is_visible


@triton.jit
def keep_mask(dropout, batch, head, offs_m, offs_n):
    """Return the mask of the pairs that are not dropped, for indices that broadcast; _core/dropout.py does the same in torch."""
    seed = tl.load(dropout.seed)
    # A part of a larger call: which sequence it is there, and where its heads, queries and keys begin
    if dropout.origins is not None:
        origins = dropout.origins + batch * 4
        batch = tl.load(origins).to(tl.int32)
        head += tl.load(origins + 1).to(tl.int32)
        offs_m += tl.load(origins + 2).to(tl.int32)
        offs_n += tl.load(origins + 3).to(tl.int32)
    # Each call of the generator has 4 words, for 4 successive keys of a query; a pair is kept if its word is large enough.
    word_0, word_1, word_2, word_3 = tl.philox(seed, offs_n >> 2, offs_m, head, batch, DROPOUT_ROUNDS)
    even = tl.where(offs_n & 2 == 0, word_0, word_2)
    odd = tl.where(offs_n & 2 == 0, word_1, word_3)
    return tl.where(offs_n & 1 == 0, even, odd) > tl.cast(dropout.largest_dropped, tl.uint32)


# The loop over the keys that a block of queries sees, or over the queries that see a block of keys.


@triton.jit
def first_key(first_query, place, window, BLOCK_N: tl.constexpr):
    """Return the first key that any query from first_query on may see, rounded down to a multiple of BLOCK_N."""
    if window[0] is None:
        return 0
    else:
        return tl.maximum(first_query + place.query_offset - window[0], 0) // BLOCK_N * BLOCK_N


@triton.jit
def last_key(last_query, place, window):
    """Return one past the last key that any query up to last_query may see."""
    if window[1] is None:
        return place.num_keys
    else:
        return tl.maximum(tl.minimum(place.num_keys, last_query + place.query_offset + window[1] + 1), 0)


@triton.jit
def first_query(first_key, place, window, BLOCK_M: tl.constexpr):
    """Return the first query that may see any key from first_key on, rounded down to a multiple of BLOCK_M."""
    if window[1] is None:
        return 0
    else:
        return tl.maximum(first_key - place.query_offset - window[1], 0) // BLOCK_M * BLOCK_M


@triton.jit
def last_query(last_key, place, window):
    """Return one past the last query that may see any key up to last_key."""
    if window[0] is None:
        return place.num_queries
    else:
        return tl.maximum(tl.minimum(place.num_queries, last_key - place.query_offset + window[0] + 1), 0)


@triton.constexpr_function
def first_part(tile):
    """Return the first part of a loop, FAR or NEAR."""
    return 1 if tile.coverage == "full" else 0


@triton.constexpr_function
def stop_part(tile):
    """Return one past the last part of a loop."""
    return 1 if tile.coverage == "no table" else 2


@triton.jit
def near_keys(row_start, first, last, query_offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (start, stop), multiples of BLOCK_N, of the near keys: their tiles have pairs that the table has rows for.

    Tiles before start have only r < first, tiles from stop on only r > last. There the term is one number per query, or nothing.
    """
    # The last key at which a tile with only r < first can begin, and the first one at which a tile with only r > last can
    last_past = first + row_start + query_offset - BLOCK_N
    first_future = last + row_start + BLOCK_M + query_offset
    start = tl.maximum(last_past + BLOCK_N, 0) // BLOCK_N * BLOCK_N
    stop = (tl.maximum(first_future, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    return start, stop


@triton.constexpr_function
def clamp_margin(block_m, block_n):
    """Return a bound on how many relative positions beyond the table near tiles can reach."""
    return block_m + block_n


@triton.jit
def key_range(row_start, last_query, first, last, place, window, TILE: tl.constexpr):
    """Return (first, stop, near start, near stop) of the keys that queries from row_start to last_query see."""
    # The keys that the window and the lengths leave
    key_first = first_key(row_start, place, window, TILE.block_n)
    key_stop = last_key(last_query, place, window)
    # Of these, the tiles that the table has rows for: none, all, or those between its ends
    near_start = key_first
    near_stop = key_first if TILE.coverage == "no table" else key_stop
    if TILE.coverage == "clamp" or TILE.coverage == "zero":
        near_start, near_stop = near_keys(row_start, first, last, place.query_offset, TILE.block_m, TILE.block_n)
        near_start, near_stop = tl.maximum(near_start, key_first), tl.maximum(near_stop, key_first)
    return key_first, key_stop, near_start, near_stop


@triton.jit
def query_range(key_start, first, last, place, window, TILE: tl.constexpr):
    """Return (first, stop, near start, near stop) of the queries that see a tile's keys, as key_range does of keys."""
    row_first = first_query(key_start, place, window, TILE.block_m)
    row_stop = tl.where(key_start < place.num_keys, last_query(key_start + TILE.block_n - 1, place, window), 0)
    near_start = row_first
    near_stop = row_first if TILE.coverage == "no table" else row_stop
    if TILE.coverage == "clamp" or TILE.coverage == "zero":
        # As seen from the keys: the sign of j - i and the limits are exchanged.
        near_start, near_stop = near_keys(key_start, -last, -first, -place.query_offset, TILE.block_n, TILE.block_m)
        near_start, near_stop = tl.maximum(near_start, row_first), tl.maximum(near_stop, row_first)
    return row_first, row_stop, near_start, near_stop


@triton.jit
def part_range(PART: tl.constexpr, start, stop, near_start, near_stop):
    """Return (start, stop) of one part of a loop. The far part joins the keys before and behind the near part into one range."""
    if PART == FAR:
        return start, tl.minimum(near_start, stop) + tl.maximum(stop - near_stop, 0)
    else:
        return near_start, tl.minimum(near_stop, stop)


@triton.jit
def loop_position(PART: tl.constexpr, position, near_start, near_stop, TILE: tl.constexpr):
    """Return the key (or query) at a position of the loop: the far part skips the near one."""
    if PART == FAR and TILE.coverage != "no table":
        return tl.where(position < near_start, position, position + near_stop - near_start)
    else:
        return position

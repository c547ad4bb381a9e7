"""Backward, instead of the first kernel: the gradient of the query from the words that the dkv kernel has left in a workspace.

A program owns a block of queries and walks first the relative positions, then the keys that they see. It reads the gradients of
scores (words.py) by position and multiplies them with rel_key, then by key: two products, where the dq kernel has five.
"""

import torch
import triton
import triton.language as tl

from .arguments import Call, cdiv, strided
from .configs import TileConfig
from .masking import exists, first_key, last_key, locate
from .scores import LN_2, rel_unit
from .table import Table, reached_positions, reached_rows, table_rows
from .tiles import head_matrix, load_rows, store_rows
from .words import load_words, queries_apart
from .workspace import Part


@triton.jit
def seen_keys(offs_m, place, window, APART: tl.constexpr):
    """Return (low, high), each [M, 1]: the keys whose words are read. They are those that a query sees, and others beside them,
    whose words are 0, up to multiples of APART. A query that does not exist has none."""
    low = tl.full(offs_m.shape, 0, tl.int32)
    high = tl.broadcast_to(place.num_keys, offs_m.shape)
    if window[0] is not None:
        low = tl.maximum(offs_m + (place.query_offset - window[0]), 0)
    if window[1] is not None:
        high = tl.minimum(high, offs_m + (place.query_offset + window[1] + 1))
    high = tl.where(offs_m < place.num_queries, tl.maximum(high, 0), 0)
    return (low // APART * APART)[:, None], (tl.cdiv(high, APART) * APART)[:, None]


@triton.jit(do_not_specialize=["first_item", "first", "last", "num_heads"])
def dq_words_kernel(
    inputs,
    words,
    d_queries,
    d_rel_queries,
    first_item,
    call,
    first,
    last,
    num_heads,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute d_query and d_rel_query, which may be None, from words [1, items, Nq, columns] of all keys of a workspace's items.

    An item is a batch entry and head, numbered entry * heads + head, from first_item on. Queries of a block lie queries_apart.
    Grid: (query blocks * items,), query blocks fastest.
    """
    APART: tl.constexpr = queries_apart(words[0].dtype.element_ty.primitive_bitwidth)
    num_blocks = tl.cdiv(call.sequences.max_seqlen_q, TILE.block_m * APART) * APART
    block = tl.program_id(0) % num_blocks
    if call.window[1] is not None:
        block = num_blocks - 1 - block  # the longest walks first
    number = tl.program_id(0) // num_blocks
    head = (first_item + number) % num_heads
    place = locate(call.sequences, call.window, (first_item + number) // num_heads)
    row_start = block // APART * (TILE.block_m * APART)
    rows = block % APART + tl.arange(0, TILE.block_m) * APART
    tile_n = tl.arange(0, TILE.block_n)
    offs_m = row_start + rows
    valid_m = offs_m < place.num_queries
    low, high = seen_keys(offs_m, place, call.window, APART)
    matrix = head_matrix(words, 0, number, 0, False)

    last_query = tl.minimum(row_start + TILE.block_m * APART, place.num_queries) - 1
    lowest, highest = reached_positions(row_start, last_query, place, call.window)
    acc = tl.full([TILE.block_m, SHAPE.block_d], 0.0, tl.float32)
    if inputs.rel_query is not None:
        rel_acc = tl.full([TILE.block_m, SHAPE.block_dr], 0.0, tl.float32)
    if inputs.rel_key is not None and (d_queries if inputs.rel_query is None else d_rel_queries) is not None:
        whole = Table(head_matrix(inputs.rel_key, 0, head, 0, SHAPE.wide_index), None, None, None, first, last)
        part, reached_first, reached_last = reached_rows(whole, lowest, highest, TILE)
        reached = Table(part, None, None, None, reached_first, reached_last)
        # Words at the first position of a tile begin at multiples of 16 bytes.
        start = lowest - ((block % APART + place.query_offset + lowest) & (APART - 1))
        for relative in tl.range(start, highest + 1, TILE.block_n):
            keys = offs_m + (place.query_offset + relative)
            d_band = load_words(matrix, offs_m, keys, 0, low, high, TILE.block_n)
            band_rows = table_rows(reached, relative, TILE)
            # [M, N] @ [N, Dr] -> [M, Dr]
            if inputs.rel_query is None:
                acc = tl.dot(d_band, band_rows, acc, input_precision=TILE.precision)
            else:
                rel_acc = tl.dot(d_band, band_rows, rel_acc, input_precision=TILE.precision)
        if inputs.rel_query is None and call.scaling.rel_scale is not None:
            acc *= tl.cast(call.scaling.rel_scale, tl.float32)

    if d_rel_queries is not None:
        d_rel_queries = head_matrix(d_rel_queries, place.entry, head, place.query_start, SHAPE.wide_index)
        rel_acc *= rel_unit(call.scaling)
        store_rows(d_rel_queries, row_start, rows, valid_m, rel_acc, SHAPE.rel_dim, SHAPE.block_dr)
    if d_queries is not None:
        keys_matrix = head_matrix(inputs.key, place.entry, head // SHAPE.group, place.key_start, SHAPE.wide_index)
        start = first_key(row_start, place, call.window, TILE.block_n)
        for key_start in tl.range(start, last_key(last_query, place, call.window), TILE.block_n):
            valid_n = exists(key_start + tile_n, place, call.window)
            d_scores = load_words(matrix, offs_m, key_start, 0, low, high, TILE.block_n)
            key = load_rows(keys_matrix, key_start, tile_n, valid_n, SHAPE.head_dim, SHAPE.block_d)
            # [M, N] @ [N, D] -> [M, D]
            acc = tl.dot(d_scores, key, acc, input_precision=TILE.precision)
        unit = tl.cast(call.scaling.base_2_scale, tl.float32) * LN_2
        d_queries = head_matrix(d_queries, place.entry, head, place.query_start, SHAPE.wide_index)
        store_rows(d_queries, row_start, rows, valid_m, acc * unit, SHAPE.head_dim, SHAPE.block_d)


def launch_dq_words(
    call: Call,
    tile: TileConfig,
    words: torch.Tensor,
    d_query: torch.Tensor | None,
    d_rel_query: torch.Tensor | None,
    part: Part,
) -> None:
    """Launch dq_words_kernel for a part of the workspace's words, of all keys of some items; see there."""
    apart = queries_apart(8 * words.element_size())
    blocks = cdiv(call.common.sequences.max_seqlen_q, tile.block_m * apart) * apart
    call.launch(
        "dq_words",
        dq_words_kernel,
        tile,
        (blocks * (part.stop_item - part.first_item),),
        words=strided(words),
        d_queries=strided(d_query),
        d_rel_queries=strided(d_rel_query),
        first_item=part.first_item,
    )

"""The logits of a tile: q.k, the relative terms, what is visible, softcap and mask. Here a new term goes.

The forward, dkv and dq kernels all call relative_terms, then tile_logits: the backward has the forward's logits. In a loop over
tiles, terms of one tile come partly from the product of the tile before; what one iteration keeps for the next is in ``carried``.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tile.addressing import head_matrix, head_vector
from .tile.band import next_terms
from .tile.key_terms import far_key_terms, next_key_terms
from .tile.masking import NEAR, visible
from .tile.scores import apply_softcap_and_mask, is_linear, tile_scores
from .tile.table import Table, bias_tile


class Queries(NamedTuple):
    """A tile's queries, and the table of their terms."""

    rel_query: Any  # [M, Dr], what rel_key meets
    table: Any  # score_table
    far_term: Any  # in the far part of a clamped table [M], the term with all keys on the tile's side of it; else None
    indices: Any  # [M], in their sequence
    valid: Any  # [M], those that exist


class Keys(NamedTuple):
    """A tile's keys, in addressing.key_order, and the table of their terms."""

    natural: Any  # [N, D], what rel_p2c meets: the keys in their natural order
    table: Any  # key_table
    far_keys: Any  # of Operands
    indices: Any
    valid: Any


@triton.jit
def score_table(inputs, common, head, first, last, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Return the table of one head whose rows, and biases, are added to the scores."""
    matrix, scale, bias = 0, 1.0, 0
    if TILE.has_matrix:
        matrix = head_matrix(inputs.rel_key, 0, head, 0, SHAPE.wide_index)
    if TILE.has_scale:
        scale = common.scaling.rel_scale
    if TILE.has_bias:
        bias = head_vector(inputs.rel_bias, head)
    return Table(matrix, scale, bias, common.scaling.bias_scale, first, last)


@triton.jit
def value_table(inputs, head, first, last, SHAPE: tl.constexpr):
    """Return the table of one head whose rows are added to the values."""
    return Table(head_matrix(inputs.rel_value, 0, head, 0, SHAPE.wide_index), 1.0, 0, 1.0, first, last)


@triton.jit
def key_table(inputs, common, head, first, last, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Return rel_p2c of one head as keys see it, upside down: its rows, of first to last, are then those of -last to -first."""
    matrix, scale, bias = 0, 1.0, 0
    if TILE.key_tile is not None:
        pointer, row_stride, column_stride = head_matrix(inputs.rel_p2c, 0, head, 0, SHAPE.wide_index)
        matrix = pointer + tl.cast(last - first, tl.int64) * row_stride, -row_stride, column_stride
        if TILE.key_tile.has_scale:
            scale = common.scaling.rel_scale
    return Table(matrix, scale, bias, common.scaling.bias_scale, -last, -first)


@triton.jit
def relative_terms(queries, keys, carried, keys_carried, relative, is_past, place, head, PART: tl.constexpr, TILE: tl.constexpr):
    """Return (the terms of a tile's scores that come before their product [M, N], carried, keys_carried).

    carried, keys_carried: as returned for the tile before, of the queries' terms and of the keys'. For the first tile a loop over
    the keys has blocks_before of its queries, one along the queries blocks_before of its keys.
    relative: the relative position of the first key to the first query. is_past: in the far part, on which side of the table.
    """
    # Terms of the queries: q . E of each pair [M, N], from the band
    terms = tl.full([TILE.block_m, TILE.block_n], 0.0, tl.float32)
    if PART == NEAR and TILE.has_matrix:
        terms, carried = next_terms(queries.rel_query, queries.table, carried, relative, TILE)
    # Terms of the keys: k . F, the same with queries and keys exchanged
    if PART == NEAR and TILE.key_tile is not None:
        key_terms, keys_carried = next_key_terms(keys.natural, keys.table, keys_carried, relative, TILE)
        terms += key_terms
    elif keys.far_keys is not None:
        terms += far_key_terms(keys.far_keys, place, head, is_past, keys.indices, keys.valid)[None, :]
    return terms, carried, keys_carried


@triton.jit
def tile_logits(
    query,
    key,
    terms,
    queries,
    keys,
    relative,
    mask,
    place,
    common,
    CHECKS_QUERIES: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return (scores [M, N], the pairs that are seen [M, N], the slope of the softcap) of query [M, D] and key [N, D], with their
    relative terms. Scores are logits divided by scale, or logits if there is a softcap or a mask of numbers (scores.py).

    Beyond a clamped table the term is one number per query. Unless it meets a softcap or a mask of numbers, scores lack it, and
    the softmax adds it per query.
    CHECKS_QUERIES: a query that does not exist sees nothing. It was loaded as zeros; times a table row of NaN that would be NaN
    for all keys.
    """
    if queries.far_term is not None and not is_linear(common.scaling.softcap, mask):
        terms += queries.far_term[:, None]
    scores = tile_scores(query, key, terms, TILE)
    # A bias is added to the product, so that its loads run beside it; by fma, else Triton adds it before.
    if PART == NEAR and TILE.has_bias and not TILE.has_matrix:
        scale = tl.broadcast_to(tl.cast(queries.table.bias_scale, tl.float32), scores.shape)
        scores = tl.fma(bias_tile(queries.table, relative, TILE), scale, scores)
    offs_m, offs_n = queries.indices[:, None], keys.indices[None, :]
    is_visible = visible(offs_m, offs_n, place, common.window)
    if CHECKS_QUERIES or mask is not None:
        is_visible = is_visible & queries.valid[:, None]
    return apply_softcap_and_mask(scores, is_visible, offs_m, offs_n, mask, common.scaling)

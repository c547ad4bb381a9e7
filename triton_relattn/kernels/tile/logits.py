"""From queries and keys to probabilities: the logits of a tile, its softmax, and the gradients of its scores.

The forward, dkv and dq kernels all call relative_terms, then tile_logits: the backward has the forward's logits. Here a new term
goes. In a loop over tiles, terms of one tile come partly from the product of the tile before; what one iteration keeps for the
next is in ``carried``.

Scores are logits divided by scale, so that the multiplication with scale is part of the exponent. With a softcap or a mask of
numbers, scores are turned into logits first.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from .band import Table, bias_tile, next_terms
from .blocks import NEAR, head_matrix, side_vector, visible
from .key_terms import far_key_terms, next_key_terms
from .registers import INTERPRETED

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Queries(NamedTuple):
    """A tile's queries, and the table of their terms."""

    rel_query: Any  # [M, Dr], what rel_key meets
    table: Any  # score_table
    far_term: Any  # in the far part of a clamped table [M], the term with all keys on the tile's side of it; else None
    indices: Any  # [M], in their sequence
    valid: Any  # [M], those that exist


class Keys(NamedTuple):
    """A tile's keys, in blocks.key_order, and the table of their terms."""

    natural: Any  # [N, D], what rel_p2c meets: the keys in their natural order
    table: Any  # key_table
    far_keys: Any  # of Operands
    indices: Any
    valid: Any


@triton.jit
def score_table(inputs, common, head, first, last, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Return the table of one head whose rows, and biases, are added to the scores."""
    matrix, scale, bias = 0, 1.0, 0
    if TILE.has_matrix:  # rel_key (H or 1, R, Dr)
        matrix = head_matrix(inputs.rel_key, 0, head, 0, SHAPE.wide_index)
    if TILE.has_scale:
        scale = common.scaling.rel_scale
    if TILE.has_bias:  # rel_bias (H or 1, R)
        pointer, strides = inputs.rel_bias
        bias = pointer + tl.cast(head, tl.int64) * strides[1], strides[2]
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
        pointer, row_stride, column_stride = head_matrix(inputs.rel_p2c, 0, head, 0, SHAPE.wide_index)  # (R, D)
        # From the last row on, with a negative stride
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
    elif keys.far_keys is not None:  # beyond the table: one number per key [N]
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
    relative terms. Scores are logits divided by scale, or logits if there is a softcap or a mask of numbers.

    Beyond a clamped table the term is one number per query. Unless it meets a softcap or a mask of numbers, scores lack it, and
    the softmax adds it per query.
    CHECKS_QUERIES: a query that does not exist sees nothing. It was loaded as zeros; times a table row of NaN that would be NaN
    for all keys.
    """
    if queries.far_term is not None and not is_linear(common.scaling.softcap, mask):
        terms += queries.far_term[:, None]  # [M, N] + [M, 1]
    # S = Q K^T + terms
    scores = tile_scores(query, key, terms, TILE)
    # A bias is added to the product, so that its loads run beside it; by fma, else Triton adds it before.
    if PART == NEAR and TILE.has_bias and not TILE.has_matrix:
        scale = tl.broadcast_to(tl.cast(queries.table.bias_scale, tl.float32), scores.shape)
        scores = tl.fma(bias_tile(queries.table, relative, TILE), scale, scores)
    # Which pairs are seen [M, N]: causality, window, lengths
    offs_m, offs_n = queries.indices[:, None], keys.indices[None, :]  # [M, 1], [1, N]
    is_visible = visible(offs_m, offs_n, place, common.window)
    if CHECKS_QUERIES or mask is not None:
        is_visible = is_visible & queries.valid[:, None]
    return apply_softcap_and_mask(scores, is_visible, offs_m, offs_n, mask, common.scaling)


@triton.jit
def tile_scores(query, key, relative, TILE: tl.constexpr):
    """Add q.k to the relative scores [M, N]."""
    # [M, D] @ [D, N] -> [M, N]. As accumulator, the relative scores get the matrix units' own layout. If they were added
    # afterwards, all that follows would get the layout of the relative scores.
    return tl.dot(query, tl.trans(key), relative, input_precision=TILE.precision)


@triton.constexpr_function
def is_additive(mask):
    """Return whether a mask, (pointer, ...) or None, holds numbers that are added to the logits."""
    return mask is not None and not mask[0].dtype.element_ty.is_int1()


@triton.constexpr_function
def is_linear(softcap, mask):
    """Return whether logits are just scale * scores: there is no softcap, and no mask of numbers."""
    return softcap is None and not is_additive(mask)


@triton.jit
def tanh(x):
    """Compute the hyperbolic tangent. Near 0 it is the series up to x**11: 1 - 2 / (exp(2 x) + 1) has the absolute error of
    numbers near 1, which is large beside a small result."""
    square = x * x
    series = square * (-1382.0 / 155925.0) + 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    series = series * square + 1.0
    return tl.where(square < 0.09, x * series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0))


@triton.jit
def mask_values(matrix, offs_m, offs_n, exists):
    """Load a mask [M, N] of bools or numbers, (pointer, row stride, column stride), at the pairs that exist; 0 for the others."""
    pointers = matrix[0] + (offs_m.to(tl.int64) * matrix[1] + offs_n.to(tl.int64) * matrix[2])
    return tl.load(pointers, mask=exists, other=0)


@triton.jit
def apply_softcap_and_mask(scores, is_visible, offs_m, offs_n, mask, scaling):
    """Apply softcap and attn_mask to scores; return them, the mask of pairs that are still visible, and the softcap's slope, 0
    at the others.

    mask: the matrix of attn_mask, or None. If there is one, ``is_visible`` must be false for queries that do not exist.
    """
    slope = scores  # not used without a softcap
    # Scores to logits: times scale
    if scaling.softcap is not None or is_additive(mask):
        scores = scores * (tl.cast(scaling.base_2_scale, tl.float32) * LN_2)
    # c tanh(x / c), whose slope is 1 - tanh(x / c)**2
    if scaling.softcap is not None:
        softcap = tl.cast(scaling.softcap, tl.float32)
        ratio = tanh(scores * (1.0 / softcap))
        scores = softcap * ratio
        slope = 1.0 - ratio * ratio
    if mask is not None:
        values = mask_values(mask, offs_m, offs_n, is_visible)
        if is_additive(mask):  # numbers: -inf hides a pair
            scores += values.to(tl.float32)
            is_visible = is_visible & (scores != -float("inf"))
        else:
            is_visible = is_visible & values
    if scaling.softcap is not None:
        slope = tl.where(is_visible, slope, 0.0)
    return scores, is_visible, slope


@triton.jit
def exponent_scale(scaling, mask):
    """Return the factor that turns finished scores into exponents of two. scaling: call.Scaling."""
    if is_linear(scaling.softcap, mask):
        return tl.cast(scaling.base_2_scale, tl.float32)
    else:
        return LOG2_E


@triton.jit
def rel_unit(scaling):
    """Return the factor that turns a sum of dS times vectors into the gradient of a table that meets them."""
    unit = tl.cast(scaling.base_2_scale, tl.float32) * LN_2
    if scaling.rel_scale is not None:
        unit *= tl.cast(scaling.rel_scale, tl.float32)
    return unit


# Softmax. The maximum is subtracted before anything is scaled, since the difference of close numbers is exact, and it is stored
# apart from the logarithm of the sum. In one number, the log-sum-exp, a large maximum would leave no digits for that logarithm;
# and scaled scores have no digits left for their differences. exp(logits - lse) of a row could sum to anything.


@triton.jit
def softmax_update(scores, beyond, row_max, row_sum, scale):
    """Take one step of the online softmax of scale * scores, in base 2. Return the probabilities [M, N], not yet divided by their
    sum, the new maximum and sum [M], and the factor [M] for earlier sums. The maximum is that of scores before scaling, since the
    scale is positive. beyond: a number per query [M] that its scores lack, or None."""
    # The maximum so far [M], of scores with what they lack
    tile_max = tl.max(scores, axis=1)
    new_max = tile_max
    if beyond is not None:
        beyond = tl.where(tile_max == -float("inf"), 0.0, beyond)  # may be NaN for a query that sees none of these keys
        new_max = tile_max + beyond
    new_max = tl.maximum(row_max, new_max)
    # A row that has seen nothing yet keeps -inf as its maximum; subtracting 0 instead leaves its exponentials at 0.
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    # What was summed with the old maximum takes this factor [M].
    rescale = tl.exp2((row_max - shift) * scale)
    if beyond is not None:
        # It may lie below the tile's maximum. The backward limits exponents to 0: none may be larger here.
        shift = tl.maximum(maximum_without(beyond, shift, scale), tile_max, propagate_nan=tl.PropagateNan.ALL)
    probs = tl.exp2((scores - shift[:, None]) * scale)  # [M, N]
    return probs, new_max, row_sum * rescale + tl.sum(probs, axis=1), rescale


@triton.jit
def maximum_without(term, row_max, scale):
    """Return the maximum [M] of scores that lack a term [M]. Exponents are to be limited to 0.

    The difference is rounded: of logits beyond 1e9 by more powers of two than float32 has, and if it were too large, all
    exponentials of a row would be 0. So from 1e7 on it is lowered by its largest error, that of two sums and two differences.
    """
    difference = row_max - term
    error = tl.abs(row_max) * 2.0**-22 + tl.abs(term) * 2.0**-22
    return tl.where(error * scale > 8.0, difference - error, difference)


@triton.jit
def load_softmax_stats(softmax_stats, place, head, offs_m, valid_m):
    """Load the statistics that the forward stored, two [M]: the maximum of each query's scores, and the base-2 logarithm of the
    sum of their exponentials."""
    row_max = side_vector(softmax_stats, place.entry, head, 0, place.query_start)
    log_sum = side_vector(softmax_stats, place.entry, head, 1, place.query_start)
    return tl.load(row_max + offs_m, mask=valid_m, other=0.0), tl.load(log_sum + offs_m, mask=valid_m, other=0.0)


@triton.jit
def probabilities(scores, beyond, is_visible, scale, row_max, log_sum):
    """Compute the softmax [M, N] of scale * scores from the maximum and the base-2 logarithm of the sum, two [M]; 0 where a query
    does not see a key. beyond: as in softmax_update.

    Other tiles may add up the same products in another order, so scores may exceed the forward's maximum: by 1e-3 with logits of
    1e4, by 1e5 with logits of 1e12. Their exponential could be anything, even infinity, so scores are limited to the maximum.
    A query that meets NaN still gets NaN: its sum is NaN.
    """
    if beyond is not None:
        row_max = maximum_without(beyond, row_max, scale)
    row_max = row_max[:, None]  # [M, 1]
    exceeding = tl.minimum(scores, row_max) - row_max
    return tl.where(is_visible, tl.exp2(exceeding * scale - log_sum[:, None]), 0.0)


@triton.jit
def score_gradients(probs, d_probs, delta, is_visible, keep, common, HAS_VALUE_TERM: tl.constexpr):
    """Compute dS = P (dP - delta) [M, N], the gradient of the logits before softcap, delta [M].

    keep: the pairs that dropout keeps, or None. HAS_VALUE_TERM: dP has a term of rel_value, whose row for a hidden pair may be
    NaN.
    """
    if keep is not None:  # dP of what dropout keeps
        d_probs = tl.where(keep, d_probs * tl.cast(common.dropout.keep_scale, tl.float32), 0.0)
    if HAS_VALUE_TERM:
        d_probs = tl.where(is_visible, d_probs, 0.0)
    return probs * (d_probs - delta[:, None])


@triton.jit
def lane_consistent(sums, BLOCK_N: tl.constexpr):
    """Make all lanes that hold a copy of a row's sum [M] agree on its bits: they take the largest copy.

    A lane fuses its own products with additions, but gets the sums of other lanes rounded. So copies may differ in the last bit,
    and if several lanes store to one address, the hardware decides whose copy stays.
    """
    return tl.max(tl.broadcast_to(sums[:, None], (sums.shape[0], BLOCK_N)), axis=1)


@triton.constexpr_function
def has_wgmma():
    """Return whether products are Hopper's wgmma, which run beside what follows them."""
    return not INTERPRETED.value and cuda_capability_geq(9) and not cuda_capability_geq(10)


@triton.jit
def settled(acc):
    """Return an accumulator of products as other instructions define it, by moves that ptxas drops.

    If other instructions may define an accumulator while a product with it is in flight, ptxas makes every product of the kernel
    wait (warning C7515). So the last product of a loop ends before the next iteration. In the forward that costs registers; there
    the loops begin with zeros that are no constants, which would be moved in where a loop has no iterations.
    """
    if has_wgmma():
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1)
    else:
        return acc

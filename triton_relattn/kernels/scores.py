"""From a tile of queries and keys to its scores and probabilities, one way for all kernels.

Scores are in units of 1 / scale, so that the scale is one multiply-add with the exponential's shift. With a softcap or a mask of
numbers they become logits, whose unit is 1.
"""

import triton
import triton.language as tl

from .masking import mask_values
from .tiles import side_vector

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.constexpr_function
def is_additive(mask):
    """Whether a mask, (pointer, ...) or None, is one of numbers."""
    return mask is not None and not mask[0].dtype.element_ty.is_int1()


@triton.jit
def tile_scores(query, key, relative, INPUT_PRECISION: tl.constexpr):
    """[M, N]: q.k on top of the relative scores."""
    # [M, D] @ [D, N] -> [M, N]. As accumulator the relative scores get the matrix units' own layout; added afterwards they
    # would give theirs to everything that follows.
    return tl.dot(query, tl.trans(key), relative, input_precision=INPUT_PRECISION)


@triton.jit
def tanh(x):
    """The hyperbolic tangent: near 0 its series up to x**11, because 1 - 2 / (exp(2 x) + 1) is as inexact there as at 1."""
    square = x * x
    series = square * (-1382.0 / 155925.0) + 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    series = series * square + 1.0
    return tl.where(square < 0.09, x * series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0))


@triton.jit
def exponent_scale(scaling, mask):
    """Return the factor that turns finished scores into exponents of two. scaling: arguments.Scaling."""
    if is_linear(scaling.softcap, mask):
        return tl.cast(scaling.base_2_scale, tl.float32)
    else:
        return LOG2_E


@triton.constexpr_function
def is_linear(softcap, mask):
    """Whether logits are scores, scaled: a term that all keys of a query share may then be added to its shift instead."""
    return softcap is None and not is_additive(mask)


@triton.jit
def finished(scores, seen, offs_m, offs_n, mask, scaling):
    """Softcap and attn_mask: scores, which of those seen still are, and, with a softcap, its slope there (elsewhere 0).

    mask: the matrix of attn_mask, or None; else only queries that exist may see anything.
    """
    slope = scores  # not used without a softcap
    if scaling.softcap is not None or is_additive(mask):
        scores = scores * (tl.cast(scaling.base_2_scale, tl.float32) * LN_2)
    if scaling.softcap is not None:
        softcap = tl.cast(scaling.softcap, tl.float32)
        ratio = tanh(scores * (1.0 / softcap))
        scores = softcap * ratio
        slope = 1.0 - ratio * ratio
    if mask is not None:
        values = mask_values(mask, offs_m, offs_n, seen)
        if is_additive(mask):
            scores += values.to(tl.float32)
            seen = seen & (scores != -float("inf"))
        else:
            seen = seen & values
    if scaling.softcap is not None:
        slope = tl.where(seen, slope, 0.0)
    return scores, seen, slope


# The maximum is subtracted before anything is scaled, since the difference of close numbers is exact, and it stays apart
# from the logarithm of the sum. Both in one number, the log-sum-exp, would leave no digits for the latter beside a large
# maximum, and scaled scores have none for what they differ by: exp(logits - lse) of a row could sum to anything.


@triton.jit
def softmax_update(scores, row_max, row_sum, scale):
    """One step of the online softmax of scale * scores, in base 2: probabilities [M, N], new maximum and sum [M], factor of what
    came before. The maximum is that of the unscaled scores: the scale is positive."""
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # A row that has seen nothing yet keeps -inf as its maximum; subtracting 0 instead leaves its exponentials at 0.
    shift = tl.where(new_max == -float("inf"), 0.0, new_max)
    rescale = tl.exp2((row_max - shift) * scale)
    probs = tl.exp2((scores - shift[:, None]) * scale)
    return probs, new_max, row_sum * rescale + tl.sum(probs, axis=1), rescale


@triton.jit
def settled(sums, BLOCK_N: tl.constexpr):
    """[M]: sums along the columns of a tile of products, the same bits in all lanes that hold a copy: the largest of them.

    A lane fuses its own products with additions, but gets those of others rounded, so that copies may differ in the last bit.
    Which of them a store from several lanes to one address leaves there is up to the hardware.
    """
    return tl.max(tl.broadcast_to(sums[:, None], (sums.shape[0], BLOCK_N)), axis=1)


@triton.jit
def load_normaliser(statistics, place, head, offs_m, valid_m):
    """Two [M] that the forward stored for probabilities: the maximum of a query's scores, the base-2 logarithm of its sum."""
    row_max = side_vector(statistics, place.entry, head, 0, place.query_start)
    log_sum = side_vector(statistics, place.entry, head, 1, place.query_start)
    return tl.load(row_max + offs_m, mask=valid_m, other=0.0), tl.load(log_sum + offs_m, mask=valid_m, other=0.0)


@triton.jit
def probabilities(scores, seen, scale, row_max, log_sum):
    """[M, N]: the softmax of scale * scores from its maximum and base-2 logarithm of the sum [M]; 0 where a query does not see a
    key.

    Scores may exceed the forward's maximum, since other tiles may add up the same products in another order: with logits of 1e4
    by 1e-3, with those of 1e12 by 1e5. Their exponential would be anything, infinity too, so that they are limited to it. Of a
    query that meets NaN, the sum is NaN.
    """
    row_max = row_max[:, None]
    exceeding = tl.minimum(scores, row_max) - row_max
    return tl.where(seen, tl.exp2(exceeding * scale - log_sum[:, None]), 0.0)

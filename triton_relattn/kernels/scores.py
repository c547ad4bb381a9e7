"""From a tile of queries and keys to its scores and probabilities, one way for all kernels."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_scores(query, key, relative, INPUT_PRECISION: tl.constexpr):
    """[M, N]: q.k on top of the relative scores, unscaled."""
    # [M, D] @ [D, N] -> [M, N]. As accumulator the relative scores get the matrix units' own layout; added afterwards they
    # would give theirs to everything that follows.
    return tl.dot(query, tl.trans(key), relative, input_precision=INPUT_PRECISION)


@triton.jit
def softmax_update(scores, row_max, row_sum, base_2_scale):
    """One step of the online softmax of base_2_scale * scores, in base 2: probabilities [M, N], new maximum and sum [M],
    factor of what came before. The maximum is that of the unscaled scores: the scale is positive."""
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # A row that has seen nothing yet keeps -inf as its maximum; subtracting 0 instead leaves its exponentials at 0.
    shift = tl.where(new_max == -float("inf"), 0.0, new_max * base_2_scale)
    probs = tl.exp2(scores * base_2_scale - shift[:, None])
    rescale = tl.exp2(row_max * base_2_scale - shift)
    return probs, new_max, row_sum * rescale + tl.sum(probs, axis=1), rescale


@triton.jit
def probabilities(scores, seen, base_2_scale, base_2_lse):
    """[M, N]: the softmax of base_2_scale * scores from its log-sum-exp [M] in base 2; 0 where a query does not see a key."""
    return tl.where(seen, tl.exp2(scores * base_2_scale - base_2_lse[:, None]), 0.0)

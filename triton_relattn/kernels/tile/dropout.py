"""The choice of dropped probabilities; triton_relattn/_core/dropout.py explains it, and computes the same in torch."""

import triton
import triton.language as tl

from ..._core.dropout import ROUNDS

NUM_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def keep_mask(dropout, batch, head, offs_m, offs_n):
    """Return the mask of the pairs that are not dropped, for query and key indices that broadcast. dropout: call.Dropout."""
    seed = tl.load(dropout.seed)
    if dropout.origins is not None:
        origins = dropout.origins + batch * 4
        batch = tl.load(origins).to(tl.int32)
        head += tl.load(origins + 1).to(tl.int32)
        offs_m += tl.load(origins + 2).to(tl.int32)
        offs_n += tl.load(origins + 3).to(tl.int32)
    word_0, word_1, word_2, word_3 = tl.philox(seed, offs_n >> 2, offs_m, head, batch, NUM_ROUNDS)
    even = tl.where(offs_n & 2 == 0, word_0, word_2)
    odd = tl.where(offs_n & 2 == 0, word_1, word_3)
    return tl.where(offs_n & 1 == 0, even, odd) > tl.cast(dropout.largest_dropped, tl.uint32)

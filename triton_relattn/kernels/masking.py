"""Which keys a query sees, stated once: per element, and per block of queries as the end of the walk over keys."""

import triton
import triton.language as tl


@triton.jit
def key_length(key_lengths_ptr, batch, seqlen_k):
    """Keys that exist for a batch entry; a length outside [0, seqlen_k] is limited to it."""
    if key_lengths_ptr is None:
        return seqlen_k
    else:
        return tl.minimum(tl.maximum(tl.load(key_lengths_ptr + batch), 0), seqlen_k).to(tl.int32)


@triton.jit
def visible(offs_m, offs_n, num_keys, query_offset, IS_CAUSAL: tl.constexpr):
    """Mask of the keys that each query sees, for query and key indices of shapes that go together, [M, 1] and [1, N]."""
    exists = offs_n.to(tl.uint32) < num_keys.to(tl.uint32)  # negative ones are large
    if IS_CAUSAL:
        return exists & (offs_n <= offs_m + query_offset)
    else:
        return exists


@triton.jit
def last_key(last_query, num_keys, query_offset, IS_CAUSAL: tl.constexpr):
    """One past the last key that queries up to last_query see."""
    if IS_CAUSAL:
        return tl.maximum(tl.minimum(num_keys, last_query + query_offset + 1), 0)
    else:
        return num_keys


@triton.jit
def first_query(first_key, query_offset, IS_CAUSAL: tl.constexpr):
    """The first query that sees keys from first_key on."""
    if IS_CAUSAL:
        return tl.maximum(first_key - query_offset, 0)
    else:
        return 0

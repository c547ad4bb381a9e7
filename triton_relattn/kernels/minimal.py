"""The whole idea in one kernel: FlashAttention's loop, and in each iteration the relative term from a slice of the table.

    out = softmax((Q K^T + S) / sqrt(D)) V        S[i, j] = q_i . E[j - i]

A tile of BLOCK queries, from i0, and BLOCK keys, from j0, has 2 BLOCK - 1 distances, so it needs as many rows of E. One product
of the queries with that slice has every term of the tile, and more. Those of query i0 + m lie side by side, shifted by m:

    band[m, c] = q_m . E[j0 - i0 - (BLOCK - 1) + c]                     c = 0 .. 2 BLOCK - 1
    S[i0 + m, j0 + n] = band[m, n - m + BLOCK - 1]

    BLOCK = 4          c = 0 1 2 3 4 5 6 7
    m = 0   terms in         . . . 0 1 2 3 .          the numbers are n: the keys of the tile
    m = 1                    . . 0 1 2 3 . .
    m = 2                    . 0 1 2 3 . . .
    m = 3                    0 1 2 3 . . . .

That is the diagonal indexing: a gather along c. Nothing of size N x N is formed. This file is for reading, and only its test
calls it. forward.py multiplies each row of E once where this kernel does so twice, rotates in place of the gather, and has masks,
other tables, dropout and any strides. DERIVATION.md goes from here to there.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def minimal_kernel(Q, K, V, E, Out, length, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out for BLOCK queries of a head; E has the rows of -(length - 1) .. length - 1."""
    m = tl.arange(0, BLOCK)  # the place of a query in its tile, and of a key
    d, c = tl.arange(0, D), tl.arange(0, 2 * BLOCK)
    i0, first_row = tl.program_id(0) * BLOCK, tl.program_id(1) * length
    i, num_rows = i0 + m, 2 * length - 1
    q = tl.load(Q + (first_row + i[:, None]) * D + d, mask=i[:, None] < length, other=0.0)
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK, D), tl.float32)
    for j0 in range(0, length, BLOCK):
        j = j0 + m
        k = tl.load(K + (first_row + j[:, None]) * D + d, mask=j[:, None] < length, other=0.0)
        v = tl.load(V + (first_row + j[:, None]) * D + d, mask=j[:, None] < length, other=0.0)
        # The slice of E, its product with the queries, and the diagonals of that. Row length - 1 is that of distance 0.
        row = j0 - i0 - (BLOCK - 1) + c + (length - 1)
        e = tl.load(E + row[:, None] * D + d, mask=(row[:, None] >= 0) & (row[:, None] < num_rows), other=0.0)
        band = tl.dot(q, tl.trans(e))
        terms = tl.gather(band, m[None, :] - m[:, None] + (BLOCK - 1), axis=1)
        # From here on it is FlashAttention: softmax of the row so far, corrected when a larger logit comes.
        logits = tl.where(j[None, :] < length, (tl.dot(q, tl.trans(k)) + terms) * scale, -float("inf"))
        now_largest = tl.maximum(largest, tl.max(logits, axis=1))
        correction, p = tl.exp(largest - now_largest), tl.exp(logits - now_largest[:, None])
        total = total * correction + tl.sum(p, axis=1)
        weighted = weighted * correction[:, None] + tl.dot(p.to(v.dtype), v)
        largest = now_largest
    tl.store(Out + (first_row + i[:, None]) * D + d, weighted / total[:, None], mask=i[:, None] < length)


def minimal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rel_key: torch.Tensor) -> torch.Tensor:
    """Return out, (H, N, D), of contiguous query, key and value, (H, N, D), and the table, (2 N - 1, D).

    D is a power of two, at least 16; all tensors are float16, bfloat16 or float32.
    """
    heads, length, width = query.shape
    out, block = torch.empty_like(query), 32
    grid = triton.cdiv(length, block), heads
    minimal_kernel[grid](query, key, value, rel_key, out, length, width**-0.5, D=width, BLOCK=block, num_warps=4, num_stages=2)
    return out

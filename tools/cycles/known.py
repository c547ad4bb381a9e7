"""Plain attention as FlashAttention-2 computes it, in Triton: kernels whose speed others have published, for calibration alone.

No masks, contiguous tensors, lengths that are multiples of the tiles: what such benchmarks run. The backward walks twice, over
queries for d_key and d_value (4 products) and over keys for d_query (3), or once, with d_query added up in memory (5).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(tensor_ptr, start, length, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to rows from start on of this program's head, a matrix (length, WIDTH)."""
    offs = start + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64) * length * WIDTH
    return tensor_ptr + head + offs[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _statistics(tensor_ptr, start, length, ROWS: tl.constexpr):
    """Load a float32 for each of the rows from start on."""
    return tl.load(tensor_ptr + tl.program_id(1) * length + start + tl.arange(0, ROWS))


@triton.jit
def known_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale, length, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Grid: (blocks of queries, heads). scale: of the scores, times log2(e)."""
    start_m = tl.program_id(0) * BLOCK_M
    q = tl.load(_tile(q_ptr, start_m, length, BLOCK_M, WIDTH))
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for start_n in range(0, length, BLOCK_N):
        k = tl.load(_tile(k_ptr, start_n, length, BLOCK_N, WIDTH))
        # [M, D] @ [D, N] -> [M, N]
        scores = tl.dot(q, k.T)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        probs = tl.exp2(scores * scale - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(probs, 1)
        acc *= decay[:, None]
        v = tl.load(_tile(v_ptr, start_n, length, BLOCK_N, WIDTH))
        # [M, N] @ [N, D] -> [M, D]
        acc = tl.dot(probs.to(v.dtype), v, acc)
        row_max = new_max
    tl.store(_tile(out_ptr, start_m, length, BLOCK_M, WIDTH), (acc / row_sum[:, None]).to(q.dtype))
    tl.store(lse_ptr + tl.program_id(1) * length + start_m + tl.arange(0, BLOCK_M), row_max + tl.log2(row_sum))


@triton.jit
def known_keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    d_out_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    lse_ptr,
    delta_ptr,
    scale,
    length,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ADDS_DQ: tl.constexpr,
):
    """Grid: (blocks of keys, heads). Keys are scaled beforehand. ADDS_DQ: d_query too, in float32, atomically."""
    start_n = tl.program_id(0) * BLOCK_N
    k = tl.load(_tile(k_ptr, start_n, length, BLOCK_N, WIDTH))
    v = tl.load(_tile(v_ptr, start_n, length, BLOCK_N, WIDTH))
    dk = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for start_m in range(0, length, BLOCK_M):
        q = tl.load(_tile(q_ptr, start_m, length, BLOCK_M, WIDTH))
        d_out = tl.load(_tile(d_out_ptr, start_m, length, BLOCK_M, WIDTH))
        # [N, D] @ [D, M] -> [N, M]
        probs = tl.exp2(tl.dot(k, q.T) - _statistics(lse_ptr, start_m, length, BLOCK_M)[None, :])
        # [N, M] @ [M, D] -> [N, D]
        dv = tl.dot(probs.to(d_out.dtype), d_out, dv)
        # [N, D] @ [D, M] -> [N, M]
        d_probs = tl.dot(v, d_out.T)
        d_scores = (probs * (d_probs - _statistics(delta_ptr, start_m, length, BLOCK_M)[None, :])).to(q.dtype)
        # [N, M] @ [M, D] -> [N, D]
        dk = tl.dot(d_scores, q, dk)
        if ADDS_DQ:
            # [M, N] @ [N, D] -> [M, D]
            tl.atomic_add(_tile(dq_ptr, start_m, length, BLOCK_M, WIDTH), tl.dot(d_scores.T, k), sem="relaxed")
    tl.store(_tile(dk_ptr, start_n, length, BLOCK_N, WIDTH), (dk * scale).to(k.dtype))
    tl.store(_tile(dv_ptr, start_n, length, BLOCK_N, WIDTH), dv.to(k.dtype))


@triton.jit
def known_queries_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    d_out_ptr,
    dq_ptr,
    lse_ptr,
    delta_ptr,
    scale,
    length,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: (blocks of queries, heads)."""
    start_m = tl.program_id(0) * BLOCK_M
    q = tl.load(_tile(q_ptr, start_m, length, BLOCK_M, WIDTH))
    d_out = tl.load(_tile(d_out_ptr, start_m, length, BLOCK_M, WIDTH))
    lse = _statistics(lse_ptr, start_m, length, BLOCK_M)
    delta = _statistics(delta_ptr, start_m, length, BLOCK_M)
    dq = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for start_n in range(0, length, BLOCK_N):
        k = tl.load(_tile(k_ptr, start_n, length, BLOCK_N, WIDTH))
        v = tl.load(_tile(v_ptr, start_n, length, BLOCK_N, WIDTH))
        # [M, D] @ [D, N] -> [M, N]
        probs = tl.exp2(tl.dot(q, k.T) - lse[:, None])
        d_probs = tl.dot(d_out, v.T)
        d_scores = (probs * (d_probs - delta[:, None])).to(k.dtype)
        # [M, N] @ [N, D] -> [M, D]
        dq = tl.dot(d_scores, k, dq)
    tl.store(_tile(dq_ptr, start_m, length, BLOCK_M, WIDTH), (dq * scale).to(q.dtype))

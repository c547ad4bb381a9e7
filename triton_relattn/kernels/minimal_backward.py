"""The whole backward on one page, as plain as minimal.py: the four steps of backward.py, in their order.

    1.  delta = rowsum(out * dO)                        one number per query
    2.  P = exp(logits - lse)    dP = dO V^T            computed again per tile, from the forward's lse
        dS = P * (dP - delta) / sqrt(D)                 stored, since steps 3 and 4 read it
        dV = P^T dO              dK = dS^T Q            a program owns a block of keys and loops over the queries
    3.  dQ[i] = sum_j dS[i, j] k_j + sum_r dS[i, i + r] E[r]        a program owns a block of queries
    4.  dE[r] = sum_i dS[i, i + r] q_i                              a program owns a block of the table's rows

The only addition to FlashAttention's backward is the diagonal, i + r. A tile of BLOCK queries and BLOCK rows r0 + n of the table
holds dS[i0 + m, i0 + m + r0 + n]. In memory each of its rows begins one element further on than the one above, so the tile is
loaded with the row stride of dS plus one. No atomics: a program owns its sums, so their bits repeat.

                r = -2 -1  0  1  2
    i = 0              .   .  0  1  2          the numbers are j = i + r: the keys
    i = 1              .   0  1  2  .
    i = 2              0   1  2  .  .

This page stores dS of all heads at once, N x N elements per head. bwd_dkv.py stores what fits into a workspace, some heads or
keys of one, whose size is linear in N, and runs steps 2 to 4 per part. It also stores P, if there is a table for the values.

``python -m triton_relattn.kernels.minimal_backward`` compares all gradients with those of dense attention.
"""

import torch
import triton
import triton.language as tl

from .minimal import BLOCK, dense_attention, example, load, minimal_attention, tile_logits


@triton.jit
def dkv_kernel(Q, K, V, E, dO, Lse, Delta, dS, dK, dV, length, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """Compute dK and dV of BLOCK keys of a head, and store dS of all queries and these keys."""
    m, d = tl.arange(0, BLOCK), tl.arange(0, D)
    j0, head = tl.program_id(0) * BLOCK, tl.program_id(1)
    first_row, j = head * length, j0 + m
    k, v = load(K, first_row, j, length, D), load(V, first_row, j, length, D)
    dk, dv = tl.zeros((BLOCK, D), tl.float32), tl.zeros((BLOCK, D), tl.float32)
    for i0 in range(0, length, BLOCK):
        i = i0 + m
        q, do = load(Q, first_row, i, length, D), load(dO, first_row, i, length, D)
        lse = tl.load(Lse + first_row + i, mask=i < length, other=float("inf"))  # so that P = 0
        delta = tl.load(Delta + first_row + i, mask=i < length, other=0.0)
        p = tl.exp(tile_logits(q, k, E, i0, j0, length, scale, D, BLOCK) - lse[:, None])
        dp = tl.dot(do, tl.trans(v))  # [M, D] @ [D, N] -> [M, N]
        ds = (p * (dp - delta[:, None]) * scale).to(k.dtype)
        dv += tl.dot(tl.trans(p).to(do.dtype), do)  # [N, M] @ [M, D] -> [N, D]
        dk += tl.dot(tl.trans(ds), q)  # [N, M] @ [M, D] -> [N, D]
        tl.store(dS + (first_row + i[:, None]) * length + j, ds, mask=(i[:, None] < length) & (j < length))
    tl.store(dK + (first_row + j[:, None]) * D + d, dk, mask=j[:, None] < length)
    tl.store(dV + (first_row + j[:, None]) * D + d, dv, mask=j[:, None] < length)


@triton.jit
def load_ds(dS, first_row, i, j, length):
    """Load dS [M, N] of queries i [M] and keys j [M, N]; pairs that do not exist are 0."""
    exists = (i[:, None] < length) & (j >= 0) & (j < length)
    return tl.load(dS + (first_row + i[:, None]) * length + j, mask=exists, other=0.0)


@triton.jit
def dq_kernel(K, E, dS, dQ, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """Compute dQ of BLOCK queries of a head, from dS."""
    n, d = tl.arange(0, BLOCK), tl.arange(0, D)
    i0, first_row = tl.program_id(0) * BLOCK, tl.program_id(1) * length
    i = i0 + n
    dq = tl.zeros((BLOCK, D), tl.float32)
    for j0 in range(0, length, BLOCK):  # along the keys
        ds = load_ds(dS, first_row, i, j0 + n[None, :], length)
        dq += tl.dot(ds, load(K, first_row, j0 + n, length, D))  # [M, N] @ [N, D] -> [M, D]
    for r0 in range(-i0 - BLOCK + 1, length - i0, BLOCK):  # along the diagonals, r = r0 + n
        ds = load_ds(dS, first_row, i, i[:, None] + r0 + n[None, :], length)
        dq += tl.dot(ds, load(E, 0, r0 + n + (length - 1), 2 * length - 1, D))  # [M, N] @ [N, D] -> [M, D]
    tl.store(dQ + (first_row + i[:, None]) * D + d, dq, mask=i[:, None] < length)


@triton.jit
def dtable_kernel(Q, dS, dE, heads, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """Compute dE of BLOCK rows of the table, which all heads share, from dS."""
    n, d = tl.arange(0, BLOCK), tl.arange(0, D)
    row = tl.program_id(0) * BLOCK + n
    r = row - (length - 1)
    de = tl.zeros((BLOCK, D), tl.float32)
    for first_row in range(0, heads * length, length):
        for i0 in range(0, length, BLOCK):
            i = i0 + n
            ds = load_ds(dS, first_row, i, i[:, None] + r[None, :], length)
            de += tl.dot(tl.trans(ds), load(Q, first_row, i, length, D))  # [N, M] @ [M, D] -> [N, D]
    tl.store(dE + row[:, None] * D + d, de, mask=row[:, None] < 2 * length - 1)


def minimal_backward(
    d_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key, value and rel_key; tensors as of minimal_attention, d_out contiguous."""
    heads, length, width = query.shape
    dq, dk, dv, de = (torch.empty_like(tensor) for tensor in (query, key, value, rel_key))
    ds = query.new_empty(heads, length, length)
    delta = (out.float() * d_out.float()).sum(-1)
    blocks = triton.cdiv(length, BLOCK)
    sizes = {"length": length, "D": width, "BLOCK": BLOCK}
    dkv_kernel[blocks, heads](query, key, value, rel_key, d_out, lse, delta, ds, dk, dv, scale=width**-0.5, **sizes)
    dq_kernel[blocks, heads](key, rel_key, ds, dq, **sizes)
    dtable_kernel[(triton.cdiv(2 * length - 1, BLOCK),)](query, ds, de, heads, **sizes)
    return dq, dk, dv, de


if __name__ == "__main__":
    tensors = [tensor.requires_grad_() for tensor in example()]
    out, lse = minimal_attention(*tensors)
    d_out = torch.cos(torch.arange(out.numel(), device=out.device)).view_as(out)
    expected = torch.autograd.grad(dense_attention(*tensors), tensors, d_out)
    for name, gradient, other in zip("QKVE", minimal_backward(d_out, out, lse, *tensors), expected, strict=True):
        print(f"d{name}: largest difference from dense attention {(gradient - other).abs().max():.1e}")

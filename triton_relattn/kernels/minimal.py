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

That is the diagonal indexing: a gather along c. Nothing of size N x N is formed. minimal_backward.py is the other half. Both are
illustrative; only their tests use them. forward.py multiplies each row of E once where this kernel does so twice, rotates in
place of the gather, and has masks, other tables, dropout and any strides. DERIVATION.md goes from here to there.

``python -m triton_relattn.kernels.minimal`` compares out with dense attention: on a GPU or, with TRITON_INTERPRET=1, without one.
"""

import torch
import triton
import triton.language as tl

BLOCK = 32
NO_GPU = "there is no GPU: set TRITON_INTERPRET=1"


@triton.jit
def load(X, first_row, rows, num_rows, D: tl.constexpr):
    """Load rows [M, D] of a matrix (num_rows, D) that begins at first_row of X; rows that it does not have are 0."""
    pointers = X + (first_row + rows[:, None]) * D + tl.arange(0, D)
    return tl.load(pointers, mask=(rows[:, None] >= 0) & (rows[:, None] < num_rows), other=0.0)


@triton.jit
def tile_logits(q, k, E, i0, j0, length, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the logits [M, N] of queries i0 + m and keys j0 + n."""
    m, c = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK)
    # The slice of E, [2N, D], its product with the queries, and the diagonals of that. Row length - 1 is that of distance 0.
    e = load(E, 0, j0 - i0 - (BLOCK - 1) + c + (length - 1), 2 * length - 1, D)
    band = tl.dot(q, tl.trans(e))  # [M, D] @ [D, 2N] -> [M, 2N]
    terms = tl.gather(band, m[None, :] - m[:, None] + (BLOCK - 1), axis=1)  # [M, N]
    # [M, D] @ [D, N] -> [M, N]
    return tl.where(j0 + m[None, :] < length, (tl.dot(q, tl.trans(k)) + terms) * scale, -float("inf"))


@triton.jit
def minimal_kernel(Q, K, V, E, Out, Lse, length, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out and lse of BLOCK queries of a head; E has the rows of -(length - 1) .. length - 1."""
    m, d = tl.arange(0, BLOCK), tl.arange(0, D)
    i0, first_row = tl.program_id(0) * BLOCK, tl.program_id(1) * length
    i = i0 + m
    q = load(Q, first_row, i, length, D)
    row_max = tl.full((BLOCK,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, D), tl.float32)
    for j0 in range(0, length, BLOCK):
        k, v = load(K, first_row, j0 + m, length, D), load(V, first_row, j0 + m, length, D)
        logits = tile_logits(q, k, E, i0, j0, length, scale, D, BLOCK)
        # From here on it is FlashAttention: softmax of the row so far, corrected when a larger logit comes.
        new_max = tl.maximum(row_max, tl.max(logits, axis=1))
        correction, p = tl.exp(row_max - new_max), tl.exp(logits - new_max[:, None])
        row_sum = row_sum * correction + tl.sum(p, axis=1)
        acc = acc * correction[:, None] + tl.dot(p.to(v.dtype), v)  # [M, N] @ [N, D] -> [M, D]
        row_max = new_max
    tl.store(Out + (first_row + i[:, None]) * D + d, acc / row_sum[:, None], mask=i[:, None] < length)
    tl.store(Lse + first_row + i, row_max + tl.log(row_sum), mask=i < length)


def check_device(query: torch.Tensor) -> None:
    """Raise RuntimeError for tensors on a CPU, unless the kernels are interpreted."""
    from . import kernels_are_interpreted

    if not query.is_cuda and not kernels_are_interpreted():
        raise RuntimeError(NO_GPU)


def minimal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rel_key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out, (H, N, D), and lse, (H, N), of query, key and value, (H, N, D), and a table, (2 N - 1, D).

    D is a power of two, at least 16; all tensors are contiguous and of one dtype: float16, bfloat16 or float32.
    """
    if query.ndim != 3:
        raise ValueError(f"query must be (H, N, D), got {tuple(query.shape)}")
    heads, length, width = query.shape
    if width < 16 or width & (width - 1):
        raise ValueError(f"the width must be a power of two, at least 16; got {width}")
    shapes = {"query": query.shape, "key": query.shape, "value": query.shape, "rel_key": (2 * length - 1, width)}
    for (name, shape), tensor in zip(shapes.items(), (query, key, value, rel_key), strict=True):
        if tensor.shape != shape or tensor.dtype != query.dtype or not tensor.is_contiguous():
            expected, got = f"{tuple(shape)} and dtype {query.dtype}", f"{tuple(tensor.shape)}, {tensor.dtype}"
            raise ValueError(f"{name} must be contiguous, of shape {expected}; got {got}, strides {tensor.stride()}")
    check_device(query)
    out, lse = torch.empty_like(query), query.new_empty(heads, length, dtype=torch.float32)
    grid = triton.cdiv(length, BLOCK), heads
    minimal_kernel[grid](query, key, value, rel_key, out, lse, length, width**-0.5, D=width, BLOCK=BLOCK)
    return out, lse


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rel_key: torch.Tensor) -> torch.Tensor:
    """Return the same out in plain torch, by way of all N x N terms."""
    index = torch.arange(query.shape[1], device=query.device)
    rows = rel_key[index[None, :] - index[:, None] + len(index) - 1]  # E[j - i] of each pair: (N, N, D)
    terms = torch.einsum("hid,ijd->hij", query, rows)
    return torch.softmax((query @ key.mT + terms) * query.shape[-1] ** -0.5, dim=-1) @ value


def example(length: int = 200, width: int = 32) -> list[torch.Tensor]:
    """Return query, key, value and rel_key of 2 heads, drawn from a seed, where the kernels can run."""
    from . import kernels_are_interpreted

    if not torch.cuda.is_available() and not kernels_are_interpreted():
        raise SystemExit(NO_GPU)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, width)] * 3 + [(2 * length - 1, width)]
    device = "cpu" if kernels_are_interpreted() else "cuda"
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


if __name__ == "__main__":
    tensors = example()
    difference = (minimal_attention(*tensors)[0] - dense_attention(*tensors)).abs().max()
    print(f"out: largest difference from dense attention {difference:.1e}")

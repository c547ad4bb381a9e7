"""Small Triton kernels, for tests of the emulator itself."""

# The decorated functions' arguments are pointers, integers and constants; Triton reads no other annotations.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, z, n, BLOCK: tl.constexpr):
    """z = x + y, n elements."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def softmax(x, y, n, stride, BLOCK: tl.constexpr):
    """Softmax of a row."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + i, mask=i < n, other=-float("inf"))
    values = tl.exp(values - tl.max(values, 0))
    tl.store(y + row * stride + i, values / tl.sum(values, 0), mask=i < n)


@triton.jit
def gather(x, index, y, M: tl.constexpr, N: tl.constexpr):
    """y[i, j] = x[i, index[i, j]]."""
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y + i, tl.gather(tl.load(x + i), tl.load(index + i), axis=1))


@triton.jit
def integers(x, y, z, n, BLOCK: tl.constexpr):
    """Integer arithmetic of all kinds."""
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i), tl.load(y + i)
    high = tl.umulhi(a.to(tl.uint32), b.to(tl.uint32)).to(tl.int32)
    bits = (a // b) ^ (a % b) ^ (a >> 3) ^ (b << 2) ^ (a * b) ^ high
    chosen = tl.where((a.to(tl.int64) * b) >> 20 > n, bits, tl.minimum(a, b))
    tl.store(z + i, chosen + tl.sum(tl.maximum(a, 3), 0) + tl.cumsum(b, 0))


@triton.jit
def transpose(x, y, M: tl.constexpr, N: tl.constexpr):
    """y = x^T."""
    values = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(y + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :], tl.trans(values))


@triton.jit
def matmul(
    a,
    b,
    c,
    m,
    n,
    k,
    a_stride,
    b_stride,
    c_stride,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """c = a b, or a b^T."""
    rows, columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        left = tl.load(a + rows[:, None] * a_stride + inner[None, :], mask=(rows < m)[:, None] & (inner < k)[None, :], other=0.0)
        if TRANSPOSED:
            mask = (columns < n)[:, None] & (inner < k)[None, :]
            right = tl.load(b + columns[:, None] * b_stride + inner[None, :], mask=mask, other=0.0).T
        else:
            mask = (columns < n)[None, :] & (inner < k)[:, None]
            right = tl.load(b + inner[:, None] * b_stride + columns[None, :], mask=mask, other=0.0)
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
    tl.store(c + rows[:, None] * c_stride + columns[None, :], sums, mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def attention(q, k, v, o, n, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """softmax of base 2 of q k^T, times v."""
    rows, d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    query = tl.load(q + rows[:, None] * D + d[None, :], mask=(rows < n)[:, None], other=0.0)
    top, total = tl.full((BLOCK_M,), -1e30, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, D), tl.float32)
    for start in range(0, n, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        key = tl.load(k + columns[:, None] * D + d[None, :], mask=(columns < n)[:, None], other=0.0)
        scores = tl.where((columns < n)[None, :], tl.dot(query, key.T), -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        probs = tl.exp2(scores - new_top[:, None])
        value = tl.load(v + columns[:, None] * D + d[None, :], mask=(columns < n)[:, None], other=0.0)
        total = total * tl.exp2(top - new_top) + tl.sum(probs, 1)
        sums = tl.dot(probs.to(value.dtype), value, sums * tl.exp2(top - new_top)[:, None])
        top = new_top
    tl.store(o + rows[:, None] * D + d[None, :], (sums / total[:, None]).to(o.dtype.element_ty), mask=(rows < n)[:, None])

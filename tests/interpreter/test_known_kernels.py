"""The kernels for which the model of cycles is calibrated compute attention and its gradients."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.tolerance import assert_near
from tools.cycles import known

LENGTH, WIDTH, BLOCK_M, BLOCK_N = 64, 16, 32, 16


def test_attention_and_gradients() -> None:
    """In float32, beside torch's: out, and the gradients from both walks and from the single one."""
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 2, LENGTH, WIDTH) for _ in range(4))
    scale, log2e = 1 / math.sqrt(WIDTH), 1 / math.log(2)
    out, lse = torch.empty_like(q), torch.empty(2, LENGTH)
    blocks = (LENGTH // BLOCK_M, 2)
    known.known_forward_kernel[blocks](q, k, v, out, lse, scale * log2e, LENGTH, WIDTH, BLOCK_M, BLOCK_N)

    inputs = query, key, value = tuple(tensor.clone().requires_grad_() for tensor in (q, k, v))
    expected = F.scaled_dot_product_attention(query, key, value)
    assert_near("out", out, expected)
    expected.backward(d_out)

    scaled, delta = k * scale * log2e, (out * d_out).sum(-1).view(2, LENGTH)  # scores in the exponent of two
    by_keys = (LENGTH // BLOCK_N, 2)
    for adds in (False, True):
        dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
        tensors = (q, scaled, v, d_out, dq, dk, dv, lse, delta)
        known.known_keys_kernel[by_keys](*tensors, scale, LENGTH, WIDTH, BLOCK_M, BLOCK_N, adds)
        if not adds:
            known.known_queries_kernel[blocks](*(q, scaled, v, d_out, dq, lse, delta, 1 / log2e, LENGTH, WIDTH, BLOCK_M, BLOCK_N))
        else:
            dq /= log2e  # of scaled keys
        for found, each in zip((dq, dk, dv), inputs, strict=True):
            assert each.grad is not None
            assert_near("gradient", found, each.grad)

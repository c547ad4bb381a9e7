"""The kernel on one page, triton_relattn/kernels/minimal.py, computes what the operator computes."""

from __future__ import annotations

import pytest
import torch

from triton_relattn import fused_relative_attention
from triton_relattn.kernels.minimal import minimal_attention
from triton_relattn.testing import assert_within_budget


def reference(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    query, key, value, table = (each.to(dtype) for each in tensors)
    out = fused_relative_attention(query[None], key[None], value[None], table, implementation="reference", return_lse=False)
    return out[0]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_is_the_operator(length: int, dtype: torch.dtype) -> None:
    """By the error rule, for lengths that fill tiles and lengths that do not; rows beyond the ends of E are not read."""
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(2, length, 16, generator=generator).to(dtype) for _ in range(3))
    storage = torch.full((2 * length + 1, 16), torch.nan, dtype=dtype)
    table = storage[1:-1].copy_(torch.randn(2 * length - 1, 16, generator=generator))
    golden, plain = (reference([query, key, value, table], other) for other in (torch.float64, dtype))
    out = minimal_attention(query, key, value, table)
    assert_within_budget("out", out, golden, plain, factor=2, exact_reference=length == 1)

"""Attention over parts of the keys, merged."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.oracle import assert_same
from tests.tolerance import assert_near
from triton_relattn import RelativePositions, fused_relative_attention, merge_attention


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_parts_in_any_order(order: tuple[int, ...], is_causal: bool) -> None:
    """Three blocks of keys, some of which some queries do not see: out, lse and all gradients, also through lse."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, d_out = (torch.randn(2, 2, 17, 8, dtype=torch.float64, generator=generator) for _ in range(4))
    table, d_lse = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((9, 8), (2, 2, 17)))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, table)]
    options: dict[str, Any] = {"is_causal": is_causal, "positions": RelativePositions(-4, 4, "zero"), "return_lse": True}
    expected: Any = fused_relative_attention(*leaves, **options)
    parts = []
    for start, stop in ((0, 6), (6, 7), (7, 17)):
        part: Any = fused_relative_attention(
            query, key[:, :, start:stop], value[:, :, start:stop], table, query_offset=-start, **options
        )
        parts.append(part)
    merged: Any = parts[order[0]]
    for index in order[1:]:
        merged = merge_attention(*merged, *parts[index])
    for name, actual, exact in zip(("out", "lse"), merged, expected, strict=True):
        assert_same(name, actual, exact)
    gradients, exact_gradients = (torch.autograd.grad(both, leaves, (d_out, d_lse)) for both in (merged, expected))
    for name, actual, exact in zip(("query", "key", "value", "table"), gradients, exact_gradients, strict=True):
        assert_same(name, actual, exact)


def test_what_nobody_sees() -> None:
    """Queries that see nothing in one part, or in both: no NaN, in results and gradients."""
    out1, out2 = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    lse1 = torch.tensor([0.3, -torch.inf, -torch.inf], requires_grad=True)
    lse2 = torch.tensor([-torch.inf, 1000.0, -torch.inf], requires_grad=True)
    out, lse = merge_attention(out1, lse1, out2, lse2)
    assert torch.equal(out, torch.stack([out1[0], out2[1], torch.zeros(4)]))
    assert_near("lse", lse[:1], lse1[:1])
    assert lse.tolist()[1:] == [1000.0, -torch.inf]
    for gradient in torch.autograd.grad((out.sum(), lse[:2].sum()), (out1, lse1, out2, lse2)):
        assert gradient.isfinite().all()
    for gradient in torch.autograd.grad(merge_attention(out1, lse1, out2, lse2)[0].sum(), (out1, out2)):
        assert not gradient[2].any()


def test_nan_that_has_no_weight() -> None:
    """Others return NaN for a query that sees nothing."""
    out, lse = torch.randn(2, 4), torch.zeros(2)
    merged, _ = merge_attention(out, lse, torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf))
    assert torch.equal(merged, out)


def test_weights_that_overflowed() -> None:
    """A result with lse = +inf has all of the weight; two of them share it, as two equal results of any lse do."""
    out1, out2 = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    lse1 = torch.tensor([torch.inf, 0.5, torch.inf], requires_grad=True)
    lse2 = torch.tensor([0.5, torch.inf, torch.inf], requires_grad=True)
    out, lse = merge_attention(out1, lse1, out2, lse2)
    assert torch.equal(out, torch.stack([out1[0], out2[1], (out1[2] + out2[2]) / 2]))
    assert lse.tolist() == [torch.inf] * 3
    for gradient in torch.autograd.grad(out.sum() + lse.sum(), (out1, out2, lse1, lse2)):
        assert gradient.isfinite().all()


def test_dtypes_and_shapes() -> None:
    out, lse = torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 3)
    merged = merge_attention(out, lse, out, lse)
    assert [tensor.dtype for tensor in merged] == [torch.bfloat16, torch.float32]
    assert_near("out", merged[0], out)
    assert_near("lse", merged[1], lse + torch.log(torch.tensor(2.0)))
    with pytest.raises(ValueError, match="lse1 and lse2"):
        merge_attention(out, lse[:1], out, lse)

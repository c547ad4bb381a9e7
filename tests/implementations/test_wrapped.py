"""Tensors that torch negates lazily, or wraps for its transforms. Their memory is not what they stand for, or they have none:
what computes an operator must not get them before torch's dispatcher has seen them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tolerance import assert_near
from tests.way import Way
from triton_relattn import decomposed_relative_attention
from triton_relattn.testing import make_inputs


def leaves_of(way: Way) -> list[torch.Tensor]:
    inputs = make_inputs(1, 2, 9, 11, way.width, num_rows=7, dtype=way.dtype, seed=0)
    return [tensor.requires_grad_() for tensor in inputs[:4] if tensor is not None]


def test_lazy_negation(way: Way) -> None:
    """Of values, and of the gradient of out: a conjugate has a bit that says so, and its imaginary part another."""
    query, key, value, table = leaves_of(way)
    lazy = torch.complex(value, value).detach().conj().imag
    assert lazy.is_neg()
    expected = way.attend(query, key, -value.detach(), table)[0]
    assert torch.equal(way.attend(query, key, lazy, table)[0], expected)

    out, _ = way.attend(query, key, value, table)
    d_out = torch.randn_like(out)
    lazy = torch.complex(d_out, d_out).conj().imag
    for found, other in zip(*(torch.autograd.grad(out, value, each, retain_graph=True) for each in (lazy, -d_out)), strict=True):
        assert torch.equal(found, other)


def test_lazy_negation_on_a_grid(way: Way) -> None:
    query, key, value = (torch.randn(1, 2, 12, way.width, dtype=way.dtype) for _ in range(3))
    rel_h, rel_w = (torch.randn(2 * length - 1, way.width, dtype=way.dtype) for length in (3, 4))
    lazy, negated = (
        decomposed_relative_attention(query, key, each, rel_h, rel_w, (3, 4), implementation=way.implementation)
        for each in (value._neg_view(), -value)
    )
    assert torch.equal(lazy, negated)


def test_several_gradients_at_once(way: Way) -> None:
    """is_grads_batched=True is a vmap of its own, which pushes no transform."""
    leaves = leaves_of(way)
    out, _ = way.attend(*leaves)
    d_outs = torch.randn(3, *out.shape, dtype=out.dtype)
    together = torch.autograd.grad(out, leaves, d_outs, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(out, leaves, each, retain_graph=True) for each in d_outs]
    for found, expected in zip(together, zip(*alone, strict=True), strict=True):
        if way.implementation == "reference":  # torch may add in another order
            assert_near("gradients", found, torch.stack(expected))
        else:
            assert torch.equal(found, torch.stack(expected))


def test_a_function_of_gradients_outside_its_transform(way: Way) -> None:
    """That of torch.func.vjp meets tensors whose transform is over. Second derivatives through it are refused, not left out."""
    leaves = leaves_of(way)

    def attend(*tensors: torch.Tensor) -> Any:
        return way.attend(*tensors)[0]

    out, gradients_of = torch.func.vjp(attend, *leaves)[:2]
    d_out = torch.randn_like(out)
    found = gradients_of(d_out)
    for gradient, expected in zip(found, torch.autograd.grad(attend(*leaves), leaves, d_out), strict=True):
        assert torch.equal(gradient, expected)
    penalty = found[0].square().sum() + leaves[0].sum()
    if way.implementation == "reference":
        assert torch.autograd.grad(penalty, leaves[0])[0].isfinite().all()
    else:
        with pytest.raises(RuntimeError, match="attention_backward cannot be differentiated"):
            torch.autograd.grad(penalty, leaves[0])

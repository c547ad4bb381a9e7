"""Tensors of any layout: strides, edits in place, large values, and tensors that torch wraps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.check import Way
from tests.expected import exact_results
from tests.samples import in_memory_order, with_different_strides
from tests.tolerance import assert_bit_equal, assert_near
from triton_relattn import decomposed_relative_attention
from triton_relattn.testing import Inputs, assert_within_budget, make_inputs


def packed(inputs: Inputs) -> Inputs:
    """query, key and value as views of one (B, N, 3, H, D) tensor."""
    qkv = torch.stack([tensor.transpose(1, 2) for tensor in inputs[:3]], dim=2)
    query, key, value = (qkv[:, :, part].transpose(1, 2) for part in range(3))
    return inputs._replace(query=query, key=key, value=value)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.new_full((1,), math.nan), tensor.flatten()])[1:].view(tensor.shape)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, 3), value=math.nan)[..., :-3]


LAYOUTS: dict[str, Callable[[Any], Inputs]] = {
    "transposed": lambda x: x._replace(query=in_memory_order(x.query, 0, 2, 1, 3), d_out=in_memory_order(x.d_out, 0, 2, 1, 3)),
    "lengths_innermost": lambda x: x._replace(key=x.key.mT.contiguous().mT, value=x.value.mT.contiguous().mT),
    "packed": packed,
    "offset_or_padded": lambda x: x._replace(
        query=shifted(x.query), key=padded(x.key), value=shifted(x.value), d_out=padded(x.d_out)
    ),
    "heads_of_stride_0": lambda x: x._replace(key=x.key[:, :1].expand_as(x.key), value=x.value[:1, :, :1].expand_as(x.value)),
    "tables_of_heads": lambda x: x._replace(rel_key=torch.stack([x.rel_key, -x.rel_key, 2 * x.rel_key], 1).transpose(0, 1)),
    "d_out_of_its_own": lambda x: x._replace(d_out=in_memory_order(x.d_out, 3, 0, 2, 1), d_lse=in_memory_order(x.d_lse, 2, 1, 0)),
    "d_out_of_stride_0": lambda x: x._replace(
        d_out=torch.ones(1, 1, 1, 1, dtype=x.d_out.dtype).expand_as(x.d_out), d_lse=x.d_lse[..., :1].expand_as(x.d_lse)
    ),
    "all_different": with_different_strides,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, way: Way) -> None:
    """Views give the results of contiguous copies, in the kernels with equal bits; gradients keep the memory order of inputs."""
    inputs = LAYOUTS[layout](make_inputs(2, 3, 35, 35, way.width, num_rows=21, dtype=way.dtype, seed=6))
    contiguous = Inputs(*(None if tensor is None else tensor.contiguous() for tensor in inputs))  # type: ignore[arg-type]
    assert any(not tensor.is_contiguous() or tensor.storage_offset() for tensor in inputs if tensor is not None)
    results = way.results(inputs, is_causal=True)
    if way.implementation == "triton":
        assert_bit_equal(results, way.results(contiguous, is_causal=True))
    way.check(results, contiguous, is_causal=True)
    if way.implementation != "reference":
        assert (results["out"].stride(1) < results["out"].stride(2)) == (inputs.query.stride(1) < inputs.query.stride(2))
        for name in ("query", "key", "value"):
            tensor, gradient = getattr(inputs, name), results[f"d_{name}"]
            assert (tensor.stride(1) < tensor.stride(2)) == (gradient.stride(1) < gradient.stride(2)), name


@pytest.mark.parametrize("name", ["query", "key", "value", "rel_key", "out"])
def test_edit_in_place_after_the_forward(name: str, tiled: Way) -> None:
    """The backward reads saved inputs (kernels also out): an edit in between is an error, by torch's version counter."""
    if name == "out" and tiled.implementation != "triton":
        pytest.skip("its backward does not read out")
    inputs = make_inputs(1, 2, 12, 12, tiled.width, num_rows=7, dtype=tiled.dtype, seed=8)
    fields = ("query", "key", "value", "rel_key")
    used = {field: getattr(inputs, field).clone().requires_grad_() * 1 for field in fields}
    used["out"], lse = tiled.attend(*(used[field] for field in fields))
    (used[name] if name != "out" else used["out"].detach()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (used["out"].sum() + lse.sum()).backward()


@pytest.mark.parametrize(("logit", "spread"), [(1e4, 1.0), (-1e4, 1.0), (-200.0, 0.01)])
@pytest.mark.parametrize(("num_rows", "num_keys"), [(33, 65), (129, 65), (33, 129), (17, 137)])
def test_large_logits_in_float16(logit: float, spread: float, num_rows: int, num_keys: int, tiled: Way) -> None:
    """Logits of +-1e4, and logits near -200 with lengths that do not fill blocks, which made NaN in dQ in other libraries.

    The budget is the error of plain torch in float32: in float16 it rounds logits of 1e4 to multiples of 8. Kernels scale logits
    to base 2, which is one more rounding.
    """
    inputs = make_inputs(1, 2, 33, num_keys, 16, num_rows=num_rows, dtype=torch.float64, seed=9)
    level = math.sqrt(abs(logit) * 4 / 16)  # 16 products, scale 1/4
    sign = math.copysign(1.0, logit)
    query, key = level + spread * inputs.query / level, sign * level + spread * inputs.key / level
    inputs = inputs._replace(query=query, key=key).to(torch.float16)
    results, golden = tiled.results(inputs), exact_results(inputs)
    assert golden["lse"].sub(logit).abs().max() < abs(logit) / 5
    plain = Way("reference").results(inputs.to(torch.float32))
    for name, result in results.items():
        factor = (3 if name.startswith("d_") else 2) * (2 if tiled.implementation == "triton" else 1)
        # Attention to a single key copies its value: out may be exact.
        assert_within_budget(name, result, golden[name], plain[name], factor=factor, exact_reference=name == "out")


def test_no_heads_of_the_query(way: Way) -> None:
    """Keys and values that no head attends to have gradients, which are zero."""
    query, key, value = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (0, 2, 2))
    out, _ = way.attend(query, key, value, enable_gqa=True)
    for gradient in torch.autograd.grad(out.sum(), (key, value)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


# Lazily negated tensors and tensors wrapped by torch's transforms: their memory does not hold their values. The implementations
# must get them only after torch's dispatcher has resolved them.


def make_leaves(way: Way) -> list[torch.Tensor]:
    inputs = make_inputs(1, 2, 9, 11, way.width, num_rows=7, dtype=way.dtype, seed=0)
    return [tensor.requires_grad_() for tensor in inputs[:4] if tensor is not None]


def test_lazy_negation_on_a_grid(way: Way) -> None:
    query, key, value = (torch.randn(1, 2, 12, way.width, dtype=way.dtype) for _ in range(3))
    rel_h, rel_w = (torch.randn(2 * length - 1, way.width, dtype=way.dtype) for length in (3, 4))
    lazy, negated = (
        decomposed_relative_attention(query, key, values, rel_h, rel_w, (3, 4), implementation=way.implementation)
        for values in (value._neg_view(), -value)
    )
    assert torch.equal(lazy, negated)


def test_several_gradients_at_once(way: Way) -> None:
    """is_grads_batched=True gives the gradients of single calls."""
    leaves = make_leaves(way)
    out, _ = way.attend(*leaves)
    d_outs = torch.randn(3, *out.shape, dtype=out.dtype)
    together = torch.autograd.grad(out, leaves, d_outs, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(out, leaves, d_out, retain_graph=True) for d_out in d_outs]
    for found, expected in zip(together, zip(*single, strict=True), strict=True):
        if way.implementation == "reference":  # torch may add in another order
            assert_near("gradients", found, torch.stack(expected))
        else:
            assert torch.equal(found, torch.stack(expected))


def test_vjp_outside_its_transform(way: Way) -> None:
    """The function returned by torch.func.vjp works later; second derivatives through it raise an error instead of being 0."""
    leaves = make_leaves(way)

    def attend(*tensors: torch.Tensor) -> Any:
        return way.attend(*tensors)[0]

    out, backward = torch.func.vjp(attend, *leaves)[:2]
    d_out = torch.randn_like(out)
    found = backward(d_out)
    for gradient, expected in zip(found, torch.autograd.grad(attend(*leaves), leaves, d_out), strict=True):
        assert torch.equal(gradient, expected)
    penalty = found[0].square().sum() + leaves[0].sum()
    if way.implementation == "reference":
        assert torch.autograd.grad(penalty, leaves[0])[0].isfinite().all()
    else:
        with pytest.raises(RuntimeError, match="attention_backward cannot be differentiated"):
            torch.autograd.grad(penalty, leaves[0])

"""Dropout depends on the seed and the place of a probability only, and is the same in all implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.check import Way
from tests.tolerance import assert_near
from triton_relattn.testing import dropout_mask, make_inputs


@pytest.mark.parametrize("dropout_p", [0.05, 0.5, 0.9])
def test_rate(dropout_p: float) -> None:
    """The rate of dropped probabilities is right in total and along each axis, within five standard deviations."""
    torch.manual_seed(0)
    dropped = (~dropout_mask(3, 4, 200, 200, dropout_p)).double()
    for dims in ([], [0], [1], [2], [3], [0, 1]):
        others = [dim for dim in range(4) if dim not in dims]
        samples = dropped.mean(others).numel() / dropped.numel()
        spread = (dropout_p * (1 - dropout_p) * samples) ** 0.5
        assert float((dropped.mean(others) - dropout_p).abs().max()) < 5 * spread, dims


@pytest.mark.parametrize("dim", range(4))
def test_neighbours_are_independent(dim: int) -> None:
    """Half of all pairs at small distances along an axis differ, as independent draws do."""
    torch.manual_seed(1)
    mask = dropout_mask(8, 9, 100, 100, 0.5)
    for distance in (1, 2, 3, 4, 8)[: 5 if dim > 1 else 4]:
        length = mask.shape[dim] - distance
        differ = (mask.narrow(dim, distance, length) != mask.narrow(dim, 0, length)).double()
        assert abs(float(differ.mean()) - 0.5) < 5 * 0.5 / differ.numel() ** 0.5, distance


@pytest.mark.parametrize("dropout_p", [0.2, 0.7])
def test_the_mask_is_what_is_kept(dropout_p: float, way: Way) -> None:
    """out of identity values shows what the forward drops, and an identity d_out what the backward drops: both match dropout_mask
    after the same torch.manual_seed, although torch's generator has changed before the backward. So does the gradient of
    rel_value. lse is that of the call without dropout."""
    length = 35
    identity = torch.eye(length, dtype=way.dtype)
    terms: dict[str, Any] = {"num_rows": 2 * length - 1, "per_head": True, "rel_width": 4, "rel_value": True, "key_heads": 1}
    inputs = make_inputs(2, 2, length, length, way.width, **terms, dtype=way.dtype, seed=3)
    inputs = inputs._replace(
        value=identity.expand(2, 1, -1, -1), rel_value=torch.zeros(2, 2 * length - 1, length, dtype=way.dtype)
    )
    leaves = [tensor.clone().requires_grad_() for tensor in (inputs.value, inputs.terms()["rel_value"])]

    def attend(p: float) -> Any:
        value, rel_value = leaves
        terms = {**inputs.terms(), "rel_value": rel_value}
        masks: dict[str, Any] = {"is_causal": True, "query_offset": 0, "enable_gqa": True}
        return way.attend(inputs.query, inputs.key, value, inputs.rel_key, **terms, **masks, dropout_p=p)

    probs, expected_lse = attend(0.0)
    torch.manual_seed(5)
    keep = dropout_mask(2, 2, length, length, dropout_p)
    torch.manual_seed(5)
    out, lse = attend(dropout_p)
    torch.manual_seed(6)
    assert_near("probabilities", out, probs * keep / (1 - dropout_p))
    assert torch.equal(out > 0, keep & (probs > 0)) and torch.equal(lse, expected_lse)
    d_out = torch.zeros_like(out)
    d_out[:, :1] = identity  # of the first of the heads that share a value
    d_value, d_rel_value = torch.autograd.grad(out, leaves, d_out)
    assert torch.equal(d_value.mT > 0, (out > 0)[:, :1])
    i, j = torch.arange(length)[:, None], torch.arange(length)
    assert torch.equal(d_rel_value[:1, j - i + length - 1, i] > 0, (out > 0)[:, :1].any(0))

"""Calls of the kernels with chosen configurations, and what they are measured against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from triton_relattn import RelativePositions, validation
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.configs import TileConfig
from triton_relattn.kernels.forward import forward
from triton_relattn.reference import reference_attention
from triton_relattn.testing import (
    Inputs,
    assert_gradients_close_fp32,
    assert_table_gradient,
    assert_within_budget,
    dense_gradients,
    forward_backward,
)

DEFAULT_ARGUMENTS = {"positions": None, "key_lengths": None, "is_causal": False, "query_offset": 0, "scale": None}
GRADIENTS = ("d_query", "d_key", "d_value", "d_rel_key")


def run(inputs: Inputs, config: TileConfig | None = None, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the forward kernel; the call is validated as the public function validates it."""
    query, key, value, rel_key = inputs[:4]
    arguments = DEFAULT_ARGUMENTS | arguments
    spec = validation.resolve(query, key, value, rel_key, **arguments)
    out, lse = forward(query, key, value, rel_key, arguments["key_lengths"], spec, config=config)
    return out, lse


def check(inputs: Inputs, config: TileConfig | None = None, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run and apply the error rule to out and lse: at most twice the error of plain torch in the same precision.

    In float32 at most four times: the kernel scales logits to base 2, a rounding that plain torch does not have and that the
    interpreter, which has no fused multiply-add, makes where a GPU does not.
    """
    results = run(inputs, config, **arguments)
    golden = reference_attention(*inputs.to(torch.float64)[:4], **arguments)
    reference = reference_attention(*inputs[:4], **arguments)
    factor = 4 if inputs.query.dtype == torch.float32 else 2
    for name, result, exact, plain in zip(("out", "lse"), results, golden, reference, strict=True):
        if bool((exact.isfinite() & (exact != 0)).any()):
            # Rows that see a single key copy its value: plain torch may be exact.
            assert_within_budget(name, result, exact, plain, factor=factor, exact_reference=True)
        else:  # nobody sees anything
            assert torch.equal(result.double(), exact)
    return results


def run_backward(
    inputs: Inputs,
    tiles: Mapping[str, TileConfig] | None = None,
    wanted: Sequence[bool] = (True, True, True, True),
    **arguments: Any,
) -> dict[str, torch.Tensor | None]:
    """out, lse and the gradients by name, None where not wanted; tiles: configurations by the kernels' names."""
    query, key, value, rel_key = inputs[:4]
    arguments = DEFAULT_ARGUMENTS | arguments
    out, lse = run(inputs, (tiles or {}).get("forward"), **arguments)
    spec = validation.resolve(query, key, value, rel_key, **arguments)
    gradients = backward(
        inputs.d_out, inputs.d_lse, out, lse, query, key, value, rel_key, arguments["key_lengths"], spec, wanted, tiles
    )
    return {"out": out, "lse": lse, **dict(zip(GRADIENTS, gradients, strict=True))}


def all_gradients(
    inputs: Inputs, tiles: Mapping[str, TileConfig] | None = None, **arguments: Any
) -> dict[str, torch.Tensor]:
    """out, lse and all gradients by name; without a table there is no d_rel_key."""
    return {name: result for name, result in run_backward(inputs, tiles, **arguments).items() if result is not None}


def rounded_exponentials(inputs: Inputs, **arguments: Any) -> dict[str, torch.Tensor]:
    """For each gradient, what a relative error of one unit of float32 in each P, dP and delta can do to it, in float64.

    P = exp(logit - lse) has the rounding of both, each at its own magnitude, as relative error. Plain torch divides by the
    row's sum, where such an error cancels, wholly if a query sees a single key; a backward that keeps only lse cannot.
    """
    query, key, value, rel_key, d_out, d_lse = (None if tensor is None else tensor.double().abs() for tensor in inputs)
    assert query is not None and key is not None and value is not None and d_out is not None and d_lse is not None
    identity = torch.eye(key.shape[2], dtype=torch.float64).expand(*key.shape[:2], -1, -1)
    exact = inputs.to(torch.float64)
    probs, _ = reference_attention(exact.query, exact.key, identity, exact.rel_key, **arguments)
    scale = arguments.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else abs(scale)
    logits, largest_row = query @ key.mT, torch.zeros(())
    if rel_key is not None:
        largest_row = rel_key.amax(-2, keepdim=True)  # (1, D) or (H, 1, D)
        logits = logits + query @ largest_row.mT
    unit = torch.finfo(torch.float32).eps * (1 + scale * (logits * (probs > 0)).amax(-1, keepdim=True))
    probs = unit * probs
    d_probs = d_out @ value.mT
    d_scores = scale * probs * (d_probs + (probs / unit * d_probs).sum(-1, keepdim=True) + d_lse[..., None])
    errors = {
        "d_query": d_scores @ key + d_scores.sum(-1, keepdim=True) * largest_row,
        "d_key": d_scores.mT @ query,
        "d_value": probs.mT @ d_out,
    }
    if rel_key is not None:
        positions = arguments.get("positions") or RelativePositions.centred(rel_key.shape[-2])
        i, j = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
        row, applies = positions.rows(j - i - arguments.get("query_offset", 0))
        by_row = torch.zeros(*query.shape[:3], rel_key.shape[-2], dtype=torch.float64)
        by_row.scatter_add_(-1, row.expand_as(d_scores), d_scores * applies)
        errors["d_rel_key"] = torch.einsum("bhir,bhid->hrd", by_row, query)
        if rel_key.dim() == 2:
            errors["d_rel_key"] = errors["d_rel_key"].sum(0)
    return errors


def check_gradients(results: Mapping[str, torch.Tensor], inputs: Inputs, **arguments: Any) -> None:
    """The error rule: a gradient's error is at most three times that of plain torch in the same precision."""
    dtype = inputs.query.dtype
    golden = dense_gradients(inputs, **arguments)._asdict()
    reference = forward_backward(reference_attention, inputs, **arguments)
    names = [name for name in GRADIENTS if golden[name] is not None]
    assert [name for name in GRADIENTS if name in results] == names
    for name in names:
        result, exact = results[name], golden[name]
        assert result.dtype == dtype and result.shape == exact.shape, name
        if not exact.any():
            assert not result.any(), name
            continue
        assert_within_budget(name, result, exact, reference[name], factor=3, exact_reference=True)
        if dtype == torch.float32:
            assert_gradients_close_fp32(name, result, exact, [golden[other] for other in names])
        elif name == "d_rel_key":
            assert_table_gradient(name, result, inputs, **arguments)


def check_backward(inputs: Inputs, tiles: Mapping[str, TileConfig] | None = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """Run and apply the error rule to the gradients."""
    results = all_gradients(inputs, tiles, **arguments)
    check_gradients(results, inputs, **arguments)
    return results

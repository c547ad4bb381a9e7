"""What the CPU tests share: a dense forward of their own, a typed call of the operator, and a float64 comparison."""

from __future__ import annotations

import math
from typing import Any

import torch

from triton_relattn import RelativePositions, fused_relative_attention

# Between float64's rounding (2e-16) and float32's (1e-7), equally far from both on a logarithmic scale: a sum of thousands of
# terms passes, a wrong term or a detour through float32 does not.
FLOAT64_TOLERANCE = math.sqrt(torch.finfo(torch.float64).eps * torch.finfo(torch.float32).eps)


def assert_same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float64 rounding, relative to the largest magnitude (at least 1); -inf where -inf is expected."""
    assert actual.dtype == expected.dtype == torch.float64, f"{name}: {actual.dtype}, {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite), f"{name}: not finite, or finite, where the other is not"
    assert torch.equal(actual[~finite], expected[~finite]), f"{name}: {actual[~finite]} is not {expected[~finite]}"
    if finite.any():
        error = (actual[finite] - expected[finite]).abs().max().item()
        tolerance = FLOAT64_TOLERANCE * max(1.0, expected[finite].abs().max().item())
        assert error <= tolerance, f"{name}: error {error:.3e}, tolerance {tolerance:.3e}"


def attend(*tensors: torch.Tensor | None, implementation: str | None = "blockwise", **arguments: Any) -> Any:
    """out and lse of the operator; blockwise unless said otherwise."""
    return fused_relative_attention(*tensors, **arguments, return_lse=True, implementation=implementation)  # type: ignore[misc, arg-type]


def dense_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None,
    *,
    positions: RelativePositions | None = None,
    key_lengths: torch.Tensor | None = None,
    is_causal: bool = False,
    query_offset: int = 0,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, one pair (i, j) at a time: shares nothing with the package but the definition of the arguments."""
    batch, heads, num_queries, width = query.shape
    num_keys = key.shape[2]
    scale = 1 / math.sqrt(width) if scale is None else scale
    logits = torch.full((batch, heads, num_queries, num_keys), -math.inf, dtype=torch.float64)
    for i in range(num_queries):
        for j in range(num_keys):
            r = j - (i + query_offset)
            keys_and_row = key[:, :, j]
            if rel_key is not None:
                num_rows = rel_key.shape[-2]
                first = -(num_rows - 1) // 2 if positions is None else positions.first
                last = first + num_rows - 1
                if first <= r <= last or positions is None or positions.outside == "clamp":
                    keys_and_row = keys_and_row + rel_key[..., max(0, min(num_rows - 1, r - first)), :]
            if not (is_causal and r > 0):
                logits[:, :, i, j] = scale * (query[:, :, i] * keys_and_row).sum(-1)
    for b in range(batch):
        if key_lengths is not None:
            logits[b, :, :, int(key_lengths[b]) :] = -math.inf
    lse = torch.logsumexp(logits, -1)
    probs = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0)[..., None])
    return torch.einsum("bhij,bhjd->bhid", probs, value), lse

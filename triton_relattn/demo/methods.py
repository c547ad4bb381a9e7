"""What is compared: this package and the baselines, as functions of query, key, value and a full table, at one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from .. import fused_relative_attention
from ..baselines import BASELINES, Baseline

# One sequence through a layer of width 512, as in the Music Transformer and the base Transformer.
BATCH, HEADS, HEAD_DIM = 1, 8, 64

OURS = "triton_relattn"
Method = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    out = fused_relative_attention(query, key, value, table)
    return cast(torch.Tensor, out)  # alone, since lse is not asked for


def _full(baseline: Baseline) -> Method:
    return lambda query, key, value, table: baseline(query, key, value, table, False)


METHODS: dict[str, Method] = {OURS: _fused, **{name: _full(baseline) for name, baseline in BASELINES.items()}}
"""Full attention by every method, ours first."""


def make_inputs(length: int, dtype: torch.dtype, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Normally distributed query, key, value and (2N - 1, D) table, which want gradients, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, length, HEAD_DIM)
    shapes: list[tuple[int, ...]] = [shape, shape, shape, (2 * length - 1, HEAD_DIM), shape]
    *inputs, d_out = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return [tensor.requires_grad_() for tensor in inputs], d_out


def forward_backward(method: Method, inputs: list[torch.Tensor], d_out: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of all inputs: what is timed, and what is checked."""
    out = method(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]

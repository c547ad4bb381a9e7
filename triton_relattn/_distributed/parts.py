"""Attention of some queries over a part of their keys, and its gradients as a part of all keys', by every implementation.

With lse and delta = rowsum(out * d_out) - d_lse of all keys, the gradient of the scores is that of any part of the keys:

    P = exp(logits - lse)      dS = P * (dP - delta)

so that no part needs its own out, lse or softmax_stats again, and the gradients of the parts add up to those of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._blockwise import attention as blockwise
from .._core.dtypes import compute_dtype, without_autocast
from .._core.spec import AttentionSpec, AttentionTensors


def forward(tensors: AttentionTensors, spec: AttentionSpec, implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the part alone, both in the compute dtype: to be merged with those of other parts."""
    dtype = compute_dtype(tensors.query.dtype)
    if implementation == "triton":
        from ..kernels.forward import forward

        with torch.cuda.device_of(tensors.query):
            return forward(tensors, spec, dtype=dtype)[:2]
    with without_autocast(tensors.query.device):
        return blockwise.forward(tensors, spec, dtype=dtype)


def backward(
    d_out: torch.Tensor,
    delta: torch.Tensor,
    lse: torch.Tensor,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    implementation: str,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The part's share of the gradients of spec.DIFFERENTIABLE, None where not wanted or not there.

    Args:
        delta, lse: (B, Hq, Nq), of all keys.
    """
    if implementation == "triton":
        from ..kernels.backward import backward, statistics_of

        with torch.cuda.device_of(tensors.query):
            return backward(d_out, None, None, statistics_of(lse, tensors, spec), tensors, spec, wanted, delta=delta)
    with without_autocast(tensors.query.device):
        return blockwise.backward(d_out, None, tensors, spec, wanted, whole=blockwise.Whole(lse, delta))

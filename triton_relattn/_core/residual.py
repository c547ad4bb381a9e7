"""The residual of out, what rounding to 16 bits took from it: for which calls the kernels' forward keeps it for the backward."""

from __future__ import annotations

import torch

from .spec import AttentionSpec, AttentionTensors

FEWEST_QUERIES = 1024
"""Calls with fewer have their query's gradient from the dq kernel: blocks of dq_from_ds_kernel, which are spread over 512 queries
and more, would be partly empty."""


def keeps_residual(tensors: AttentionTensors, spec: AttentionSpec) -> bool:
    """Return whether the kernels' backward can do without the dq kernel, which finds the exact delta: the query's gradient comes
    from the workspace, and delta from out and its residual (kernels/delta.py)."""
    query = tensors.query
    has_scores_table = tensors.rel_key is not None or tensors.rel_bias is not None or tensors.rel_p2c is not None
    is_plain = tensors.rel_value is None and tensors.cu_seqlens_q is None and tensors.query_offsets is None
    return (
        has_scores_table
        and is_plain
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[2] >= FEWEST_QUERIES
        and spec.coverage() == "full"
        and torch.version.hip is None
    )

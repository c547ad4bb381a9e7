"""The tail of out, what rounding to 16 bits took from it: for which calls the forward keeps it. kernels/deltas.py explains it."""

from __future__ import annotations

import torch

from .spec import AttentionSpec, AttentionTensors

FEWEST_QUERIES = 1024
"""Calls with fewer have their query's gradient from the dq kernel: blocks of dq_words_kernel, which are spread over 512 queries,
would be partly empty."""


def wants_tail(tensors: AttentionTensors, spec: AttentionSpec) -> bool:
    """Return whether the kernels' backward computes the query's gradient from its workspace, if there is one, with the tail."""
    query = tensors.query
    has_table = tensors.rel_key is not None or tensors.rel_bias is not None or tensors.rel_p2c is not None
    is_plain = tensors.rel_value is None and tensors.cu_seqlens_q is None and tensors.query_offsets is None
    return (
        has_table
        and is_plain
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[2] >= FEWEST_QUERIES
        and spec.coverage() == "full"
        and torch.version.hip is None
    )


def rows_of_tail(value_width: int) -> int:
    """Return how many rows of float32 hold the tail of a head, a byte for each number of out, below the statistics' two."""
    return -(-value_width // 4)

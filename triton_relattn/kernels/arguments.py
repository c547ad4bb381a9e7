"""What every launch passes to its kernel, put together once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from ..spec import AttentionSpec
from . import configs


def strided(tensor: torch.Tensor | None) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """A tensor as the kernels take it: with its strides."""
    return None if tensor is None else (tensor, tensor.stride())


def call_arguments(
    query: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor | None,
    spec: AttentionSpec,
    tensors: Iterable[torch.Tensor | None],
) -> dict[str, Any]:
    """The scalars and flags that all kernels share; table is (B, H, R, D), tensors are all others that a kernel addresses."""
    _, heads, seqlen_q, head_dim = query.shape
    seqlen_k, value_dim = value.shape[2:]
    wide_index = any(configs.needs_wide_index(tensor) for tensor in tensors if tensor is not None)
    if table is not None:
        wide_index |= configs.needs_wide_index(table, rows=table.shape[-2] + configs.MAX_BLOCK)
    return {
        "num_heads": heads,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "base_2_scale": spec.scale / math.log(2),  # in double, so that it is rounded once, and the same for all kernels
        "first": spec.first,
        "last": spec.last,
        "query_offset": spec.query_offset,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": configs.padded_width(head_dim),
        "BLOCK_DV": configs.padded_width(value_dim),
        "OUTSIDE": None if table is None else spec.outside(seqlen_q, seqlen_k),
        "IS_CAUSAL": spec.is_causal,
        "INPUT_PRECISION": configs.input_precision(query.dtype),
        "WIDE_INDEX": wide_index,
    }


def tile_arguments(config: configs.TileConfig) -> dict[str, int]:
    """A configuration, as a kernel and its launch take it."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }

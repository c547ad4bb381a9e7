"""Precision: dtypes and memory order of what implementations return, autocast, and which calls save the residual of out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .spec import TABLES, AttentionTensors
from .warn import untraced


def new_like(query: torch.Tensor, width: int) -> torch.Tensor:
    """Allocate a (B, H, N, width) tensor in query's memory order, which is (B, N, H, width) if query is such a view."""
    batch, heads, length, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, length, heads, width).transpose(1, 2)
    return query.new_empty(batch, heads, length, width)


def gradient_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate the gradient of a tensor; those of query, key, value and rel_query keep its memory order."""
    return new_like(tensor, tensor.shape[-1]) if tensor.dim() == 4 else tensor.new_empty(tensor.shape)


def has_autocast(device_type: str) -> bool:
    """Return whether torch.autocast supports a device. Compiled code does not ask: torch 2.11 cannot trace the question."""
    return device_type != "meta" if torch.compiler.is_compiling() else torch.amp.is_autocast_available(device_type)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which torch.autocast does not change the dtypes of products."""
    enabled = has_autocast(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else nullcontext()  # type: ignore[return-value]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and accumulators: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


AUTOCAST = (torch.float16, torch.bfloat16, torch.float32)


def autocast_dtype(query: object) -> torch.dtype | None:
    """Return the dtype that torch.autocast has where this tensor is; None without autocast."""
    device = query.device.type if isinstance(query, torch.Tensor) else "meta"
    return torch.get_autocast_dtype(device) if has_autocast(device) and torch.is_autocast_enabled(device) else None


def cast(tensor: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor as torch.autocast casts the operands of scaled_dot_product_attention: not from float64, nor from bool."""
    return tensor.to(dtype) if isinstance(tensor, torch.Tensor) and tensor.dtype in AUTOCAST else tensor


@untraced
def rounds_float32() -> bool:
    """Return whether products of float32 inputs may be in tf32."""
    return torch.get_float32_matmul_precision() != "highest"


def keeps_residual(tensors: AttentionTensors) -> bool:
    """Return whether the kernels' backward needs an exact delta (kernels/delta.py), so the residual of out: with a table for the
    scores, in whose gradient errors of delta add up, unless products are in full float32."""
    has_scores_table = tensors.rel_key is not None or tensors.rel_bias is not None or tensors.rel_p2c is not None
    return has_scores_table and (tensors.query.dtype != torch.float32 or rounds_float32())


def widened(table: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return a table in the compute dtype of query; the gradient of a DTensor is added up over shards before it is rounded."""
    wide: Any = table.to(compute_dtype(query.dtype))
    if wide is table or not hasattr(table, "placements"):
        return wide  # type: ignore[no-any-return]
    return wide.redistribute(placements=table.placements)  # type: ignore[no-any-return]


def with_wide_tables(tensors: AttentionTensors) -> AttentionTensors:
    """Return the tensors of a call with tables that are DTensors widened."""
    tables = {name: getattr(tensors, name) for name in TABLES}
    wide = {name: widened(table, tensors.query) for name, table in tables.items() if hasattr(table, "placements")}
    return tensors._replace(**wide)

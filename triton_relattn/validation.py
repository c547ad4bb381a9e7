"""The contract of the public functions: ranks, shapes, dtypes, devices and values, checked once, before any work."""

from __future__ import annotations

import math
import os

import torch

from .positions import RelativePositions
from .spec import AttentionSpec

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CHECK_VALUES_VARIABLE = "TRITON_RELATTN_CHECK_VALUES"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...], meaning: str) -> None:
    _require(tuple(tensor.shape) == expected, f"{name} must have shape {meaning} = {expected}, got {tuple(tensor.shape)}")


def _check_tensor(name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {tensor.layout}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
    if tensor.dtype != query.dtype:
        raise TypeError(f"{name} must have query's dtype {query.dtype}, got {tensor.dtype}")
    _require(tensor.device == query.device, f"{name} must be on query's device {query.device}, got {tensor.device}")


def _check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _require(tensor.dim() == 4, f"{name} must have 4 dimensions (batch, heads, length, width), got {tuple(tensor.shape)}")
    batch, heads, _, width = query.shape
    _require(width > 0 and value.shape[-1] > 0, f"widths must be positive, got {width} (query), {value.shape[-1]} (value)")
    _require_shape("key", key, (batch, heads, key.shape[2], width), "(batch, heads, num_keys, width) as query has them")
    _require_shape("value", value, (batch, heads, key.shape[2], value.shape[3]), "(batch, heads, num_keys, value_width)")


def _check_table(query: torch.Tensor, rel_key: torch.Tensor) -> None:
    _, heads, _, width = query.shape
    _require(
        rel_key.dim() in (2, 3) and rel_key.shape[-1] == width and rel_key.shape[-2] > 0,
        f"rel_key must have shape (R, width) or (heads, R, width) with R >= 1 and width = {width}, got {tuple(rel_key.shape)}",
    )
    if rel_key.dim() == 3:
        _require_shape("rel_key", rel_key, (heads, *rel_key.shape[1:]), "(heads, R, width)")


def _check_key_lengths(key_lengths: torch.Tensor, query: torch.Tensor, num_keys: int) -> None:
    if not isinstance(key_lengths, torch.Tensor):
        raise TypeError(f"key_lengths must be a torch.Tensor, got {type(key_lengths).__name__}")
    if key_lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"key_lengths must be int32 or int64, got {key_lengths.dtype}")
    _require(
        key_lengths.device == query.device, f"key_lengths must be on query's device {query.device}, got {key_lengths.device}"
    )
    _require_shape("key_lengths", key_lengths, (query.shape[0],), "(batch,)")
    # Reading values of a GPU tensor would wait for the GPU; a subclass (FakeTensor, ...) may have none.
    readable = key_lengths.device.type == "cpu" or os.environ.get(CHECK_VALUES_VARIABLE) == "1"
    if readable and type(key_lengths) is torch.Tensor and not torch.compiler.is_compiling() and key_lengths.numel():
        low, high = int(key_lengths.min()), int(key_lengths.max())
        _require(0 <= low and high <= num_keys, f"key_lengths must lie in [0, {num_keys}], got values from {low} to {high}")


def _resolve_positions(positions: RelativePositions | None, rel_key: torch.Tensor | None) -> RelativePositions:
    if rel_key is None:
        _require(positions is None, "positions describes the rows of a table, but rel_key is None")
        return RelativePositions(0, 0, "zero")
    num_rows = rel_key.shape[-2]
    if positions is None:
        return RelativePositions.centred(num_rows)
    if not isinstance(positions, RelativePositions):
        raise TypeError(f"positions must be a RelativePositions, got {type(positions).__name__}")
    _require(
        positions.num_rows == num_rows,
        f"rel_key has R = {num_rows} rows, but positions from {positions.first} to {positions.last} need {positions.num_rows}",
    )
    return positions


def resolve(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None,
    positions: RelativePositions | None,
    key_lengths: torch.Tensor | None,
    is_causal: bool,
    query_offset: int,
    scale: float | None,
) -> AttentionSpec:
    """Check one call and return its scalars with every default filled in.

    Raises:
        ValueError: wrong rank, shape, device or value; the message names the argument, what was expected and what came.
        TypeError: wrong type or dtype.
    """
    if not isinstance(query, torch.Tensor):
        raise TypeError(f"query must be a torch.Tensor, got {type(query).__name__}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, tensor, query)
    _check_shapes(query, key, value)
    if rel_key is not None:
        _check_tensor("rel_key", rel_key, query)
        _check_table(query, rel_key)
    if key_lengths is not None:
        _check_key_lengths(key_lengths, query, key.shape[2])
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}")
    if isinstance(query_offset, bool) or not isinstance(query_offset, (int, torch.SymInt)):
        raise TypeError(f"query_offset must be an int, got {query_offset!r}")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    elif not isinstance(scale, (int, float)) or isinstance(scale, bool):
        raise TypeError(f"scale must be a float, got {scale!r}")
    # Not math.isfinite: torch.compile with symbolic widths can trace comparisons only. NaN fails both.
    _require(-math.inf < scale < math.inf, f"scale must be finite, got {scale}")
    positions = _resolve_positions(positions, rel_key)
    return AttentionSpec(
        scale=float(scale),
        first=positions.first,
        last=positions.last,
        clamp=positions.outside == "clamp",
        is_causal=is_causal,
        query_offset=query_offset,
    )

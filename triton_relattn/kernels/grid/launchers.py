"""Launchers of attention on a grid, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..._core.grids import GridTensors
from ..call import PerQuery, aligned, strided
from ..config.fitting import until_it_fits
from ..config.selection import TileConfig
from .bwd_dkv import launch_grid_dkv
from .bwd_dq import launch_grid_dq
from .call import GridCall, Sums
from .forward import launch_grid_forward


@until_it_fits
def forward(
    tensors: GridTensors, scale: float, dropout_p: float, config: TileConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (B, H, Nq, Dv) in query's dtype, and statistics for the backward as forward.forward has them."""
    query = tensors.query
    out = query.new_empty(*query.shape[:3], tensors.value.shape[3])
    softmax_stats = query.new_empty(*query.shape[:2], 2, query.shape[2], dtype=torch.float32)
    if out.numel() > 0:
        call = GridCall(tensors, scale, dropout_p, (out,))
        launch_grid_forward(call, call.tile("forward", config), out, softmax_stats)
    return out, softmax_stats


@until_it_fits
def backward(
    d_out: torch.Tensor,
    out: torch.Tensor,
    softmax_stats: torch.Tensor,
    tensors: GridTensors,
    scale: float,
    dropout_p: float,
    wanted: Sequence[bool] = (True,) * 5,
    tiles: Mapping[str, TileConfig] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of query, key, value, rel_h and rel_w; None for those that are not wanted.

    Memory beyond the gradients: for each query two numbers, d_query in float32, its terms, and twice as many sums.

    Args:
        softmax_stats: as the forward returns them.
        tiles: configurations by the names of kernels, in place of the selected ones.
    """
    if d_out.numel() == 0:
        return tuple(tensor.new_zeros(tensor.shape) if want else None for tensor, want in zip(tensors, wanted, strict=False))
    query, key, value = tensors[:3]
    d_query = query.new_empty(query.shape, dtype=torch.float32) if wanted[0] else None  # gradients of the terms are added
    d_key = key.new_empty(key.shape) if wanted[1] else None
    d_value = value.new_empty(value.shape) if wanted[2] else None
    d_out = aligned(d_out)
    call = GridCall(tensors, scale, dropout_p, (out, d_out, d_query))
    of_dq, of_dkv = (call.tile(kernel, (tiles or {}).get(kernel)) for kernel in ("dq", "dkv"))
    deltas = query.new_empty(query.shape[:3], dtype=torch.float32)
    per_query = PerQuery(*map(strided, (softmax_stats, deltas)))  # type: ignore[arg-type]
    sums = call.new_sums(of_dq.block_n) if wanted[0] or wanted[3] or wanted[4] else None
    if sums is not None or d_key is not None:
        launch_grid_dq(call, of_dq, per_query, out, d_out, d_query, sums)
    if d_key is not None or d_value is not None:
        launch_grid_dkv(call, of_dkv, per_query, d_out, d_key, d_value)
    if sums is None:
        return None, d_key, d_value, None, None
    if d_query is not None and scale < 0:  # the kernels had the query negated
        d_query.neg_()
    d_query, d_rel_h, d_rel_w = _of_terms(tensors, sums, d_query, wanted[3:])
    return d_query, d_key, d_value, d_rel_h, d_rel_w


def _of_terms(
    tensors: GridTensors, sums: Sums, d_query: torch.Tensor | None, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Return d_query with the part of the terms, which is added to it, in query's dtype, and the gradients of both tables."""
    by_place = tensors.by_place(tensors.query).float()
    height, corrections = tensors.rel_h.shape[1], sums.corrections[:, :, tensors.prefix :]
    of_strips = (each.unflatten(2, (-1, height)) for each in (sums.d_rows, sums.p_rows))
    d_rows, p_rows = (each[:, :, 0] if each.shape[2] == 1 else each.sum(2) for each in of_strips)
    d_rows = d_rows.addcmul_(corrections[:, :, None], p_rows, value=-1).unflatten(3, by_place.shape[2:4])
    d_columns = sums.d_columns.addcmul_(corrections[..., None], sums.p_columns, value=-1).unflatten(2, by_place.shape[2:4])
    if d_query is not None:
        on_grid = tensors.by_place(d_query)
        on_grid += torch.einsum("bgkyx,ykd->bgyxd", d_rows, tensors.rel_h)
        on_grid += torch.einsum("bgyxk,xkd->bgyxd", d_columns, tensors.rel_w)
        d_query = d_query.to(tensors.query.dtype)
    d_rel_h = torch.einsum("bgkyx,bgyxd->ykd", d_rows, by_place) if wanted[0] else None
    d_rel_w = torch.einsum("bgyxk,bgyxd->xkd", d_columns, by_place) if wanted[1] else None
    return d_query, d_rel_h, d_rel_w

"""delta, rowsum(out * d_out) - d_lse, of each query, from out and its residual: what rounding to 16 bits took from it.

The gradient of a score is dS = P * (dP - delta). If delta is off, all dS of a query are off by P times the same number. In the
gradient of a table that adds up. The dq kernel finds delta as the sum of P * dP. A backward that does not begin with that kernel
takes it from out, which two roundings have changed:

* out was rounded. The forward keeps the residual in a tensor of its own.
* P was rounded, to P', for the product with the values. So the residual is that of sum P' v / sum P', whose delta is off by
  sum (P - P') * (dP - delta) / sum P', no more than rounding dS changes its sum. Division by sum P, as for out,
  would make that error |delta| / |dP - delta| times as large: 17 times in a call with sharp attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .call import cdiv, strided
from .launching import launch
from .tile.addressing import head_matrix, load_rows, row_vector

BLOCK_M = 64
RESIDUAL_SCALE = tl.constexpr(2048.0)
"""Residuals are stored times this, which is at most out itself. Else those of small outs would be below float16's range."""


@triton.jit(do_not_specialize=["num_queries"])
def delta_kernel(
    outs,
    residuals,
    d_outs,
    d_lses,
    deltas,
    num_queries,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Compute deltas [B, H, Nq] of BLOCK_M queries of a head. d_lses, zeros, may be None.

    Grid: (batch * query blocks, heads): a GPU takes 2**31 programs in the first dimension, and 65,535 in others.
    """
    blocks = tl.cdiv(num_queries, BLOCK_M)
    row_start, head, entry = tl.program_id(0) % blocks * BLOCK_M, tl.program_id(1), tl.program_id(0) // blocks
    tile_m = tl.arange(0, BLOCK_M)
    offs_m = row_start + tile_m
    valid_m = offs_m < num_queries
    out = load_rows(head_matrix(outs, entry, head, 0, True), row_start, tile_m, valid_m, WIDTH, BLOCK_WIDTH)
    residual = load_rows(head_matrix(residuals, entry, head, 0, True), row_start, tile_m, valid_m, WIDTH, BLOCK_WIDTH)
    d_out = load_rows(head_matrix(d_outs, entry, head, 0, True), row_start, tile_m, valid_m, WIDTH, BLOCK_WIDTH)
    exact = out.to(tl.float32) + residual.to(tl.float32) * (1.0 / RESIDUAL_SCALE)
    delta = tl.sum(exact * d_out.to(tl.float32), axis=1)
    if d_lses is not None:
        delta -= tl.load(row_vector(d_lses, entry, head, 0) + offs_m, mask=valid_m, other=0.0)
    tl.store(row_vector(deltas, entry, head, 0) + offs_m, delta, mask=valid_m)


def launch_delta(
    out: torch.Tensor,
    residual: torch.Tensor,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    deltas: torch.Tensor,
    block_width: int,
) -> None:
    """Launch delta_kernel; see there."""
    batch, heads, num_queries, width = out.shape
    arguments = {
        "outs": strided(out),
        "residuals": strided(residual),
        "d_outs": strided(d_out),
        "d_lses": strided(d_lse),
        "deltas": strided(deltas),
        "num_queries": num_queries,
        "WIDTH": width,
        "BLOCK_WIDTH": block_width,
        "BLOCK_M": BLOCK_M,
    }
    launch(delta_kernel, (batch * cdiv(num_queries, BLOCK_M), heads), arguments)

"""delta, rowsum(out * d_out) - d_lse, of each query from out and its tail: what rounding to 16 bits took from it.

The gradient of a score is dS = P * (dP - delta). If delta is off, all dS of a query are off by P times the same number. In the
gradient of a table that adds up. The dq kernel finds delta as the sum of P * dP. A backward that does not begin with that kernel
takes it from out, which two roundings have changed:

* out was rounded. The forward keeps the tail, 8 bits of what that took.
* P was rounded, to P', for the product with the values. So the tail is that of sum P' v / sum P', whose delta is off by
  sum (P - P') * (dP - delta) / sum P', no more than rounding dS changes its sum. Divided by sum P instead, as out is, it would be
  off by as many times more as delta is larger than dP - delta: 17 times in a call with sharp attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arguments import cdiv, strided
from .launching import description, launch
from .tiles import head_matrix, load_rows, row_vector

BLOCK_M = 64


def tails_of(softmax_stats: torch.Tensor) -> torch.Tensor | None:
    """Return the tails (B, H, Nq, Dv, padded) in int8 that softmax_stats (B, H, 2 + rows, Nq) hold; None if they hold none."""
    batch, heads, rows, num_queries = softmax_stats.shape
    if rows == 2:
        return None
    return softmax_stats[:, :, 2:].view(torch.int8).flatten(2).view(batch, heads, num_queries, 4 * (rows - 2))


@triton.jit
def tail_step(rounded):
    """Return the step of each number's tail as the bits of a float32: a 128th of its unit in the last place."""
    HALF: tl.constexpr = rounded.dtype == tl.float16
    DIGITS: tl.constexpr = 10 if HALF else 7
    LEAST: tl.constexpr = 127 - 14 if HALF else 127 - 100  # exponent: numbers below it have its step
    exponent = rounded.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(exponent, LEAST << 23) - ((DIGITS + 7) << 23)


@triton.jit
def tail_of(exact, rounded):
    """Return exact - rounded in steps, from -128 to 127: both differ by a unit in the last place at most, nearly always."""
    inverse = ((254 << 23) - tail_step(rounded)).to(tl.float32, bitcast=True)
    steps = (exact - rounded.to(tl.float32)) * inverse
    positive = tl.minimum(tl.maximum(steps, -128.0), 127.0) + 128.5  # whose conversion rounds to the nearest
    return (positive.to(tl.int32) - 128).to(tl.int8)


@triton.jit
def delta_kernel(
    outs,
    tails,
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
    tail = load_rows(head_matrix(tails, entry, head, 0, True), row_start, tile_m, valid_m, WIDTH, BLOCK_WIDTH)
    d_out = load_rows(head_matrix(d_outs, entry, head, 0, True), row_start, tile_m, valid_m, WIDTH, BLOCK_WIDTH)
    exact = out.to(tl.float32) + tail.to(tl.float32) * tail_step(out).to(tl.float32, bitcast=True)
    delta = tl.sum(exact * d_out.to(tl.float32), axis=1)
    if d_lses is not None:
        delta -= tl.load(row_vector(d_lses, entry, head, 0) + offs_m, mask=valid_m, other=0.0)
    tl.store(row_vector(deltas, entry, head, 0) + offs_m, delta, mask=valid_m)


def launch_delta(
    out: torch.Tensor,
    tails: torch.Tensor,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    deltas: torch.Tensor,
    block_width: int,
) -> None:
    """Launch delta_kernel; see there."""
    batch, heads, num_queries, width = out.shape
    arguments = {
        "outs": strided(out),
        "tails": strided(tails),
        "d_outs": strided(d_out),
        "d_lses": strided(d_lse),
        "deltas": strided(deltas),
        "num_queries": num_queries,
        "WIDTH": width,
        "BLOCK_WIDTH": block_width,
        "BLOCK_M": BLOCK_M,
    }
    launch(delta_kernel, (batch * cdiv(num_queries, BLOCK_M), heads), arguments, description(arguments.values()))

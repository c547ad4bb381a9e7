"""Attention of some queries over a part of their keys, and its gradients as a part of all keys', by every implementation.

With the largest logit, the log_sum = log sum exp(logits - largest), and delta = rowsum(out * d_out) - d_lse of all keys, the
gradient of the scores is that of any part of the keys:

    P = exp(logits - largest - log_sum)      dS = P * (dP - delta)

so that no part needs its own out, lse or softmax_stats again, and the gradients of the parts add up to those of the whole.

Largest logit and log_sum travel as two numbers. Their sum, lse, has no digits left for log_sum where logits are large: where a
mask adds the lowest number to all logits of a query, as masks of padding do, lse is that number, however many the keys are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._blockwise import attention as blockwise
from .._core.dtypes import compute_dtype, new_like, without_autocast
from .._core.spec import AttentionSpec, AttentionTensors
from ..merging import merged
from .sharding import Piece

LN_2 = math.log(2)


class Result(NamedTuple):
    """Results of attention over some of the keys, in the compute dtype."""

    out: torch.Tensor  # (B, Hq, Nq, Dv)
    largest: torch.Tensor  # (B, Hq, Nq): the largest logit, divided by unit_of(); -inf: no key was seen
    log_sum: torch.Tensor  # (B, Hq, Nq): logarithm of the sum of exp(logits - the largest one)

    @staticmethod
    def of_no_keys(query: torch.Tensor, width: int) -> Result:
        """Return the result before any part has been merged with it."""
        dtype = compute_dtype(query.dtype)
        largest = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
        return Result(new_like(query, width, dtype).zero_(), largest, torch.zeros_like(largest))

    def add(self, part: Result, unit: float) -> None:
        """Merge the result over other keys with this one, in its place. unit: of largest."""
        both = merged((self.out, part.out), (self.largest, part.largest), (self.log_sum, part.log_sum), unit)
        for place, result in zip(self, both, strict=True):
            place.copy_(result)

    def of(self, piece: Piece) -> Result:
        """Return a view of the result of some of the queries."""
        return Result(*map(piece.of, self))

    def lse(self, unit: float) -> torch.Tensor:
        """Return the log-sum-exp of the logits; -inf: no key was seen."""
        return self.log_sum + self.largest * unit


def unit_of(tensors: AttentionTensors, spec: AttentionSpec, implementation: str) -> float:
    """Return the factor that turns Result.largest into logits: kernels scale differences of scores, which are more exact."""
    if implementation != "triton":
        return 1.0
    from ..kernels.backward import unit_of_maxima

    return unit_of_maxima(tensors, spec)


def forward(tensors: AttentionTensors, spec: AttentionSpec, implementation: str) -> Result:
    """Attention over the part alone: to be merged with that over other parts."""
    dtype = compute_dtype(tensors.query.dtype)
    if implementation == "triton":
        from ..kernels.forward import forward

        with torch.cuda.device_of(tensors.query):
            out, lse, softmax_stats, _ = forward(tensors, spec, dtype=dtype)
        largest, log_sum = softmax_stats.unbind(2)
        return Result(out, largest.masked_fill(lse == -torch.inf, -torch.inf), log_sum * LN_2)
    largest = tensors.query.new_full(tensors.query.shape[:3], -torch.inf, dtype=dtype)
    with without_autocast(tensors.query.device):
        out, log_sum = blockwise.forward(tensors, spec, dtype=dtype, largest_logits=largest)
    return Result(out, largest, log_sum)


def backward(
    d_out: torch.Tensor,
    of_rows: blockwise.Whole,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    implementation: str,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The part's share of the gradients of spec.DIFFERENTIABLE, None where not wanted or not there."""
    if implementation == "triton":
        from ..kernels.backward import backward

        softmax_stats = torch.stack((of_rows.largest, of_rows.log_sum / LN_2), 2)
        with torch.cuda.device_of(tensors.query):
            return backward(d_out, None, None, softmax_stats, tensors, spec, wanted, delta=of_rows.delta)
    with without_autocast(tensors.query.device):
        return blockwise.backward(d_out, None, tensors, spec, wanted, whole=of_rows)

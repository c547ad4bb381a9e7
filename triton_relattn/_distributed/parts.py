"""Attention of some queries over a part of their keys, and its gradients as a part of all keys', by every implementation.

With the largest logit, the log_sum = log sum exp(logits - largest), and delta = rowsum(out * d_out) - d_lse of all keys, the
gradient of the scores is that of any part of the keys:

    P = exp(logits - largest - log_sum)      dS = P * (dP - delta)

so that no part needs its own out, lse or softmax_stats again, and the gradients of the parts add up to those of the whole.

Largest logit and log_sum travel as two numbers. Their sum, lse, has no digits left for log_sum where logits are large: where a
mask adds the lowest number to all logits of a query, as masks of padding do, lse is that number, however many the keys are.
"""

from __future__ import annotations

import torch

from .._core.dtypes import compute_dtype, new_like
from .._implementations.base import Part
from ..merging import merged
from .sharding import Piece


class Result(Part):
    """A Part that those of other keys are added to."""

    @staticmethod
    def of_no_keys(query: torch.Tensor, width: int) -> Result:
        """Return the result before any part has been merged with it."""
        dtype = compute_dtype(query.dtype)
        largest = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
        return Result(new_like(query, width, dtype).zero_(), largest, torch.zeros_like(largest))

    def add(self, part: Part, unit: float) -> None:
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

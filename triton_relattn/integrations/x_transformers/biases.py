"""Modules that have a bias by distance, of which the stock ones make a tensor for all pairs of positions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from x_transformers import x_transformers as stock

from ... import tables
from ...positions import RelativePositions
from ..arguments import StockArguments
from .bias import Bias


class RelativePositionBias(StockArguments, stock.RelativePositionBias):
    """T5's: b[bucket(j - i)], scaled; beyond the largest distance all have one bucket."""

    def forward(self, i: int, j: int) -> Bias:
        """i queries, the last of j positions."""
        positions = RelativePositions(-self.max_distance, self.max_distance)
        distances = torch.arange(positions.first, positions.last + 1, device=self.device)
        buckets = self._relative_position_bucket(distances, self.causal, self.num_buckets, self.max_distance)
        rel_bias = self.relative_attention_bias(buckets).T * self.scale
        return Bias(functools.partial(super().forward, i, j), rel_bias=rel_bias, positions=positions)


class DynamicPositionBias(StockArguments, stock.DynamicPositionBias):
    """b[j - i], an MLP of the distance i - j or of its logarithm."""

    def forward(self, i: int, j: int) -> Bias:
        """i queries, the last of j positions."""
        rows = torch.arange(j - 1, -j, -1, device=self.device).float()[:, None]
        if self.log_distance:
            rows = rows.sign() * (rows.abs() + 1).log()
        for layer in self.mlp:
            rows = layer(rows)
        return Bias(functools.partial(super().forward, i, j), rel_bias=rows.T, positions=RelativePositions(1 - j, j - 1))


class AlibiPositionalBias(StockArguments, stock.AlibiPositionalBias):
    """ALiBi: -slope |j - i| in the first heads, nothing in others."""

    def forward(self, i: int, j: int) -> Bias:
        """i queries, the last of j positions."""
        rel_bias = tables.alibi_bias(self.slopes.flatten(), 1 - j, j - 1)
        rel_bias = nn.functional.pad(rel_bias, (0, 0, 0, self.total_heads - len(rel_bias)))
        return Bias(functools.partial(super().forward, i, j), rel_bias=rel_bias, positions=RelativePositions(1 - j, j - 1))


class RelativeProjPositionalBias(StockArguments, stock.RelativeProjPositionalBias):
    """Inkling's: p_i . W[i - j] for distances in a window of the past, not scaled; p is a projection of the input."""

    def forward(self, x: torch.Tensor, seq_len_k: int | None = None) -> Bias:
        """x (B, N, C), the last of seq_len_k positions."""
        term: dict[str, Any] = {
            "rel_query": self.to_distance_weights(x),
            "rel_key": tables.from_future_first(self.distance_bank.T, dim=-2),
            "rel_scale": 1.0,
            "positions": RelativePositions(1 - self.max_dist, 0, "zero"),
        }
        return Bias(functools.partial(super().forward, x, seq_len_k), **term)


CLASSES = {
    stock.RelativePositionBias: RelativePositionBias,
    stock.DynamicPositionBias: DynamicPositionBias,
    stock.AlibiPositionalBias: AlibiPositionalBias,
    stock.RelativeProjPositionalBias: RelativeProjPositionalBias,
}

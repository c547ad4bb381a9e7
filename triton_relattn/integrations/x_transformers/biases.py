"""Modules that have a bias by distance, of which the stock ones make a tensor for all pairs of positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from x_transformers import x_transformers as stock

from ... import tables
from ...positions import RelativePositions
from ..in_place import InPlace
from .bias import Bias


class OfDistances(InPlace):
    """Mixin of modules that make a bias of the numbers of queries and keys."""

    fewest, passes_on = 0, True

    def pairs(self: Any, i: int, j: int) -> int:  # type: ignore[override]
        return i * j * getattr(self, "heads", getattr(self, "total_heads", 1))

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        return {"i": length, "j": length}


class RelativePositionBias(OfDistances, stock.RelativePositionBias):
    """T5's: b[bucket(j - i)], scaled; beyond the largest distance all have one bucket."""

    def forward(self, i: int, j: int) -> Bias:
        """i queries, the last of j positions."""
        positions = RelativePositions(-self.max_distance, self.max_distance)
        distances = torch.arange(positions.first, positions.last + 1, device=self.device)
        buckets = self._relative_position_bucket(distances, self.causal, self.num_buckets, self.max_distance)
        rel_bias = self.relative_attention_bias(buckets).T * self.scale
        return Bias(i, j, rel_bias=rel_bias, positions=positions)


class DynamicPositionBias(OfDistances, stock.DynamicPositionBias):
    """b[j - i], an MLP of the distance i - j or of its logarithm."""

    def forward(self, i: int, j: int) -> Bias:
        """i queries, the last of j positions."""
        rows = torch.arange(j - 1, -j, -1, device=self.device).float()[:, None]
        if self.log_distance:
            rows = rows.sign() * (rows.abs() + 1).log()
        for layer in self.mlp:
            rows = layer(rows)
        return Bias(i, j, rel_bias=rows.T, positions=RelativePositions(1 - j, j - 1))


class AlibiPositionalBias(OfDistances, stock.AlibiPositionalBias):
    """ALiBi: -slope |j - i| in the first heads, nothing in others."""

    def forward(self, i: int, j: int) -> Bias:
        """i queries, the last of j positions."""
        rel_bias = tables.alibi_bias(self.slopes.flatten(), 1 - j, j - 1)
        rel_bias = nn.functional.pad(rel_bias, (0, 0, 0, self.total_heads - len(rel_bias)))
        return Bias(i, j, rel_bias=rel_bias, positions=RelativePositions(1 - j, j - 1))

    def prepare(self) -> None:
        self.bias = None  # the largest one up to now


class RelativeProjPositionalBias(InPlace, stock.RelativeProjPositionalBias):
    """Inkling's: p_i . W[i - j] for distances in a window of the past, not scaled; p is a projection of the input."""

    def forward(self, x: torch.Tensor, seq_len_k: int | None = None) -> Bias:
        """x (B, N, C), the last of seq_len_k positions."""
        term: dict[str, Any] = {
            "rel_query": self.to_distance_weights(x),
            "rel_key": tables.from_future_first(self.distance_bank.T, dim=-2),
            "rel_scale": 1.0,
            "positions": RelativePositions(1 - self.max_dist, 0, "zero"),
        }
        return Bias(x.shape[1], seq_len_k or x.shape[1], **term)

    fewest, passes_on = 0, True

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        return {"x": torch.randn(batch, length, self.to_distance_weights[0].in_features)}


CLASSES = {
    stock.RelativePositionBias: RelativePositionBias,
    stock.DynamicPositionBias: DynamicPositionBias,
    stock.AlibiPositionalBias: AlibiPositionalBias,
    stock.RelativeProjPositionalBias: RelativeProjPositionalBias,
}

"""A bias by distance: the modules that have it, of which the stock ones form a tensor over all pairs of positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from x_transformers import x_transformers as stock

from ... import tables
from ...positions import RelativePositions
from ..compact import rows, to_dense
from ..in_place import InPlace


class Bias:
    """Arguments of the operator that make a bias; any other use is one of the stock tensor, (H, Nq, Nk) or (B, H, Nq, Nk)."""

    def __init__(self, queries: int, keys: int, **term: Any) -> None:
        self.queries, self.keys, self.term = queries, keys, term

    def dense(self) -> torch.Tensor:
        """Return the stock tensor."""
        size, positions = (self.queries, self.keys, self.keys - self.queries), self.term["positions"]
        if "rel_bias" in self.term:
            return rows(self.term["rel_bias"], positions, *size)
        scores = self.term["rel_query"] @ self.term["rel_key"].mT  # (B, H, Nq, R)
        number = torch.arange(positions.num_rows, device=scores.device)
        slots = rows(number, positions, *size)
        distance = torch.arange(size[1], device=scores.device) - torch.arange(size[0], device=scores.device)[:, None] - size[2]
        inside = (distance >= positions.first) & (distance <= positions.last)
        return scores.gather(-1, slots.expand(*scores.shape[:-1], -1)).where(inside, 0.0)

    def cast(self, dtype: torch.dtype) -> Bias:
        term = {name: value.to(dtype) if isinstance(value, torch.Tensor) else value for name, value in self.term.items()}
        return Bias(self.queries, self.keys, **term)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __add__(self, other: Any) -> torch.Tensor:
        return self.dense() + to_dense(other)

    __radd__ = __add__

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is pad and not any(args[1]):  # for the keys of a memory, of which there are none
            return args[0]
        return function(*map(to_dense, args), **{name: to_dense(value) for name, value in (kwargs or {}).items()})


class DistanceBias(InPlace):
    """Mixin of modules that make a bias of the numbers of queries and keys."""

    fewest, passes_on = 0, True

    def pairs(self: Any, i: int, j: int) -> int:  # type: ignore[override]
        return i * j * getattr(self, "heads", getattr(self, "total_heads", 1))

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        return {"i": length, "j": length}


class RelativePositionBias(DistanceBias, stock.RelativePositionBias):
    """T5's: b[bucket(j - i)], scaled; beyond the largest distance all have one bucket."""

    def forward(self, i: int, j: int) -> Bias:
        """i queries, the last of j positions."""
        positions = RelativePositions(-self.max_distance, self.max_distance)
        distances = torch.arange(positions.first, positions.last + 1, device=self.device)
        buckets = self._relative_position_bucket(distances, self.causal, self.num_buckets, self.max_distance)
        rel_bias = self.relative_attention_bias(buckets).T * self.scale
        return Bias(i, j, rel_bias=rel_bias, positions=positions)


class DynamicPositionBias(DistanceBias, stock.DynamicPositionBias):
    """b[j - i], an MLP of the distance i - j or of its logarithm."""

    def forward(self, i: int, j: int) -> Bias:
        """i queries, the last of j positions."""
        features = torch.arange(j - 1, -j, -1, device=self.device).float()[:, None]
        if self.log_distance:
            features = features.sign() * (features.abs() + 1).log()
        for layer in self.mlp:
            features = layer(features)
        return Bias(i, j, rel_bias=features.T, positions=RelativePositions(1 - j, j - 1))


class AlibiPositionalBias(DistanceBias, stock.AlibiPositionalBias):
    """ALiBi: -slope |j - i| in the first heads, nothing in others."""

    def forward(self, i: int, j: int) -> Bias:
        """i queries, the last of j positions."""
        rel_bias = tables.alibi_bias(self.slopes.flatten(), 1 - j, j - 1)
        rel_bias = pad(rel_bias, (0, 0, 0, self.total_heads - len(rel_bias)))
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

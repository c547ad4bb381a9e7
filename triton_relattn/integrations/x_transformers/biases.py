"""Attention of x-transformers once queries, keys and values are there, and the modules that make its biases by distance.

The stock modules form a tensor over all pairs of positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad, softmax
from x_transformers import attend

from ... import tables
from ...positions import RelativePositions
from ..compact import TensorOnUse, rows
from ..in_place import InPlace
from ..operators import fused_relative_attention


class Bias(TensorOnUse):
    """Arguments of the operator that make a bias, (H, Nq, Nk) or (B, H, Nq, Nk)."""

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

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is pad and not any(args[1]):  # for the keys of a memory, of which there are none
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


class DistanceBias(InPlace):
    """Mixin of modules that make a bias of the numbers of queries and keys."""

    fewest, passes_on = 0, True

    def pairs(self: Any, i: int, j: int) -> int:  # type: ignore[override]
        return i * j * getattr(self, "heads", getattr(self, "total_heads", 1))

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        return {"i": length, "j": length}


class RelativePositionBias(DistanceBias):
    """T5's: b[bucket(j - i)], scaled; beyond the largest distance all have one bucket."""

    def forward(self, i: int, j: int) -> Bias:
        """i queries, the last of j positions."""
        positions = RelativePositions(-self.max_distance, self.max_distance)
        distances = torch.arange(positions.first, positions.last + 1, device=self.device)
        buckets = self._relative_position_bucket(distances, self.causal, self.num_buckets, self.max_distance)
        rel_bias = self.relative_attention_bias(buckets).T * self.scale
        return Bias(i, j, rel_bias=rel_bias, positions=positions)


class DynamicPositionBias(DistanceBias):
    """b[j - i], an MLP of the distance i - j or of its logarithm."""

    def forward(self, i: int, j: int) -> Bias:
        """i queries, the last of j positions."""
        features = torch.arange(j - 1, -j, -1, device=self.device).float()[:, None]
        if self.log_distance:
            features = features.sign() * (features.abs() + 1).log()
        for layer in self.mlp:
            features = layer(features)
        return Bias(i, j, rel_bias=features.T, positions=RelativePositions(1 - j, j - 1))


class AlibiPositionalBias(DistanceBias):
    """ALiBi: -slope |j - i| in the first heads, nothing in others."""

    def forward(self, i: int, j: int) -> Bias:
        """i queries, the last of j positions."""
        rel_bias = tables.alibi_bias(self.slopes.flatten(), 1 - j, j - 1)
        rel_bias = pad(rel_bias, (0, 0, 0, self.total_heads - len(rel_bias)))
        return Bias(i, j, rel_bias=rel_bias, positions=RelativePositions(1 - j, j - 1))

    def prepare(self) -> None:
        self.bias = None  # the largest one up to now


class RelativeProjPositionalBias(InPlace):
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


MORE = (
    *("pre_softmax_talking_heads", "post_softmax_talking_heads", "pre_scale_post_talking_heads", "selective", "cog_signed"),
    *("l2_distance", "add_zero_kv", "head_learned_sink", "cope", "inverted_attention", "flash_pack_seq"),
)
"""Settings of stock attention that are more than softmax((q . k) scale + bias)."""


class Intermediates(attend.Intermediates):
    """Intermediates whose weights stock attention computes when they are asked for."""

    make: Any = None


def _made(name: str) -> property:
    def get(self: Any) -> Any:
        return None if self.make is None else getattr(self.make(), name)

    return property(get, lambda self, value: None)


for name in ("qk_similarities", "pre_softmax_attn", "post_softmax_attn"):
    setattr(Intermediates, name, _made(name))


class Attend(InPlace):
    """softmax((q . k) scale + bias) v with a bias by distance; all else is stock attention."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        attn_bias: Any = None,
        row_mask: Any = None,
        causal: bool | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """q (B, H, Nq, D), k (B, Hk, Nk, D), v (B, Hk, Nk, Dv), mask bool, True where a query may attend."""
        given = q, k, v, mask
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and k.shape[1] > 1:  # query head h has the key head h modulo their number, not one of successive heads
            k, v = (states.repeat(1, groups, 1, 1) for states in (k, v))
        attended = fused_relative_attention(
            q,
            k,
            v,
            attn_mask=mask[:, None, None] if mask is not None and mask.dim() == 2 else mask,
            is_causal=self.causal if causal is None else causal,
            query_offset=k.shape[2] - q.shape[2],
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            softcap=self.logit_softclamp_value if self.softclamp_logits else None,
            enable_gqa=True,
            **attn_bias.term,
        )
        intermediates = Intermediates()
        bias = attn_bias.dense
        intermediates.make = lambda: super(Attend, self).forward(*given, attn_bias=bias(), row_mask=row_mask, causal=causal)[1]
        return attended, intermediates

    def serves(self, attn_bias: Any = None) -> bool:  # type: ignore[override]
        """Return whether ours computes a call: a softmax of the logits, and no more."""
        is_softmax = getattr(self.attn_fn, "func", None) is softmax and self.attn_fn.keywords["dim"] == -1
        return isinstance(attn_bias, Bias) and is_softmax and not any(getattr(self, setting, None) for setting in MORE)

    @staticmethod
    def counted(mask: torch.Tensor) -> torch.Tensor | None:
        return None

    def pairs(self, q: torch.Tensor, k: torch.Tensor) -> int:  # type: ignore[override]
        return q.shape[:3].numel() * k.shape[2]

    @staticmethod
    def num_positions(given: dict[str, Any]) -> int:
        return given["q"].shape[2]  # type: ignore[no-any-return]

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        heads, width = 4, 8
        q, k, v = (torch.randn(batch, heads, length, width) for _ in range(3))
        positions = RelativePositions(1 - length, length - 1)
        bias = Bias(length, length, rel_bias=torch.randn(heads, positions.num_rows), positions=positions)
        return {"q": q, "k": k, "v": v, "mask": real, "attn_bias": bias}

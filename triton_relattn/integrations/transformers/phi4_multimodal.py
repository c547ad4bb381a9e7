"""The audio encoder of Phi-4 multimodal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...positions import RelativePositions
from ..compact import TensorOnUse, rows
from ..operators import fused_relative_attention, join_heads
from .base import Attention, Encoder, query_key_value


@dataclass(frozen=True, eq=False)
class Bias(TensorOnUse):
    """A bias by distance, (H, R), of N positions, and a mask that is added to the logits and broadcasts to (B, H, N, N)."""

    table: torch.Tensor
    length: int
    mask: torch.Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.add and args[0].dtype == torch.bool:  # the encoder's mask; the logits are floating
            mask, bias = args
            return replace(bias, mask=mask)
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def positions(self) -> RelativePositions:
        rows = self.table.shape[1]
        return RelativePositions(-(rows // 2), (rows - 1) // 2)

    def cast(self, dtype: torch.dtype) -> Bias:
        return replace(self, table=self.table.to(dtype))

    def dense(self) -> torch.Tensor:
        """Return what stock layers get, (B, H, N, N)."""
        bias = rows(self.table, self.positions, self.length, self.length)[None]
        return bias if self.mask is None else self.mask + bias


class AudioAttention(Attention):
    """q_i . k_j, scaled, + b[j - i], distances clipped; one table for all layers.

    As in the stock model, a bool mask hides nothing: it is added, so the logits of keys that it shows are larger by 1.
    """

    def forward(self, hidden_states: torch.Tensor, attention_mask: Bias) -> torch.Tensor:
        """hidden_states (B, N, C), attention_mask a Bias; stock layers get (B, H, N, N)."""
        mask = attention_mask.mask
        out: Any = fused_relative_attention(
            *query_key_value(self, hidden_states),
            rel_bias=attention_mask.table,
            positions=attention_mask.positions,
            attn_mask=None if mask is None else mask.to(hidden_states.dtype) - 1,  # softmax ignores what all keys have
            dropout_p=self.attention_dropout if self.training else 0.0,
            scale=self.scaling,
        )
        return self.o_proj(join_heads(out))

    def serves(self, attention_mask: Any) -> bool:  # type: ignore[override]
        return super().serves() and isinstance(attention_mask, Bias)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        table = torch.randn(self.config.num_attention_heads, 21)
        mask = None if real is None else real[:, None, None]
        return {"hidden_states": torch.randn(batch, length, self.config.hidden_size), "attention_mask": Bias(table, length, mask)}


class RelativeAttentionBias(Attention):
    """Biases (H, R), a row per distance that occurs, up to the clipped one, instead of (1, H, N, N)."""

    def forward(self, x: torch.Tensor) -> Bias:
        last = min(x.shape[1], self.max_distance) - 1
        distances = torch.arange(-self.max_distance if x.shape[1] > self.max_distance else -last, last + 1, device=x.device)
        slots = distances.abs() if self.symmetric else distances + self.num_buckets // 2
        return Bias(self.bias_values(slots).T, x.shape[1])

    fewest, passes_on = 0, True

    @property
    def longest(self) -> int:
        return min(self.max_distance, 500) + (0 if self.symmetric else 10)  # a symmetric one ends there

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        return {"x": torch.randn(batch, length, 8)}


class AudioModel(Encoder):
    """Encoder that cuts sequences into pieces of 500 frames. Its mask is (B, 1, N) if there is one chunk, else (B, N, N)."""

    mask_function = None

    def _streaming_mask(self, seq_len: int, batch_size: int, chunk_size: int, left_chunk: int) -> torch.Tensor:
        if chunk_size > 0:
            return super()._streaming_mask(seq_len, batch_size, chunk_size, left_chunk)  # type: ignore[misc, no-any-return]
        return torch.ones(batch_size, 1, seq_len, dtype=torch.bool)

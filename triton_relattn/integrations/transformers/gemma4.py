"""The audio encoder of Gemma 4."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.models.gemma4 import modeling_gemma4 as stock

from ...functional import fused_relative_attention
from ...positions import RelativePositions
from ..arguments import StockArguments
from .encoder import Encoder
from .heads import join_heads, query_key_value, split_heads
from .masks import PADDING


class Gemma4AudioAttention(StockArguments, stock.Gemma4AudioAttention):
    """softcap * tanh((q_i . k_j + q_i . R[j - i]) / softcap) in a window; R of projected sinusoids, zero beyond its ends.

    The stock path computes it in chunks of queries, each with the keys around it.
    """

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), position_embeddings (1, R, C), attention_mask bool (B, 1, 1, N), False of padding."""
        query, key, value = (each.float() for each in query_key_value(self, hidden_states))
        rel_key = split_heads(self.relative_k_proj(position_embeddings), self.head_dim)[0].to(query.dtype)
        first = -self.max_past_horizon
        if first > -1:
            raise ValueError("attention_context_left must be at least 2, or no frame sees itself; call disable(model)")
        out: Any = fused_relative_attention(
            query * (self.q_scale * functional.softplus(self.per_dim_scale)),
            key * self.k_scale,
            value,
            rel_key,
            positions=RelativePositions(first, first + rel_key.shape[1] - 1, outside="zero"),
            attn_mask=attention_mask,
            window_size=(self.max_past_horizon - 1, max(self.max_future_horizon - 1, 0)),
            scale=1.0,
            softcap=self.attention_logits_soft_cap,
        )
        return self.post(join_heads(out).to(hidden_states.dtype)), None


class Gemma4AudioModel(Encoder, stock.Gemma4AudioModel):
    """Encoder with a mask of padding only: the window is in its attention."""

    attention = Gemma4AudioAttention
    mask_function = PADDING

    def _convert_4d_mask_to_blocked_5d(self, mask_4d: torch.Tensor) -> torch.Tensor:
        return mask_4d


CLASSES = {
    stock.Gemma4AudioAttention: Gemma4AudioAttention,
    stock.Gemma4AudioModel: Gemma4AudioModel,
}

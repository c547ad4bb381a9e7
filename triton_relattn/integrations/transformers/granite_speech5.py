"""The encoder of Granite Speech 5."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.granite_speech5 import modeling_granite_speech5 as stock

from ..operators import fused_relative_attention
from .chunks import InChunks, from_blocks, in_blocks
from .granite_speech import blocks_of, rows_of
from .heads import join_heads, query_key_value


class GraniteSpeech5EncoderAttention(InChunks, stock.GraniteSpeech5EncoderAttention):
    """(q_i . k_j + q_i . E[j - i]), scaled, within blocks of frames; E shared by the heads. Padding is hidden in each block."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), position_embeddings (size, size), the row of each pair, attention_mask bool (B, N)."""
        batch, length, _ = hidden_states.shape
        if attention_mask is None:
            attention_mask = hidden_states.new_ones(batch, length, dtype=torch.bool)
        blocks, seen = in_blocks(hidden_states, self.context_size), in_blocks(attention_mask, self.context_size)
        query, key, value = query_key_value(self, blocks)
        out: Any = fused_relative_attention(
            query,
            key,
            value,
            self.rel_pos_emb(rows_of(position_embeddings)),
            attn_mask=seen[:, None, None, :],
            dropout_p=self.attention_dropout if self.training else 0.0,
            scale=self.scaling,
        )
        return self.o_proj(from_blocks(join_heads(out), batch, length)), None

    def are_weights(self, shape: torch.Size, pairs: tuple[int, int]) -> bool:
        return shape[-2:] == (self.context_size,) * 2

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        distances = blocks_of(self.context_size, self.config.max_position_embeddings)
        states = torch.randn(batch, length, self.config.hidden_size)
        return {"hidden_states": states, "position_embeddings": distances, "attention_mask": real}


CLASSES = {stock.GraniteSpeech5EncoderAttention: GraniteSpeech5EncoderAttention}

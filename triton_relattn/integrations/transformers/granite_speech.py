"""The speech encoder of Granite Speech, and the attention that its descendants share: Granite Speech Plus and 5."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.granite_speech import modeling_granite_speech as stock

from ..operators import fused_relative_attention
from .chunks import InChunks, from_blocks, in_blocks
from .heads import join_heads, split_heads


def rows_of(distances: torch.Tensor) -> torch.Tensor:
    """Return the rows of the embedding for all distances within a block, most distant past first.

    distances: (size, size), the row of each pair, which depends on its distance alone.
    """
    return torch.cat([distances[1:, 0].flip(0), distances[0]])


def blocks_of(size: int, last: int) -> torch.Tensor:
    """Return the row of the embedding for each pair of frames in a block, as the stock encoder makes it."""
    position = torch.arange(size)
    return (position[:, None] - position).clamp(-size, size) + last


class BlockAttention(InChunks):
    """Mixin: (q_i . k_j + q_i . E[j - i]), scaled, within blocks of frames; E shared by the heads."""

    def forward(self: Any, hidden_states: torch.Tensor, attention_dists: torch.Tensor) -> torch.Tensor:
        """hidden_states (B, N, C), attention_dists (size, size)."""
        hidden_states = self.pre_norm(hidden_states)
        batch, length, _ = hidden_states.shape
        blocks = in_blocks(hidden_states, self.context_size)
        key, value = self.to_kv(blocks).chunk(2, dim=-1)
        # The zeros that fill up the last block are hidden.
        lengths = torch.full((batch, len(blocks) // batch), self.context_size, device=blocks.device)
        lengths[:, -1] = length - (len(blocks) // batch - 1) * self.context_size
        out: Any = fused_relative_attention(
            split_heads(self.to_q(blocks), self.dim_head),
            split_heads(key, self.dim_head),
            split_heads(value, self.dim_head),
            self.rel_pos_emb(rows_of(attention_dists)),
            key_lengths=lengths.flatten(),
            scale=self.scale,
        )
        return self.dropout(self.to_out(from_blocks(join_heads(out), batch, length)))

    def example(self: Any, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        distances = blocks_of(self.context_size, self.max_pos_emb)
        return {"hidden_states": torch.randn(batch, length, self.to_q.in_features), "attention_dists": distances}


class GraniteSpeechConformerAttention(BlockAttention, stock.GraniteSpeechConformerAttention):
    pass


CLASSES = {stock.GraniteSpeechConformerAttention: GraniteSpeechConformerAttention}

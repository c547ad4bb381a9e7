"""The encoders of Granite Speech, Granite Speech Plus and Granite Speech 5."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from ..operators import fused_relative_attention, join_heads, split_heads
from .base import ChunkedAttention, query_key_value


def split_blocks(states: torch.Tensor, size: int) -> torch.Tensor:
    """Cut (B, N, ...) into (B * blocks, size, ...), with zeros after the end: each block is a batch entry."""
    missing = -states.shape[1] % size
    return pad(states, (*(0, 0) * (states.dim() - 2), 0, missing)).unflatten(1, (-1, size)).flatten(0, 1)


def join_blocks(states: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Join (B * blocks, size, ...) to (B, length, ...)."""
    return states.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length]


def embedding_rows(distances: torch.Tensor) -> torch.Tensor:
    """Return the rows of the embedding for all distances in a block, most distant past first; distances (size, size)."""
    return torch.cat([distances[1:, 0].flip(0), distances[0]])


def pair_rows(size: int, last: int) -> torch.Tensor:
    """Return the row of the embedding per pair of frames in a block, as the stock encoder does."""
    position = torch.arange(size)
    return (position[:, None] - position).clamp(-size, size) + last


class BlockAttention(ChunkedAttention):
    """(q_i . k_j + q_i . E[j - i]), scaled, in blocks of frames; E shared by the heads."""

    def forward(self, hidden_states: torch.Tensor, attention_dists: torch.Tensor) -> torch.Tensor:
        """hidden_states (B, N, C), attention_dists (size, size)."""
        hidden_states = self.pre_norm(hidden_states)
        batch, length, _ = hidden_states.shape
        blocks = split_blocks(hidden_states, self.context_size)
        key, value = self.to_kv(blocks).chunk(2, dim=-1)
        # The zeros that fill up the last block are hidden.
        lengths = torch.full((batch, len(blocks) // batch), self.context_size, device=blocks.device)
        lengths[:, -1] = length - (len(blocks) // batch - 1) * self.context_size
        out: Any = fused_relative_attention(
            split_heads(self.to_q(blocks), self.dim_head),
            split_heads(key, self.dim_head),
            split_heads(value, self.dim_head),
            self.rel_pos_emb(embedding_rows(attention_dists)),
            key_lengths=lengths.flatten(),
            scale=self.scale,
        )
        return self.dropout(self.to_out(join_blocks(join_heads(out), batch, length)))  # type: ignore[no-any-return]

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        distances = pair_rows(self.context_size, self.max_pos_emb)
        return {"hidden_states": torch.randn(batch, length, self.to_q.in_features), "attention_dists": distances}


class GraniteSpeech5Attention(ChunkedAttention):
    """The same, with padding hidden in each block."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), position_embeddings (size, size), the row of each pair, attention_mask bool (B, N)."""
        batch, length, _ = hidden_states.shape
        if attention_mask is None:
            attention_mask = hidden_states.new_ones(batch, length, dtype=torch.bool)
        blocks, real = split_blocks(hidden_states, self.context_size), split_blocks(attention_mask, self.context_size)
        out: Any = fused_relative_attention(
            *query_key_value(self, blocks),
            self.rel_pos_emb(embedding_rows(position_embeddings)),
            attn_mask=real[:, None, None, :],
            dropout_p=self.attention_dropout if self.training else 0.0,
            scale=self.scaling,
        )
        return self.o_proj(join_blocks(join_heads(out), batch, length)), None

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        distances = pair_rows(self.context_size, self.config.max_position_embeddings)
        return {**super().example(batch, length, None), "position_embeddings": distances, "attention_mask": real}

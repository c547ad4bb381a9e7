"""DeBERTa, the first version."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.deberta import modeling_deberta as stock

from .deberta_v2 import DisentangledAttention, DisentangledEncoder
from .heads import split_heads


class DisentangledSelfAttention(DisentangledAttention, stock.DisentangledSelfAttention):
    """One projection for query, key and value, biases of two of them, and no buckets."""

    @staticmethod
    def applies(module: Any) -> bool:
        """Return False also of talking heads, which mix the scores of all heads."""
        return DisentangledAttention.applies(module) and not module.talking_head

    def query_key_value(self, states: torch.Tensor, query_states: torch.Tensor | None) -> list[torch.Tensor]:
        """Return (B, H, N, D) each."""
        heads = split_heads(self.in_proj(states), 3 * self.attention_head_size)
        query, key, value = heads.chunk(3, dim=-1)
        query_bias, value_bias = (bias.view(-1, 1, self.attention_head_size) for bias in (self.q_bias, self.v_bias))
        return [query + query_bias, key, value + value_bias]

    def num_terms(self) -> int:
        return 1 + len(self.pos_att_type)

    def project_positions(self, kind: str, rows: torch.Tensor) -> torch.Tensor:
        """Return K ("c2p") or Q ("p2c") of embeddings."""
        return (self.pos_proj if kind == "c2p" else self.pos_q_proj)(rows)  # type: ignore[no-any-return]


class DebertaEncoder(DisentangledEncoder, stock.DebertaEncoder):
    pass

    @staticmethod
    def applies(module: Any) -> bool:
        return all(layer.attention.self.talking_head is False for layer in module.layer)


CLASSES = {
    stock.DisentangledSelfAttention: DisentangledSelfAttention,
    stock.DebertaEncoder: DebertaEncoder,
}

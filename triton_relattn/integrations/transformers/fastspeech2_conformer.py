"""The encoder and the decoder of FastSpeech2Conformer."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.fastspeech2_conformer import modeling_fastspeech2_conformer as stock

from ...functional import fused_relative_attention
from .heads import join_heads, refuse_weights, split_heads
from .transformer_xl import folded


class FastSpeech2ConformerAttention(stock.FastSpeech2ConformerAttention):
    """(q_i + u) . k_j + (q_i + v) . R[j - i], both scaled; R, a row per distance and head, projected sinusoids."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pos_emb: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), attention_mask (B, 1, N), pos_emb (1, 2N - 1, C)."""
        refuse_weights({"output_attentions": output_attentions})
        last = hidden_states.shape[1] - 1
        rel_key = split_heads(self.linear_pos(pos_emb), self.head_dim)[0]
        query = split_heads(self.linear_q(hidden_states), self.head_dim)
        query, term = folded(query, rel_key, self.pos_bias_u, self.pos_bias_v, (-last, last))
        out: Any = fused_relative_attention(
            query,
            split_heads(self.linear_k(hidden_states), self.head_dim),
            split_heads(self.linear_v(hidden_states), self.head_dim),
            attn_mask=None if attention_mask is None else attention_mask[:, None].ne(0),
            dropout_p=self.dropout.p if self.training else 0.0,
            **term,
        )
        return self.linear_out(join_heads(out)), None


CLASSES = {stock.FastSpeech2ConformerAttention: FastSpeech2ConformerAttention}

"""The encoder and the decoder of FastSpeech2Conformer."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.fastspeech2_conformer import modeling_fastspeech2_conformer as stock

from ...positions import RelativePositions
from ..operators import attend
from .heads import InPlace, drop_probability, join_heads, split_heads


class FastSpeech2ConformerAttention(InPlace, stock.FastSpeech2ConformerAttention):
    """(q_i + u) . k_j + (q_i + v) . R[j - i], both scaled; R, a row per distance and head, projected sinusoids."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pos_emb: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), attention_mask (B, 1, N), pos_emb (1, 2N - 1, C)."""
        last = hidden_states.shape[1] - 1
        out = attend(
            split_heads(self.linear_q(hidden_states), self.head_dim),
            split_heads(self.linear_k(hidden_states), self.head_dim),
            split_heads(self.linear_v(hidden_states), self.head_dim),
            split_heads(self.linear_pos(pos_emb), self.head_dim),
            self.pos_bias_u,
            self.pos_bias_v,
            RelativePositions(-last, last),
            attn_mask=None if attention_mask is None else attention_mask[:, None].ne(0),
            dropout_p=drop_probability(self.dropout),
        )
        return self.linear_out(join_heads(out)), None

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        width = self.linear_q.in_features
        given = {"hidden_states": torch.randn(batch, length, width), "pos_emb": torch.randn(1, 2 * length - 1, width)}
        return {**given, "attention_mask": None if real is None else real[:, None]}


CLASSES = {stock.FastSpeech2ConformerAttention: FastSpeech2ConformerAttention}

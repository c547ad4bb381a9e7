"""The encoder and the decoder of FastSpeech2Conformer."""

from __future__ import annotations

import torch
from transformers.models.fastspeech2_conformer import modeling_fastspeech2_conformer as stock

from ...positions import RelativePositions
from ..arguments import StockArguments
from ..transformer_xl import attend
from .heads import drop_probability, join_heads, refuse_weights, split_heads


class FastSpeech2ConformerAttention(StockArguments, stock.FastSpeech2ConformerAttention):
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


CLASSES = {stock.FastSpeech2ConformerAttention: FastSpeech2ConformerAttention}

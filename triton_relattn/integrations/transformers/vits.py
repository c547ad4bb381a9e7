"""The text encoder of VITS."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.vits import modeling_vits as stock

from ...functional import fused_relative_attention
from ...positions import RelativePositions
from ..arguments import StockArguments
from .encoder import Encoder
from .heads import added, join_heads, query_key_value, refuse_weights


class VitsAttention(StockArguments, stock.VitsAttention):
    """q_i . E[j - i], scaled as q_i . k_j, and values v_j + A[j - i]; both tables end at the window, zero beyond it."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C); key_value_states is ignored, as in the stock class."""
        refuse_weights({"output_attentions": output_attentions})
        term: dict[str, Any] = {}
        if self.window_size:
            term = {"rel_key": self.emb_rel_k[0], "rel_value": self.emb_rel_v[0]}
            term["positions"] = RelativePositions(-self.window_size, self.window_size, outside="zero")
        out: Any = fused_relative_attention(
            *query_key_value(self, hidden_states),
            attn_mask=added(attention_mask, hidden_states.dtype),
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scaling,
            **term,
        )
        return self.out_proj(join_heads(out)), None


class VitsEncoder(Encoder, stock.VitsEncoder):
    attention = VitsAttention


CLASSES = {stock.VitsAttention: VitsAttention, stock.VitsEncoder: VitsEncoder}

"""MPNet."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.mpnet import modeling_mpnet as stock

from ... import tables
from ...functional import fused_relative_attention
from ...positions import RelativePositions
from ..arguments import StockArguments
from .encoder import Encoder
from .heads import added, drop_probability, join_heads, refuse_weights, split_heads

BUCKETS, LAST = 32, 128
"""The model's own numbers, whatever its config says: all distances from LAST on share one bucket."""


class MPNetSelfAttention(StockArguments, stock.MPNetSelfAttention):
    """q_i . k_j, scaled, + b[bucket(j - i)], one table for all layers."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor]:
        """hidden_states (B, N, C), position_bias (H, R), where the stock encoder has (B, H, N, N)."""
        refuse_weights({"output_attentions": output_attentions})
        term: dict[str, Any] = {}
        if position_bias is not None:
            if position_bias.dim() != 2:
                shape = tuple(position_bias.shape)
                raise ValueError(f"position_bias must be (H, R), got {shape}: enable or disable the model as a whole")
            term = {"rel_bias": position_bias, "positions": RelativePositions(-LAST, LAST)}
        out: Any = fused_relative_attention(
            split_heads(self.q(hidden_states), self.attention_head_size),
            split_heads(self.k(hidden_states), self.attention_head_size),
            split_heads(self.v(hidden_states), self.attention_head_size),
            attn_mask=added(attention_mask, hidden_states.dtype),
            dropout_p=drop_probability(self.dropout),
            **term,
        )
        return (self.o(join_heads(out)),)


class MPNetEncoder(Encoder, stock.MPNetEncoder):
    attention = MPNetSelfAttention
    mask_function = None

    def compute_position_bias(self, x: torch.Tensor, position_ids: Any = None, num_buckets: int = BUCKETS) -> torch.Tensor:
        """Return (H, R)."""
        distances = torch.arange(-LAST, LAST + 1, device=x.device)
        bias: torch.Tensor = self.relative_attention_bias(tables.t5_buckets(distances, num_buckets, LAST))
        return bias.T


class MPNetModel(Encoder, stock.MPNetModel):
    attention = MPNetSelfAttention


CLASSES = {
    stock.MPNetSelfAttention: MPNetSelfAttention,
    stock.MPNetEncoder: MPNetEncoder,
    stock.MPNetModel: MPNetModel,
}

"""LongT5 with local attention; where its encoder has transient-global attention, its decoder."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.longt5 import modeling_longt5 as stock

from ... import tables
from ...functional import fused_relative_attention
from ...positions import RelativePositions
from ..arguments import StockArguments
from .encoder import Encoder
from .heads import join_heads, refuse_weights, split_heads
from .t5 import BucketedAttention


class LongT5Attention(BucketedAttention, stock.LongT5Attention):
    """Attention of the decoder."""


class LongT5LocalAttention(StockArguments, stock.LongT5LocalAttention):
    """q_i . k_j + b[bucket(j - i)], not scaled, in a window; the first layer makes b and passes it on.

    The stock path computes it in blocks of queries, each with the blocks around it.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (B, N, C), position_bias (H, R), mask bool (B, 1, blocks, size, 3 * size)."""
        refuse_weights({"output_attentions": output_attentions})
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self._table(hidden_states.device)
        elif position_bias is not None and position_bias.dim() != 2:
            shape = tuple(position_bias.shape)
            raise ValueError(f"position_bias must be (H, R), got {shape}: enable or disable the model as a whole")
        query, key, value = (
            split_heads(projection(hidden_states), self.key_value_proj_dim) for projection in (self.q, self.k, self.v)
        )
        term: dict[str, Any] = {}
        if position_bias is not None:
            term = {"rel_bias": position_bias, "positions": RelativePositions(-self.local_radius, self.local_radius)}
        seen = None
        if mask is not None:  # a frame that is not padding sees itself
            seen = mask[:, 0].diagonal(self.block_len, dim1=-2, dim2=-1).flatten(1)[:, : hidden_states.shape[1]]
        out: Any = fused_relative_attention(
            query,
            key,
            value,
            attn_mask=None if seen is None else seen[:, None, None, :],
            window_size=(self.local_radius, self.local_radius),
            scale=1.0,
            dropout_p=self.dropout if self.training else 0.0,
            **term,
        )
        return self.o(join_heads(out)), position_bias

    def _table(self, device: torch.device) -> torch.Tensor:
        """Return the biases (H, R), a row for each distance in the window."""
        distances = torch.arange(-self.local_radius, self.local_radius + 1, device=device)
        buckets = tables.t5_buckets(distances, self.relative_attention_num_buckets, self.relative_attention_max_distance)
        return self.relative_attention_bias(buckets).T


class LongT5Stack(Encoder, stock.LongT5Stack):
    attention = LongT5Attention, LongT5LocalAttention


CLASSES = {
    stock.LongT5Attention: LongT5Attention,
    stock.LongT5LocalAttention: LongT5LocalAttention,
    stock.LongT5Stack: LongT5Stack,
}

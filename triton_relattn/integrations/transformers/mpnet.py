"""MPNet."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.mpnet import modeling_mpnet as stock

from ... import tables
from ...positions import RelativePositions
from ..calls import is_graph
from ..compact import Compact, rows
from ..operators import fused_relative_attention
from .encoder import Encoder
from .heads import InPlace, added, drop_probability, join_heads, split_heads

BUCKETS, LAST = 32, 128
"""The model's own numbers, whatever its config says: all distances from LAST on share one bucket."""


class MPNetSelfAttention(InPlace, stock.MPNetSelfAttention):
    """q_i . k_j, scaled, + b[bucket(j - i)], one table for all layers."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor]:
        """hidden_states (B, N, C), position_bias (H, R), where the stock encoder has (B, H, N, N)."""
        term: dict[str, Any] = {}
        if position_bias is not None:
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

    @property
    def longest(self) -> int:
        return LAST + 10

    small = ("position_bias",)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        states, table = torch.randn(batch, length, self.q.in_features), torch.randn(self.num_attention_heads, 2 * LAST + 1)
        mask = None if real is None else torch.zeros(real.shape).masked_fill(~real, torch.finfo(torch.float32).min)[:, None, None]
        return {"hidden_states": states, "attention_mask": mask, "position_bias": passed_on(table, states)}


def passed_on(table: torch.Tensor, states: torch.Tensor) -> Any:
    """Return the biases (H, R) for the layers, of which the stock encoder makes (B, H, N, N)."""
    batch, length = states.shape[:2]
    return Compact.of(table, lambda small: rows(small, RelativePositions(-LAST, LAST), length, length).expand(batch, -1, -1, -1))


class MPNetEncoder(Encoder, stock.MPNetEncoder):
    mask_function = None

    def compute_position_bias(self, x: torch.Tensor, position_ids: Any = None, num_buckets: int = BUCKETS) -> Any:
        """Return (H, R)."""
        if is_graph() or position_ids is not None:
            return super().compute_position_bias(x, position_ids, num_buckets)
        distances = torch.arange(-LAST, LAST + 1, device=x.device)
        bias: torch.Tensor = self.relative_attention_bias(tables.t5_buckets(distances, num_buckets, LAST))
        return passed_on(bias.T, x)


class MPNetModel(Encoder, stock.MPNetModel):
    pass


CLASSES = {
    stock.MPNetSelfAttention: MPNetSelfAttention,
    stock.MPNetEncoder: MPNetEncoder,
    stock.MPNetModel: MPNetModel,
}

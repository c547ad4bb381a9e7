"""MPNet."""

from __future__ import annotations

from typing import Any

import torch

from ... import tables
from ...positions import RelativePositions
from ..calls import is_graph
from ..compact import Compact, rows
from ..operators import drop_probability, fused_relative_attention, join_heads, split_heads
from .attention import Attention, additive_mask
from .encoder import Encoder

BUCKETS, LAST = 32, 128
"""The model's own numbers, whatever its config says: all distances from LAST on share one bucket."""
POSITIONS = RelativePositions(-LAST, LAST)


class MPNetSelfAttention(Attention):
    """q_i . k_j, scaled, + b[bucket(j - i)], one table for all layers."""

    small = ("position_bias",)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor]:
        """hidden_states (B, N, C), position_bias (H, R), where the stock encoder has (B, H, N, N)."""
        out: Any = fused_relative_attention(
            *(split_heads(project(hidden_states), self.attention_head_size) for project in (self.q, self.k, self.v)),
            rel_bias=position_bias,
            positions=None if position_bias is None else POSITIONS,
            attn_mask=additive_mask(attention_mask, hidden_states.dtype),
            dropout_p=drop_probability(self.dropout),
        )
        return (self.o(join_heads(out)),)

    @property
    def longest(self) -> int:
        return LAST + 10

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        states, table = torch.randn(batch, length, self.q.in_features), torch.randn(self.num_attention_heads, POSITIONS.num_rows)
        mask = None if real is None else torch.zeros(real.shape).masked_fill(~real, torch.finfo(torch.float32).min)[:, None, None]
        return {"hidden_states": states, "attention_mask": mask, "position_bias": small_bias(table, states)}


def small_bias(table: torch.Tensor, states: torch.Tensor) -> Any:
    """Return the biases (H, R) for the layers, of which the stock encoder makes (B, H, N, N)."""
    batch, length = states.shape[:2]
    return Compact.of(table, lambda small: rows(small, POSITIONS, length, length).expand(batch, -1, -1, -1))


class MPNetEncoder(Encoder):
    mask_function = None

    def compute_position_bias(self, x: torch.Tensor, position_ids: Any = None, num_buckets: int = BUCKETS) -> Any:
        """Return (H, R)."""
        if is_graph() or position_ids is not None:
            return super().compute_position_bias(x, position_ids, num_buckets)  # type: ignore[misc]
        distances = torch.arange(-LAST, LAST + 1, device=x.device)
        bias: torch.Tensor = self.relative_attention_bias(tables.t5_buckets(distances, num_buckets, LAST))
        return small_bias(bias.T, x)

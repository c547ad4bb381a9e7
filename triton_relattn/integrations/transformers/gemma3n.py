"""The audio encoder of Gemma 3n."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.models.gemma3n import modeling_gemma3n as stock

from ...positions import RelativePositions
from ..operators import fused_relative_attention
from .chunks import InChunks
from .heads import query_key_value, split_heads


class Gemma3nAudioAttention(InChunks, stock.Gemma3nAudioAttention):
    """softcap * tanh((q_i . k_j + q_i . R[j - i]) / softcap) in a window; R, a row per distance and head, projected sinusoids.

    The stock path computes it in chunks of queries, each with the keys around it.
    """

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """hidden_states (B, N, C), mask bool (B, N), True of padding; returns (B, N, H, D)."""
        query, key, value = query_key_value(self, hidden_states)
        out: Any = fused_relative_attention(
            query * self.q_scale * functional.softplus(self.per_dim_scale),
            key,
            value,
            self._table(query),
            positions=RelativePositions(-self.max_past_horizon, self.max_future_horizon),
            attn_mask=~mask[:, None, None, :],
            window_size=(self.max_past_horizon, self.max_future_horizon),
            scale=1.0,
            softcap=self.attention_logits_soft_cap,
        )
        return out.transpose(1, 2)

    @staticmethod
    def counted(mask: torch.Tensor) -> torch.Tensor | None:
        return ~mask[..., None, None]

    def prepare(self) -> None:
        super().prepare()
        self.softcap.fill_(self.attention_logits_soft_cap)  # a buffer that is the setting

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        mask = torch.zeros(batch, length).bool() if real is None else ~real
        return {"hidden_states": torch.randn(batch, length, self.hidden_size), "mask": mask}

    def _table(self, query: torch.Tensor) -> torch.Tensor:
        """Return rel_key, (H, R, D)."""
        positions = self.relative_position_embedding
        distances = torch.arange(self.max_past_horizon, -self.max_future_horizon - 1, -1, device=query.device)
        sinusoids = positions._get_timing_signal_1d_pos(distances[None], dtype=query.dtype)
        return split_heads(positions.pos_proj(sinusoids), self.head_dim)[0]


CLASSES = {stock.Gemma3nAudioAttention: Gemma3nAudioAttention}

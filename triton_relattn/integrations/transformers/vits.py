"""The text encoder of VITS."""

from __future__ import annotations

from typing import Any

import torch

from ...positions import RelativePositions
from ..operators import fused_relative_attention, join_heads
from . import masks
from .attention import Attention, additive_mask, query_key_value


class VitsAttention(Attention):
    """q_i . E[j - i], scaled as q_i . k_j, and values v_j + A[j - i]; both tables end at the window, zero beyond it."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C)."""
        term: dict[str, Any] = {}
        if self.window_size:
            term = {"rel_key": self.emb_rel_k[0], "rel_value": self.emb_rel_v[0]}
            term["positions"] = RelativePositions(-self.window_size, self.window_size, outside="zero")
        out: Any = fused_relative_attention(
            *query_key_value(self, hidden_states),
            attn_mask=additive_mask(attention_mask, hidden_states.dtype),
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scaling,
            **term,
        )
        return self.out_proj(join_heads(out)), None

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        mask = masks.example(None, batch, length, real)
        return {"hidden_states": torch.randn(batch, length, self.embed_dim), "attention_mask": mask}

"""Vision encoders that descend from SAM's and ViTDet's: attention on a grid of tokens."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..operators import decomposed_relative_attention, join_heads
from .attention import Attention


class GridAttention(Attention):
    """scale * q_i . k_j + q_i . R_h[y_i - y_j] + q_i . R_w[x_i - x_j], in windows or on the whole grid.

    Tokens that pad a window are keys as all others.
    """

    def attend(self, states: torch.Tensor, num_heads: int, dropout_p: float = 0.0) -> torch.Tensor:
        """Return the attention of states (B, height, width, C), of the same shape."""
        batch, height, width, _ = states.shape
        qkv = self.qkv(states).view(batch, height * width, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        out = decomposed_relative_attention(
            query, key, value, self.rel_pos_h, self.rel_pos_w, (height, width), dropout_p=dropout_p, scale=self.scale
        )
        result: torch.Tensor = self.proj(join_heads(out).view(batch, height, width, -1))
        return result

    states_name = "hidden_states"

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        height = max(1, math.isqrt(length) - 1)
        return {self.states_name: torch.randn(batch, height, -(-length // height), self.qkv.in_features)}


class SamAttention(GridAttention):
    """SAM's, and of models with a copy of its encoder."""

    drops = True

    @staticmethod
    def applies(module: Any) -> bool:
        return bool(module.use_rel_pos)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """hidden_states (B, height, width, C)."""
        dropout_p = self.dropout if self.training and self.drops else 0.0
        return self.attend(hidden_states, self.num_attention_heads, dropout_p), None


class SamSdpaAttention(SamAttention):
    """The stock class for sdpa, which has no dropout."""

    drops = False


class SegGptAttention(GridAttention):
    """SegGPT's, on prompt and image as one grid."""

    @staticmethod
    def applies(module: Any) -> bool:
        return bool(module.use_relative_position_embeddings)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """hidden_states (B, height, width, C)."""
        return self.attend(hidden_states, self.num_attention_heads), None


class VitDetAttention(GridAttention):
    """ViTDet's, also in ViTMatte."""

    states_name = "hidden_state"
    applies = SegGptAttention.applies

    def forward(self, hidden_state: torch.Tensor) -> tuple[torch.Tensor]:
        """hidden_state (B, height, width, C)."""
        return (self.attend(hidden_state, self.num_heads),)

"""Common part of the vision encoders that descend from SAM's and ViTDet's: attention on a grid of tokens."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..operators import decomposed_relative_attention
from .heads import InPlace, join_heads


def attend(module: Any, states: torch.Tensor, num_heads: int, dropout_p: float = 0.0) -> torch.Tensor:
    """Attention of a module with tables ``rel_pos_h`` and ``rel_pos_w``, of states (B, height, width, C), and as many of them."""
    batch, height, width, _ = states.shape
    qkv = module.qkv(states).view(batch, height * width, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = qkv.unbind(0)
    grid, tables = (height, width), (module.rel_pos_h, module.rel_pos_w)
    out = decomposed_relative_attention(query, key, value, *tables, grid, dropout_p=dropout_p, scale=module.scale)
    result: torch.Tensor = module.proj(join_heads(out).view(batch, height, width, -1))
    return result


def grid_of(length: int) -> tuple[int, int]:
    """Return the height and width of a grid of about length tokens."""
    height = max(1, math.isqrt(length) - 1)
    return height, -(-length // height)


class SamAttention(InPlace):
    """Mixin: scale * q_i . k_j + q_i . R_h[y_i - y_j] + q_i . R_w[x_i - x_j], in windows or on the whole grid, as SAM has it.

    Tokens that pad a window are keys as all others.
    """

    drops = True
    """Whether the stock class has dropout: its variant for sdpa has not."""

    @staticmethod
    def applies(module: Any) -> bool:
        """Whether the module has tables."""
        return bool(module.use_rel_pos)

    def forward(
        self: Any, hidden_states: torch.Tensor, output_attentions: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (B, height, width, C)."""
        dropout_p = self.dropout if self.training and self.drops else 0.0
        return attend(self, hidden_states, self.num_attention_heads, dropout_p), None

    def example(self: Any, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        return {"hidden_states": torch.randn(batch, *grid_of(length), self.qkv.in_features)}

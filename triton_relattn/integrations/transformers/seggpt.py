"""SegGPT."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.seggpt import modeling_seggpt as stock

from .grid_attention import attend, grid_of
from .heads import InPlace


class SegGptAttention(InPlace, stock.SegGptAttention):
    """scale * q_i . k_j + q_i . R_h[y_i - y_j] + q_i . R_w[x_i - x_j], on prompt and image as one grid."""

    @staticmethod
    def applies(module: Any) -> bool:
        """Whether the module has tables."""
        return bool(module.use_relative_position_embeddings)

    def forward(self, hidden_states: torch.Tensor, output_attentions: bool = False) -> tuple[torch.Tensor, None]:
        """hidden_states (B, height, width, C)."""
        return attend(self, hidden_states, self.num_attention_heads), None

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        return {"hidden_states": torch.randn(batch, *grid_of(length), self.qkv.in_features)}


CLASSES = {stock.SegGptAttention: SegGptAttention}

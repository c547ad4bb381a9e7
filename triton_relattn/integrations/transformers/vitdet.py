"""ViTDet, also the backbone of ViTMatte."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.vitdet import modeling_vitdet as stock

from .grid_attention import attend, grid_of
from .heads import InPlace


class VitDetAttention(InPlace, stock.VitDetAttention):
    """scale * q_i . k_j + q_i . R_h[y_i - y_j] + q_i . R_w[x_i - x_j], in windows or on the whole grid."""

    @staticmethod
    def applies(module: Any) -> bool:
        """Whether the module has tables."""
        return bool(module.use_relative_position_embeddings)

    def forward(self, hidden_state: torch.Tensor, output_attentions: bool = False) -> tuple[torch.Tensor]:
        """hidden_state (B, height, width, C)."""
        return (attend(self, hidden_state, self.num_heads),)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        return {"hidden_state": torch.randn(batch, *grid_of(length), self.qkv.in_features)}


CLASSES = {stock.VitDetAttention: VitDetAttention}

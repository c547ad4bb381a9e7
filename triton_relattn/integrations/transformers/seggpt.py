"""SegGPT."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.seggpt import modeling_seggpt as stock

from ..arguments import StockArguments
from .grid_attention import attend
from .heads import refuse_weights


class SegGptAttention(StockArguments, stock.SegGptAttention):
    """scale * q_i . k_j + q_i . R_h[y_i - y_j] + q_i . R_w[x_i - x_j], on prompt and image as one grid."""

    @staticmethod
    def applies(module: Any) -> bool:
        """Whether the module has tables."""
        return bool(module.use_relative_position_embeddings)

    def forward(self, hidden_states: torch.Tensor, output_attentions: bool = False) -> tuple[torch.Tensor, None]:
        """hidden_states (B, height, width, C)."""
        refuse_weights({"output_attentions": output_attentions})
        return attend(self, hidden_states, self.num_attention_heads), None


CLASSES = {stock.SegGptAttention: SegGptAttention}

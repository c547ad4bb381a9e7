"""SEW-D, whose transformer is DeBERTa v2's."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.sew_d import modeling_sew_d as stock

from .deberta_v2 import DisentangledAttention, DisentangledEncoder


class DisentangledSelfAttention(DisentangledAttention, stock.DisentangledSelfAttention):
    def without_dropout(self) -> None:
        self.dropout.drop_prob = self.pos_dropout.drop_prob = 0.0

    def dropout_p(self) -> float:
        """Return that of a dropout of its own kind."""
        return self.dropout.drop_prob if self.dropout.training else 0.0

    def of_padding(self, out: torch.Tensor, *_: Any) -> torch.Tensor:
        """Return out: queries that are padding attend as others do."""
        return out


class SEWDTransformerEncoder(DisentangledEncoder, stock.SEWDTransformerEncoder):
    pass


CLASSES = {
    stock.DisentangledSelfAttention: DisentangledSelfAttention,
    stock.SEWDTransformerEncoder: SEWDTransformerEncoder,
}

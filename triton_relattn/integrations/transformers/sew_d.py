"""SEW-D, whose transformer is DeBERTa v2's."""

from __future__ import annotations

import inspect
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

    def of_padding(self, out: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return out: queries that are padding attend as others do; in older versions they get zeros."""
        return out * attention_mask.mT.bool() if IS_OLD and attention_mask.shape[2] == 1 else out

    def passed_on(self, result: Any, given: dict[str, Any]) -> Any:
        return result[0] if IS_OLD else result


IS_OLD = "output_attentions" in inspect.signature(stock.DisentangledSelfAttention.forward).parameters
"""Before transformers 5.20: the mask also hides padding as query, and without attention weights a tensor is returned."""


class SEWDTransformerEncoder(DisentangledEncoder, stock.SEWDTransformerEncoder):
    pass


CLASSES = {
    stock.DisentangledSelfAttention: DisentangledSelfAttention,
    stock.SEWDTransformerEncoder: SEWDTransformerEncoder,
}

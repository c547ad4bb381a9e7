"""Transformer-XL's attention in fairseq2."""

from __future__ import annotations

from typing import Any

import torch
from fairseq2.models.transformer.sdpa import relative as stock

from ...positions import RelativePositions
from ..heads import split_heads
from ..transformer_xl import folded
from .sdpa import RelativeSDPA


class RelativePositionSDPA(RelativeSDPA, stock.RelativePositionSDPA):
    """(q_i + u) . k_j + (q_i + v) . R[j - i], both scaled; R, a row per distance and head, projected sinusoids."""

    def term(self, query: torch.Tensor, length: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """R for sequences of that length, or shorter ones; of its rows the first is of the most distant past."""
        rows = self.r_proj(self.pos_encoding(query.new_empty(length, 0)))
        rel_key = split_heads(rows[None], query.shape[-1])[0]
        return folded(query, rel_key, self.u_bias, self.v_bias, RelativePositions(1 - length, length - 1))


CLASSES = {stock.RelativePositionSDPA: RelativePositionSDPA}

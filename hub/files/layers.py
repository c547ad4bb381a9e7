"""Layers whose forward takes the place of another layer's."""

from __future__ import annotations

import torch
from torch import nn

from .integrations.espnet.attention import attend
from .integrations.operators import join_heads

__all__ = ["RelPositionMultiHeadedAttention"]


class RelPositionMultiHeadedAttention(nn.Module):
    """(q_i + u) . k_j + (q_i + v) . R[j - i], both scaled: the layer of this name in ESPnet."""

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pos_emb: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query (B, Nq, C), key and value (B, Nk, C), pos_emb (1, 2Nk - 1, C), mask (B, 1 or Nq, Nk), 0 of what is hidden."""
        query, key, value = self.forward_qkv(query, key, value)
        out: torch.Tensor = self.linear_out(join_heads(attend(self, query, key, value, pos_emb, mask)))
        return out

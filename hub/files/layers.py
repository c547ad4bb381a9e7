"""Layers whose forward takes the place of another layer's."""

from __future__ import annotations

import torch
from torch import nn

from .integrations.operators import join_heads, module_attention
from .positions import RelativePositions

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
        # Row 0 is of the most distant past. With zero_triu keys in the future have no term of positions.
        first, last = 1 - query.shape[2], pos_emb.shape[1] - query.shape[2]
        positions = RelativePositions(first, last, "error")
        if getattr(self, "zero_triu", False):
            last = key.shape[2] - query.shape[2]
            positions = RelativePositions(first, last, "zero")
        attend = module_attention(self, pos_emb[:, : last - first + 1], positions)
        visible = None if mask is None else mask[:, None].ne(0)
        out: torch.Tensor = self.linear_out(join_heads(attend(query, key, value, attn_mask=visible)))
        return out

"""Attention of ESPnet with relative positions, whose copies in other packages differ in their masks and caches alone."""

from __future__ import annotations

from typing import Any

import torch

from ...positions import RelativePositions
from ..in_place import InPlace
from ..operators import join_heads, module_attention


class RelPositionAttention(InPlace):
    """Mixin: (q_i + u) . k_j + (q_i + v) . R[j - i], both scaled; R, a row per distance and head, projected sinusoids.

    With zero_triu keys in the future have q_i + u . k_j alone.
    """

    is_legacy = False

    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pos_emb: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """query (B, Nq, C), key and value (B, Nk, C), pos_emb (1, 2Nk - 1, C), mask (B, 1 or Nq, Nk), 0 of what is hidden."""
        self.attn = None
        query, key, value = self.forward_qkv(query, key, value)
        out: torch.Tensor = self.linear_out(join_heads(attend(self, query, key, value, pos_emb, mask)))
        return out

    def example(self: Any, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        states = torch.randn(batch, length, self.linear_q.in_features)
        rows = torch.randn(1, length if self.is_legacy else 2 * length - 1, self.linear_pos.in_features)
        mask = None if real is None else real[:, None]
        return {"query": states, "key": states, "value": states, "pos_emb": rows, "mask": mask}


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pos_emb: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention of states (B, H, N, D); pos_emb (1, R, C), mask (B, 1 or Nq, Nk), 0 of what is hidden."""
    # Row 0 is of the most distant past: stock attention shifts query i's row for key j to j - i + Nq - 1.
    first, last = 1 - query.shape[2], pos_emb.shape[1] - query.shape[2]
    positions = RelativePositions(first, last, "error")
    if getattr(module, "zero_triu", False):
        last = key.shape[2] - query.shape[2]
        positions = RelativePositions(first, last, "zero")
    operator = module_attention(module, pos_emb[:, : last - first + 1], positions)
    return operator(query, key, value, attn_mask=None if mask is None else mask[:, None].ne(0))

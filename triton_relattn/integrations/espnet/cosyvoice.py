"""CosyVoice's copy of ESPnet's attention, with a cache."""

from __future__ import annotations

from typing import Any

import torch
from cosyvoice.transformer import attention as stock

from ..operators import join_heads
from .attention import RelPositionAttention, attend

NO_MASK, NO_POSITIONS, NO_CACHE = torch.ones(0, 0, 0, dtype=torch.bool), torch.empty(0), torch.zeros(0, 0, 0, 0)


class RelPositionMultiHeadedAttention(RelPositionAttention, stock.RelPositionMultiHeadedAttention):
    def forward(  # type: ignore[override]
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor = NO_MASK,
        pos_emb: torch.Tensor = NO_POSITIONS,
        cache: torch.Tensor = NO_CACHE,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query (B, Nq, C), key and value (B, Nk, C), mask (B, 1 or Nq, Nk), 0 of what is hidden; without keys: there is none.

        pos_emb (1, 2Nk - 1, C). cache (1, H, Nc, 2D) of keys and values, which Nk includes.
        """
        q, k, v = self.forward_qkv(query, key, value)
        if len(cache) > 0:
            key_cache, value_cache = cache.chunk(2, dim=-1)
            k, v = torch.cat((key_cache, k), 2), torch.cat((value_cache, v), 2)
        visible = mask[:, :, : k.shape[2]] if mask.shape[2] > 0 else None
        out = self.linear_out(join_heads(attend(self, q, k, v, pos_emb, visible)))
        return out, torch.cat((k, v), -1)

    def serves(self, key: torch.Tensor, pos_emb: torch.Tensor, cache: torch.Tensor = NO_CACHE) -> bool:  # type: ignore[override]
        """Return whether ours computes a call: Nk rows are of positions instead of distances."""
        return not pos_emb.shape[1] == key.shape[1] + cache.shape[2] > 1

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        given = super().example(batch, length, real)
        return given if real is not None else {name: value for name, value in given.items() if name != "mask"}

"""WeNet's class of Shaw's term: distances clipped at different ends to the left and the right, and a cache of keys and values.

Source: Shaw et al., "Self-Attention with Relative Position Representations", 2018.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...positions import RelativePositions
from ..operators import fused_relative_attention, join_heads
from ..shadow import projections
from .kind import ADDED, SHOWN, Kind, Reading
from .roles import CACHE, MASK, POSITIONS, is_readable, is_table


class LeftAndRight(Kind):
    """(q_i . k_j + q_i . E[clamp(j - i, -l, r)]) / sqrt(D) in a class with WeNet's methods, which has a cache of keys and values.

    With ``use_sdpa`` the mask is added before the scale: (B, 1 or N, N).
    """

    title = "an embedding of clipped distances (WeNet)"
    state_roles = ("query", "key", "value")
    meanings = (SHOWN, ADDED)
    mask_dims = 3

    @classmethod
    def read(cls, module: nn.Module) -> Reading | None:
        table, sizes = getattr(module, "rel_k_embed", None), projections(module)
        if table is None or not is_table(table) or not {"linear_q", "linear_out"} <= set(sizes):
            return None
        if not all(hasattr(module, name) for name in ("max_left_rel_pos", "forward_qkv", "_update_kv_and_cache")):
            return None
        return {"query": "linear_q", "out": "linear_out", "rel_key": "rel_k_embed"}, {"width": (table.embedding_dim,)}

    @classmethod
    def arguments(cls, forward: Any) -> Iterator[dict[str, str]]:
        roles = {"query": "query", "key": "key", "value": "value", "mask": MASK, "pos_emb": POSITIONS, "cache": CACHE}
        if roles.keys() == inspect.signature(forward).parameters.keys() - {"self"}:
            yield roles

    def sizes(self, module: Any) -> Iterable[tuple[int, int]]:
        return (2, 11), (1, 5), (1, min(module.max_left_rel_pos, 500) + 23)

    def masks(self, batch: int, length: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, mask in super().masks(batch, length):
            yield name, self.stock_mask(torch.ones(batch, 1, length).bool()) if mask is None else mask

    def stock_mask(self, visible: torch.Tensor) -> torch.Tensor:
        return super().stock_mask(visible).view(visible.shape)

    def accepts(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        positions: Any = None,
        cache: Any = None,
    ) -> bool:
        """Return whether a call has such a mask, and a table whose rows may be read. positions are not read."""
        has_mask = mask is not None and mask.numel() > 0
        return is_readable(module.rel_k_embed) and query.dim() == 3 and (not has_mask or mask.dim() == 3)  # type: ignore[union-attr]

    def compute(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: Any = None,
    ) -> Any:
        cache = inspect.signature(self.stock.forward).parameters["cache"].default if cache is None else cache
        q, k, v = module.forward_qkv(query, key, value)
        k, v, cache = module._update_kv_and_cache(k, v, cache)
        visible = self.attn_mask(mask)
        if visible is not None and self.options[MASK] == ADDED:
            visible = visible * q.shape[-1] ** -0.5
        out = fused_relative_attention(
            q,
            k,
            v,
            module.rel_k_embed.weight.to(q.dtype),
            positions=RelativePositions(-module.max_left_rel_pos, module.max_right_rel_pos),
            query_offset=k.shape[2] - q.shape[2],
            attn_mask=visible,
            dropout_p=self.dropout_p(module),
        )
        return self.output(module, join_heads(out)), cache

    def dropout_p(self, module: Any) -> float:
        if getattr(module, "use_sdpa", False):  # torch's function gets the probability
            return module.dropout_rate if module.training else 0.0  # type: ignore[no-any-return]
        return super().dropout_p(module)

"""A row of an embedding per clipped distance, gathered as (N, N, D): Shaw's term in lucidrains' conformer and its like, and in
WeNet's class.

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
from .roles import CACHE, MASK, POSITIONS, assigned, is_table, own_parameters, table_weight


class ClippedDistances(Kind):
    """(q_i . k_j + q_i . E[clamp(j - i, -m, m)]) / sqrt(D); E, an embedding of 2m + 1 rows, in either order, shared by
    the heads.
    """

    title = "an embedding of clipped distances (Shaw et al.)"

    @classmethod
    def read(cls, module: nn.Module) -> Reading | None:
        tables: dict[str, Any] = {name: child.weight for name, child in module.named_children() if is_table(child)}
        tables |= own_parameters(module)
        sizes = projections(module)
        if len(tables) != 1 or len(next(iter(tables.values())).shape) != 2:
            return None
        (table,) = tables
        rows, width = tables[table].shape
        joint = [name for name, (_, given) in sizes.items() if any(given == 2 * other for _, other in sizes.values())]
        if len(sizes) == 3 and len(joint) == 1:
            rest = assigned([name for name in sizes if name != joint[0]], ("out", "query"))
            roles = {**(rest or {}), "key_value": joint[0]}
        else:
            roles = assigned(list(sizes), ("out", "query", "key", "value")) or {}
        if "query" not in roles or rows % 2 == 0 or rows < 3 or sizes[roles["query"]][1] % width:
            return None
        return {**roles, "rel_key": table}, {"flipped": (True, False), "width": (width,)}

    def sizes(self, module: Any) -> Iterable[tuple[int, int]]:
        clipped = len(table_weight(self.part(module, "rel_key"))) // 2
        longest = [(2, clipped + 7), (1, 130)] if clipped < 256 else [(2, 61), (1, 130), (1, clipped + 9)]
        return (2, 11), (1, 5), *longest

    def accepts(self, module: Any, states: torch.Tensor, mask: torch.Tensor | None = None) -> bool:
        table = self.part(module, "rel_key")
        if isinstance(table, nn.Embedding) and (table._forward_hooks or table._forward_pre_hooks or not is_table(table)):
            return False  # its rows are read, it is not called
        return states.dim() == 3 and (mask is None or mask.shape == states.shape[:2])

    def counted(self, mask: torch.Tensor) -> torch.Tensor:
        """Positions that are no padding: stock classes may hide all keys from the others."""
        visible: Any = self.attn_mask(mask)
        return visible[:, 0, 0, :, None]  # type: ignore[no-any-return]

    def compute(self, module: Any, states: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if "key_value" in self.roles:
            q, key_value = self.project(module, query=states, key_value=states)
            k, v = key_value.chunk(2, dim=1)
        else:
            q, k, v = self.project(module, query=states, key=states, value=states)
        rel_key = table_weight(self.part(module, "rel_key")).to(q.dtype)
        rel_key = rel_key.flip(0) if self.options["flipped"] else rel_key
        last = len(rel_key) // 2
        positions = RelativePositions(-last, last)
        dropout_p = self.dropout_p(module)
        out = fused_relative_attention(q, k, v, rel_key, positions=positions, attn_mask=self.attn_mask(mask), dropout_p=dropout_p)
        return self.output(module, join_heads(out))


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
        """Return whether a call has such a mask, and a table whose rows are read without calling it. positions are not read."""
        table = module.rel_k_embed
        is_plain = is_table(table) and not (table._forward_hooks or table._forward_pre_hooks)
        return is_plain and query.dim() == 3 and (mask is None or mask.numel() == 0 or mask.dim() == 3)

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

"""A row of an embedding per clipped distance, gathered as (N, N, D): Shaw's term in lucidrains' conformer and its like.

Source: Shaw et al., "Self-Attention with Relative Position Representations", 2018.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...positions import RelativePositions
from ..operators import fused_relative_attention, join_heads
from ..shadow import projections
from .kind import Kind, Reading
from .roles import assigned, is_readable, is_table, own_parameters, table_weight


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
        return (
            is_readable(self.part(module, "rel_key")) and states.dim() == 3 and (mask is None or mask.shape == states.shape[:2])
        )

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

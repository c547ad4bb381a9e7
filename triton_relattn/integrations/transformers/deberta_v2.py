"""DeBERTa v2 and v3, mDeBERTa, and the attention of its relatives: DeBERTa, SEW-D."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.models.deberta_v2 import modeling_deberta_v2 as stock

from ... import tables
from ...positions import RelativePositions
from ..calls import is_graph
from ..compact import Compact, is_small
from ..operators import fused_relative_attention
from .encoder import Encoder
from .heads import InPlace, drop_probability, join_heads, split_heads


class DisentangledAttention(InPlace):
    """Mixin: q_i . k_j + q_i . K[s(i - j)] + k_j . Q[s(i - j)], all scaled by one over the root of their number times the width.

    s is the slot of a distance, by itself or in logarithmic buckets; K and Q are projections of one embedding of the slots. Of
    the last two terms, ``pos_att_type`` says which there are. Stock layers get the distances of all pairs, (1, N, N).
    """

    @staticmethod
    def applies(module: Any) -> bool:
        """Return whether the module has one of the last two terms."""
        return bool(module.relative_attention and module.pos_att_type)

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), rel_embeddings (slots, C); attention_mask (B, 1, 1, N), 0 of padding, or (B, 1, N, N)."""
        query, key, value = self.query_key_value(hidden_states, query_states)
        term: dict[str, Any] = {"scale": (query.shape[-1] * self.num_terms()) ** -0.5}
        if rel_embeddings is not None:
            term |= self.tables(self.pos_dropout(rel_embeddings), query.shape[2])
        out: Any = fused_relative_attention(
            query, key, value, attn_mask=attention_mask.bool(), dropout_p=self.dropout_p(), **term
        )
        return join_heads(self.of_padding(out, value, attention_mask)), None

    small = ("relative_pos",)

    def serves(  # type: ignore[override]
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        query_states: Any = None,
        **given: Any,
    ) -> bool:
        return (
            super().serves(**given)
            and (is_small(attention_mask) or attention_mask.shape[2] > 1)
            and (query_states is None or query_states.shape == hidden_states.shape)
        )

    @property
    def longest(self: Any) -> int:
        buckets = getattr(self, "position_buckets", -1)
        return min(last_that_differs(self.max_relative_positions, buckets), MOST) + 10

    def example(self: Any, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        width = self.num_attention_heads * self.attention_head_size
        states = torch.randn(batch, length, width)
        given = {"hidden_states": states, "attention_mask": mask_of(torch.ones(batch, length).bool() if real is None else real)}
        buckets = getattr(self, "position_buckets", -1)
        slots = buckets if buckets > 0 else self.max_relative_positions
        return {**given, "relative_pos": distances_of(self, states), "rel_embeddings": torch.randn(2 * slots, width)}

    def tables(self: Any, rel_embeddings: torch.Tensor, length: int) -> dict[str, Any]:
        """Return rel_key, rel_p2c and positions for the distances that differ, and that sequences of this length have."""
        most, buckets = self.max_relative_positions, getattr(self, "position_buckets", -1)
        span = buckets if buckets > 0 else most
        farthest = min(length - 1, last_that_differs(most, buckets))
        distances = torch.arange(-farthest, farthest + 1, device=rel_embeddings.device)
        counted = tables.deberta_log_buckets(distances, buckets, most) if buckets > 0 else distances
        slots = (span - counted).clamp(0, 2 * span - 1)
        fewer = len(slots) < 2 * span  # projections take most of the time
        rows = rel_embeddings[slots] if fewer else rel_embeddings[: 2 * span]
        term: dict[str, Any] = {}
        for name, kind in (("rel_key", "c2p"), ("rel_p2c", "p2c")):
            if kind in self.pos_att_type:
                projected = self.project_positions(kind, rows)
                projected = projected if fewer else projected[slots]
                term[name] = projected.unflatten(-1, (self.num_attention_heads, -1)).transpose(0, 1)
        return {**term, "positions": RelativePositions(-farthest, farthest)} if term else {}

    def query_key_value(self: Any, states: torch.Tensor, query_states: torch.Tensor | None) -> list[torch.Tensor]:
        """Return (B, H, N, D) each."""
        query_states = states if query_states is None else query_states
        made = self.query_proj(query_states), self.key_proj(states), self.value_proj(states)
        return [split_heads(each, self.attention_head_size) for each in made]

    def num_terms(self: Any) -> int:
        return 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)

    def project_positions(self: Any, kind: str, rows: torch.Tensor) -> torch.Tensor:
        """Return K ("c2p") or Q ("p2c") of embeddings."""
        if self.share_att_key:
            return (self.key_proj if kind == "c2p" else self.query_proj)(rows)  # type: ignore[no-any-return]
        return (self.pos_key_proj if kind == "c2p" else self.pos_query_proj)(rows)  # type: ignore[no-any-return]

    def dropout_p(self: Any) -> float:
        return drop_probability(self.dropout)

    def of_padding(self: Any, out: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """out, and the mean of all values for queries that are padding, whose logits the stock model makes all the same."""
        attends = attention_mask.mT if attention_mask.shape[2] == 1 else attention_mask.any(-1, keepdim=True)
        return torch.where(attends.bool(), out, value.mean(2, keepdim=True))


def last_that_differs(max_position: int, buckets: int) -> int:
    """Return a distance from which on all have the same slot: the first one, or, in buckets, a little more."""
    middle = buckets // 2
    if buckets <= 0 or middle == 1:
        return max_position
    # tables.deberta_log_buckets, solved for the distance whose bucket is the first one beyond all slots; and one more.
    return math.ceil(middle * ((max_position - 1) / middle) ** ((buckets - middle + 1) / (middle - 1)))


MOST = 520
"""Positions that are compared at most."""


def mask_of(real: torch.Tensor) -> Any:
    """Return the mask (B, 1, 1, N) of real tokens (B, N), of which the stock encoder makes (B, 1, N, N)."""
    return Compact.of(real[:, None, None], lambda small: small * small.mT)


def distances_of(module: Any, states: torch.Tensor) -> Any:
    """Return None for the layers, which know the distances of positions, of which the stock encoder makes (1, N, N)."""
    buckets, most = getattr(module, "position_buckets", -1), module.max_relative_positions

    def make(_: None) -> torch.Tensor:
        position = torch.arange(states.shape[-2], device=states.device)
        distances = position[:, None] - position
        return (tables.deberta_log_buckets(distances, buckets, most) if buckets > 0 else distances)[None]

    return Compact.of(None, make)


class DisentangledEncoder(Encoder):
    """Mixin: the mask of padding stays (B, 1, 1, N), and there are no distances of all pairs."""

    mask_function = None

    def get_attention_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        if attention_mask.dim() == 2 and not is_graph():
            make = super().get_attention_mask  # type: ignore[misc]
            return Compact.of(attention_mask[:, None, None], lambda _: make(attention_mask))  # type: ignore[no-any-return]
        if attention_mask.dim() == 4 and attention_mask.shape[2] == 1:  # given so, it hides keys, and says nothing of queries
            return attention_mask.bool().expand(-1, -1, attention_mask.shape[3], -1)
        return super().get_attention_mask(attention_mask)  # type: ignore[misc, no-any-return]

    def get_rel_pos(self: Any, hidden_states: Any, query_states: Any = None, relative_pos: Any = None) -> Any:
        make = super().get_rel_pos  # type: ignore[misc]
        if relative_pos is not None or query_states is not None or is_graph():
            return make(hidden_states, query_states, relative_pos)
        return Compact.of(None, lambda _: make(hidden_states, query_states, relative_pos))


class DisentangledSelfAttention(DisentangledAttention, stock.DisentangledSelfAttention):
    pass


class DebertaV2Encoder(DisentangledEncoder, stock.DebertaV2Encoder):
    pass


CLASSES = {
    stock.DisentangledSelfAttention: DisentangledSelfAttention,
    stock.DebertaV2Encoder: DebertaV2Encoder,
}

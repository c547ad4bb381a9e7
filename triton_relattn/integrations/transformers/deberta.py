"""DeBERTa, DeBERTa v2 and v3, mDeBERTa, and SEW-D, whose transformer is DeBERTa v2's."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from ... import tables
from ...positions import RelativePositions
from ..calls import is_graph
from ..compact import Compact, is_small
from ..operators import drop_probability, fused_relative_attention, join_heads, split_heads
from ..packing import PackedMask, Packing, Packs
from .base import Attention, Encoder, attending

LONGEST = 520
"""Positions that are compared at most."""


class DisentangledAttention(Attention):
    """q_i . k_j + q_i . K[s(i - j)] + k_j . Q[s(i - j)], all scaled by one over the root of their number times the width.

    s is the slot of a distance, by itself or in logarithmic buckets; K and Q are projections of one embedding of the slots. Of
    the last two terms, ``pos_att_type`` says which there are. Stock layers get the distances of all pairs, (1, N, N).
    """

    small = needs = ("relative_pos",)

    @staticmethod
    def applies(module: Any) -> bool:
        """Return whether the module has one of the last two terms."""
        return bool(module.relative_attention and module.pos_att_type)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,
    ) -> Any:
        """hidden_states (B, N, C), rel_embeddings (slots, C); attention_mask (B, 1, 1, N), 0 of padding, or (B, 1, N, N), or a
        Packing."""
        is_packed = isinstance(attention_mask, Packing)
        query, key, value = self.query_key_value(hidden_states, query_states)
        term: dict[str, Any] = {"scale": (query.shape[-1] * self.num_terms()) ** -0.5}
        if rel_embeddings is not None:
            term |= self.tables(self.pos_dropout(rel_embeddings), attention_mask.longest if is_packed else query.shape[2])
        mask = attention_mask if is_packed else attention_mask.bool()
        out: Any = fused_relative_attention(query, key, value, attn_mask=mask, dropout_p=self.dropout_p(), **term)
        return join_heads(out if is_packed else self.padded_queries(out, value, attention_mask)), None

    def query_key_value(self, states: torch.Tensor, query_states: torch.Tensor | None) -> list[torch.Tensor]:
        """Return (B, H, N, D) each."""
        query_states = states if query_states is None else query_states
        projected = self.query_proj(query_states), self.key_proj(states), self.value_proj(states)
        return [split_heads(part, self.attention_head_size) for part in projected]

    def num_terms(self) -> int:
        return 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)

    def tables(self, rel_embeddings: torch.Tensor, length: int) -> dict[str, Any]:
        """Return rel_key, rel_p2c and positions for the distances that differ, and that sequences of this length have."""
        most, buckets = self.max_relative_positions, num_buckets(self)
        span = buckets if buckets > 0 else most
        farthest = min(length - 1, last_that_differs(most, buckets))
        distances = torch.arange(-farthest, farthest + 1, device=rel_embeddings.device)
        bucketed = tables.deberta_log_buckets(distances, buckets, most) if buckets > 0 else distances
        slots = (span - bucketed).clamp(0, 2 * span - 1)
        is_part = len(slots) < 2 * span  # projections take most of the time
        rows = rel_embeddings[slots] if is_part else rel_embeddings[: 2 * span]
        term: dict[str, Any] = {}
        for name, kind in (("rel_key", "c2p"), ("rel_p2c", "p2c")):
            if kind in self.pos_att_type:
                projected = self.project_positions(kind, rows)
                projected = projected if is_part else projected[slots]
                term[name] = projected.unflatten(-1, (self.num_attention_heads, -1)).transpose(0, 1)
        return {**term, "positions": RelativePositions(-farthest, farthest)} if term else {}

    def project_positions(self, kind: str, rows: torch.Tensor) -> torch.Tensor:
        """Return K ("c2p") or Q ("p2c") of embeddings."""
        if self.share_att_key:
            return (self.key_proj if kind == "c2p" else self.query_proj)(rows)  # type: ignore[no-any-return]
        return (self.pos_key_proj if kind == "c2p" else self.pos_query_proj)(rows)  # type: ignore[no-any-return]

    def dropout_p(self) -> float:
        return drop_probability(self.dropout)

    def padded_queries(self, out: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Give queries that are padding the mean of all values: the stock model makes their logits all the same."""
        return torch.where(attending(attention_mask).bool(), out, value.mean(2, keepdim=True))

    def serves(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, query_states: torch.Tensor | None = None
    ) -> bool:
        """Return whether ours computes a call: a mask (B, 1, 1, N) of the user's hides keys alone."""
        hides_queries = is_small(attention_mask) or attention_mask.shape[2] > 1
        return super().serves() and hides_queries and (query_states is None or query_states.shape == hidden_states.shape)

    @property
    def longest(self) -> int:
        return min(last_that_differs(self.max_relative_positions, num_buckets(self)), LONGEST) + 10

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        buckets, most = num_buckets(self), self.max_relative_positions
        width = self.num_attention_heads * self.attention_head_size
        real = torch.ones(batch, length).bool() if real is None else real

        def distances(_: torch.Tensor) -> torch.Tensor:
            ahead = torch.arange(length)[:, None] - torch.arange(length)
            return (tables.deberta_log_buckets(ahead, buckets, most) if buckets > 0 else ahead)[None]

        return {
            "hidden_states": torch.randn(batch, length, width),
            "attention_mask": Compact.of(real[:, None, None], lambda small: small * small.mT),
            "relative_pos": Compact.of(torch.empty(0), distances),
            "rel_embeddings": torch.randn(2 * (buckets if buckets > 0 else most), width),
        }


def num_buckets(module: Any) -> int:
    """Return the number of buckets of distances in each direction; -1: none, as in DeBERTa."""
    return getattr(module, "position_buckets", -1)  # type: ignore[no-any-return]


def last_that_differs(max_position: int, buckets: int) -> int:
    """Return a distance from which on all have the same slot: the first one, or, in buckets, a little more."""
    middle = buckets // 2
    if buckets <= 0 or middle == 1:
        return max_position
    # tables.deberta_log_buckets, solved for the distance whose bucket is the first one beyond all slots; and one more.
    return math.ceil(middle * ((max_position - 1) / middle) ** ((buckets - middle + 1) / (middle - 1)))


class DebertaAttention(DisentangledAttention):
    """One projection for query, key and value, biases of two of them, and no buckets."""

    @staticmethod
    def applies(module: Any) -> bool:
        """Return False also of talking heads, which mix the scores of all heads."""
        return DisentangledAttention.applies(module) and not module.talking_head

    def query_key_value(self, states: torch.Tensor, query_states: torch.Tensor | None) -> list[torch.Tensor]:
        """Return (B, H, N, D) each."""
        heads = split_heads(self.in_proj(states), 3 * self.attention_head_size)
        query, key, value = heads.chunk(3, dim=-1)
        query_bias, value_bias = (bias.view(-1, 1, self.attention_head_size) for bias in (self.q_bias, self.v_bias))
        return [query + query_bias, key, value + value_bias]

    def num_terms(self) -> int:
        return 1 + len(self.pos_att_type)

    def project_positions(self, kind: str, rows: torch.Tensor) -> torch.Tensor:
        return (self.pos_proj if kind == "c2p" else self.pos_q_proj)(rows)  # type: ignore[no-any-return]


class SewDAttention(DisentangledAttention):
    """Queries that are padding attend; before transformers 5.20 (is_old) they are hidden, and a tensor is returned."""

    is_old = False

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,
    ) -> Any:
        outputs = super().forward(hidden_states, attention_mask, query_states, relative_pos, rel_embeddings)
        return outputs[0] if self.is_old else outputs

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        stock: Any = cls.__bases__[-1]
        cls.is_old = "output_attentions" in inspect.signature(stock.forward).parameters

    def without_dropout(self) -> None:
        self.dropout.drop_prob = self.pos_dropout.drop_prob = 0.0

    def dropout_p(self) -> float:
        return self.dropout.drop_prob if self.dropout.training else 0.0  # type: ignore[no-any-return]

    def padded_queries(self, out: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return out * attention_mask.mT.bool() if self.is_old and attention_mask.shape[2] == 1 else out


class DisentangledEncoder(Encoder):
    """The mask of padding stays (B, 1, 1, N), and there are no distances of all pairs."""

    mask_function = None

    def get_attention_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        if isinstance(attention_mask, PackedMask):
            return attention_mask
        make = super().get_attention_mask  # type: ignore[misc]
        if attention_mask.dim() == 2 and not is_graph():
            return Compact.of(attention_mask[:, None, None], lambda _: make(attention_mask))  # type: ignore[no-any-return]
        if attention_mask.dim() == 4 and attention_mask.shape[2] == 1:  # given so, it hides keys, and says nothing of queries
            return attention_mask.bool().expand(-1, -1, attention_mask.shape[3], -1)
        return make(attention_mask)  # type: ignore[no-any-return]

    def get_rel_pos(self, hidden_states: Any, query_states: Any = None, relative_pos: Any = None) -> Any:
        make = super().get_rel_pos  # type: ignore[misc]
        if relative_pos is not None or query_states is not None or is_graph():
            return make(hidden_states, query_states, relative_pos)
        return Compact.of(hidden_states.new_empty(0), lambda _: make(hidden_states, query_states, relative_pos))


class PackingEncoder(Packs, DisentangledEncoder):
    """Of DeBERTa v2 and v3, whose convolution mixes neighbours."""

    mask_dims = 2
    neighbours: tuple[str, ...] = ("conv",)
    padded_with = ("query_states", "relative_pos")

    def dense_mask(self, packing: Packing) -> torch.Tensor:
        return packing.blocks()

    def width(self: Any) -> int:
        return len(self.layer[0].output.LayerNorm.weight)


class DebertaEncoder(PackingEncoder):
    neighbours = ()

    @staticmethod
    def applies(module: Any) -> bool:
        return all(layer.attention.self.talking_head is False for layer in module.layer)

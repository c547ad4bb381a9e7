"""T5, and the attention of its descendants: mT5, UMT5, Switch Transformers, Pop2Piano, Pix2Struct's text decoder."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.t5 import modeling_t5 as stock

from ... import tables
from ...functional import fused_relative_attention
from ...positions import RelativePositions
from ..arguments import StockArguments
from .encoder import Encoder
from .heads import (
    added,
    attend_to_past,
    first_position,
    is_causal,
    join_heads,
    keys_and_values,
    refuse_weights,
    split_heads,
)


class BucketedAttention(StockArguments):
    """Mixin: q_i . k_j + b[bucket(j - i)], not scaled; in cross attention q_i . k_j alone.

    The first layer makes b, biases (H, R) of distances up to relative_attention_max_distance, beyond which they do not change,
    and passes it on to the others. Stock layers pass on (1, H, Nq, Nk).
    """

    projections = ("q", "k", "v", "o")

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """hidden_states (B, Nq, C); key_value_states (B, Nk, C) of an encoder, for cross attention; position_bias (H, R)."""
        refuse_weights(kwargs)
        project_query, *project, project_out = (getattr(self, name) for name in self.projections)
        query = split_heads(project_query(hidden_states), self.key_value_proj_dim)
        offset = first_position(cache, self.layer_idx)
        key, value = keys_and_values(self, project, hidden_states, key_value_states, cache, width=self.key_value_proj_dim)
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self.table(hidden_states.device)
        elif position_bias is not None and position_bias.dim() != 2:
            shape = tuple(position_bias.shape)
            raise ValueError(f"position_bias must be (H, R), got {shape}: enable or disable the model as a whole")

        term: dict[str, Any] = {"scale": self.scaling, "dropout_p": self.dropout if self.training else 0.0}
        if position_bias is not None:
            term |= {"rel_bias": position_bias, "positions": self.positions(), "query_offset": offset}
        if self.is_causal:
            term["is_causal"] = is_causal(mask, kwargs, self.config)
            out: Any = attend_to_past(query, key, value, mask, **term)
        else:
            out = fused_relative_attention(query, key, value, attn_mask=added(mask, query.dtype), **term)
        return project_out(join_heads(out)), position_bias, None

    def positions(self: Any) -> RelativePositions:
        """Return the relative positions of the biases. Beyond their ends the bias stays the same, in a decoder for all r > 0."""
        last = self.relative_attention_max_distance
        return RelativePositions(-last, 0 if getattr(self, "is_decoder", True) else last)

    def table(self: Any, device: torch.device) -> torch.Tensor:
        """Return the biases (H, R), a row for each of these positions. device: of the input, as weights may be offloaded."""
        positions = self.positions()
        distances = torch.arange(positions.first, positions.last + 1, device=device)
        buckets = tables.t5_buckets(
            distances, self.relative_attention_num_buckets, self.relative_attention_max_distance, positions.last > 0
        )
        return self.relative_attention_bias(buckets).T


class T5Attention(BucketedAttention, stock.T5Attention):
    pass


class T5Stack(Encoder, stock.T5Stack):
    attention = T5Attention


CLASSES = {stock.T5Attention: T5Attention, stock.T5Stack: T5Stack}

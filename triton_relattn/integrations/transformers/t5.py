"""T5, and the attention of its descendants: mT5, UMT5, Switch Transformers, Pop2Piano, Pix2Struct's text decoder."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from transformers.models.t5 import modeling_t5 as stock

from ... import tables
from ...positions import RelativePositions
from ..compact import Compact, dense_of, rows
from ..operators import fused_relative_attention
from . import masks
from .encoder import Encoder
from .heads import (
    InPlace,
    added,
    attend_to_past,
    first_position,
    is_causal,
    join_heads,
    keys_and_values,
    split_heads,
)

MOST = 500
"""Positions that are compared at most."""


def has_mask(module: Any) -> bool:
    """Return whether stock layers pass on biases to which the mask is added, and no weights: before transformers 5.21."""
    return not hasattr(sys.modules[type(module).__bases__[-1].__module__], "eager_attention_forward")


def sees_the_past(module: Any, others: Any = None) -> bool:
    """Return whether attention is causal: before transformers 5.21 that of decoders to their own states, without being told."""
    found: bool = getattr(module, "is_causal", getattr(module, "is_decoder", True) and others is None)
    return found


def with_mask(module: Any, bias: Any, mask: Any) -> Any:
    """Return what layers pass on, to which those of older versions add the mask."""
    if mask is None or not isinstance(bias, Compact) or not has_mask(module):
        return bias
    return Compact.of(bias.small, lambda small: bias.changed(small).dense() + dense_of(mask)[..., : bias.shape[-1]])


class BucketedAttention(InPlace):
    """Mixin: q_i . k_j + b[bucket(j - i)], not scaled; in cross attention q_i . k_j alone.

    The first layer makes b, biases (H, R) of distances up to relative_attention_max_distance, beyond which they do not change,
    and passes it on to the others. Stock layers pass on (1, H, Nq, Nk), with the mask added to it before transformers 5.21.
    """

    projections = ("q", "k", "v", "o")
    mask_name, bias_name = "mask", "position_bias"

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """hidden_states (B, Nq, C); key_value_states (B, Nk, C) of an encoder, for cross attention; position_bias (H, R)."""
        project_query, *project, project_out = (getattr(self, name) for name in self.projections)
        query = split_heads(project_query(hidden_states), self.key_value_proj_dim)
        offset = first_position(cache, self.layer_idx)
        key, value = keys_and_values(self, project, hidden_states, key_value_states, cache, width=self.key_value_proj_dim)
        passed_on = position_bias
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self.table(hidden_states.device)
            passed_on = self.small_bias(position_bias, query.shape[2], key.shape[2], offset)
        term: dict[str, Any] = {"scale": getattr(self, "scaling", 1.0), "dropout_p": self.dropout if self.training else 0.0}
        if position_bias is not None:
            term |= {"rel_bias": position_bias, "positions": self.positions(), "query_offset": offset}
        if sees_the_past(self, key_value_states):
            term["is_causal"] = is_causal(mask, kwargs, getattr(self, "config", None))
            out: Any = attend_to_past(query, key, value, mask, **term)
        else:
            out = fused_relative_attention(query, key, value, attn_mask=added(mask, query.dtype), **term)
        outputs = project_out(join_heads(out)), passed_on, None
        return outputs[:2] if has_mask(self) else outputs

    small = ("position_bias",)

    @property
    def longest(self: Any) -> int:
        return min(self.relative_attention_max_distance, MOST) + 10

    def example(self: Any, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        states = torch.randn(batch, length, self.d_model if hasattr(self, "d_model") else self.hidden_size)
        mask = masks.example(getattr(self, "config", None), batch, length, real, is_causal=sees_the_past(self))
        given = {"hidden_states": states, self.mask_name: mask}
        stock_class: Any = type(self).__bases__[-1]
        if "cache_position" in inspect.signature(stock_class.forward).parameters:  # before transformers 5.4
            given["cache_position"] = torch.arange(length)
        if not self.has_relative_attention_bias and self.bias_name:
            table = torch.randn(self.n_heads, self.positions().num_rows)
            given[self.bias_name] = with_mask(self, self.small_bias(table, length, length, 0), mask)
        return given

    def small_bias(self: Any, table: torch.Tensor, queries: int, keys: int, offset: Any) -> Any:
        """Return biases (H, R) for the next layer."""
        positions = self.positions()
        return Compact.of(table, lambda small: rows(small, positions, queries, keys, offset)[None])

    def passed_on(self: Any, result: Any, given: dict[str, Any]) -> Any:
        if self.bias_name and given.get("position_bias") is None:
            return (result[0], with_mask(self, result[1], given.get("mask")), *result[2:])
        return result

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
    pass


CLASSES = {stock.T5Attention: T5Attention, stock.T5Stack: T5Stack}

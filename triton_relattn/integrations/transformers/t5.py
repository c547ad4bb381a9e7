"""T5, mT5, UMT5, Switch Transformers, Pop2Piano, Pix2Struct's text decoder, LongT5's decoder."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache

from ... import tables
from ...positions import RelativePositions
from ..compact import Compact, rows, to_dense
from ..operators import fused_relative_attention, join_heads, split_heads
from . import masks
from .attention import Attention, additive_mask, causal_attention, first_position, hides_future

LONGEST = 500
"""Positions that are compared at most."""


class BucketedAttention(Attention):
    """q_i . k_j + b[bucket(j - i)], not scaled; in cross attention q_i . k_j alone.

    The first layer makes b, biases (H, R) of distances up to relative_attention_max_distance, beyond which they do not change,
    and passes it on to the others. Stock layers pass on (1, H, Nq, Nk), with the mask added to it before transformers 5.21.
    """

    projections = ("q", "k", "v", "o")
    small = ("position_bias",)

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        cache: Any = None,
        is_causal: bool | None = None,
    ) -> tuple[Any, ...]:
        """hidden_states (B, Nq, C); key_value_states (B, Nk, C) of an encoder, for cross attention; position_bias (H, R)."""
        project_query, _, _, project_out = (getattr(self, name) for name in self.projections)
        query = split_heads(project_query(hidden_states), self.key_value_proj_dim)
        offset = first_position(cache, self.layer_idx)
        key, value = self.keys_and_values(hidden_states, key_value_states, cache)
        passed_on = position_bias
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self.bias_table(hidden_states.device)
            passed_on = self.small_bias(position_bias, query.shape[2], key.shape[2], offset)
        options: dict[str, Any] = {"scale": getattr(self, "scaling", 1.0), "dropout_p": self.dropout if self.training else 0.0}
        if position_bias is not None:
            options |= {"rel_bias": position_bias, "positions": self.positions(), "query_offset": offset}
        if sees_the_past(self, key_value_states):
            options["is_causal"] = hides_future(mask, is_causal, getattr(self, "config", None))
            out: Any = causal_attention(query, key, value, mask, **options)
        else:
            out = fused_relative_attention(query, key, value, attn_mask=additive_mask(mask, query.dtype), **options)
        outputs = project_out(join_heads(out)), passed_on, None
        return outputs[:2] if adds_mask_to_bias(self) else outputs

    def keys_and_values(self, states: torch.Tensor, others: torch.Tensor | None, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values (B, H, Nk, D): of own states and the cache, or in cross attention of others."""
        has_both = isinstance(cache, EncoderDecoderCache)
        if has_both and others is not None and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        states = states if others is None else others
        key, value = (split_heads(getattr(self, name)(states), self.key_value_proj_dim) for name in self.projections[1:3])
        if cache is None:
            return key, value
        if has_both and others is not None:
            cache.is_updated[self.layer_idx] = True
        part = cache if not has_both else cache.self_attention_cache if others is None else cache.cross_attention_cache
        return part.update(key, value, self.layer_idx)  # type: ignore[no-any-return]

    def positions(self) -> RelativePositions:
        """Return the relative positions of the biases. Beyond their ends the bias stays the same, in a decoder for all r > 0."""
        last = self.relative_attention_max_distance
        return RelativePositions(-last, 0 if getattr(self, "is_decoder", True) else last)

    def bias_table(self, device: torch.device) -> torch.Tensor:
        """Return the biases (H, R), a row per position. device: of the input, as weights may be offloaded."""
        positions, last = self.positions(), self.relative_attention_max_distance
        distances = torch.arange(positions.first, positions.last + 1, device=device)
        buckets = tables.t5_buckets(distances, self.relative_attention_num_buckets, last, positions.last > 0)
        return self.relative_attention_bias(buckets).T  # type: ignore[no-any-return]

    def small_bias(self, table: torch.Tensor, queries: int, keys: int, offset: Any) -> Any:
        """Return biases (H, R) for the next layer, of which stock layers make (1, H, Nq, Nk)."""
        positions = self.positions()
        return Compact.of(table, lambda small: rows(small, positions, queries, keys, offset)[None])

    def passed_on(self, result: Any, given: dict[str, Any]) -> Any:
        if given.get("position_bias") is None:
            return (result[0], with_mask(self, result[1], given.get("mask")), *result[2:])
        return result

    @property
    def longest(self) -> int:
        return min(self.relative_attention_max_distance, LONGEST) + 10

    mask_name, takes_bias = "mask", True

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        states = torch.randn(batch, length, self.d_model if hasattr(self, "d_model") else self.hidden_size)
        mask = masks.example(getattr(self, "config", None), batch, length, real, is_causal=sees_the_past(self))
        given = {"hidden_states": states, self.mask_name: mask}
        stock_class: Any = type(self).__bases__[-1]
        if "cache_position" in inspect.signature(stock_class.forward).parameters:  # before transformers 5.4
            given["cache_position"] = torch.arange(length)
        if self.takes_bias and not self.has_relative_attention_bias:
            table = torch.randn(self.n_heads, self.positions().num_rows)
            given["position_bias"] = with_mask(self, self.small_bias(table, length, length, 0), mask)
        return given


def adds_mask_to_bias(module: Any) -> bool:
    """Return whether stock layers pass on biases to which the mask is added, and no weights: before transformers 5.21."""
    return not hasattr(sys.modules[type(module).__bases__[-1].__module__], "eager_attention_forward")


def sees_the_past(module: Any, others: Any = None) -> bool:
    """Return whether attention is causal: before transformers 5.21 that of decoders to their own states, without an attribute."""
    return getattr(module, "is_causal", getattr(module, "is_decoder", True) and others is None)  # type: ignore[no-any-return]


def with_mask(module: Any, bias: Any, mask: Any) -> Any:
    """Return what layers pass on, to which those of older versions add the mask."""
    if mask is None or not isinstance(bias, Compact) or not adds_mask_to_bias(module):
        return bias
    return Compact.of(bias.small, lambda small: bias.changed(small).dense() + to_dense(mask)[..., : bias.shape[-1]])


class Pix2StructAttention(BucketedAttention):
    projections = ("query", "key", "value", "output")


class UMT5Attention(BucketedAttention):
    """Each layer has biases of its own."""

    mask_name, takes_bias = "attention_mask", False

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        cache: Any = None,
        attention_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, Nq, C); encoder_hidden_states (B, Nk, C), for cross attention."""
        return super().forward(hidden_states, attention_mask, encoder_hidden_states, None, cache, is_causal)[0], None

    def passed_on(self, result: Any, given: dict[str, Any]) -> Any:
        return result

"""T5, mT5, UMT5, Switch Transformers, Pop2Piano, Pix2Struct's text decoder, LongT5 and MPNet: biases by bucket of the distance.

Transient-global attention of LongT5's encoder stays stock.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache
from transformers.models.longt5.modeling_longt5 import _get_local_attention_mask

from ... import tables
from ...positions import RelativePositions
from ..calls import is_graph
from ..compact import Compact, rows, to_dense
from ..operators import drop_probability, fused_relative_attention, join_heads, split_heads
from . import masks
from .base import Attention, Encoder, additive_mask, causal_attention, first_position, hides_future

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
        if "cache_position" in inspect.signature(type(self).forward).parameters:  # before transformers 5.4
            given["cache_position"] = torch.arange(length)
        if self.takes_bias and not self.has_relative_attention_bias:
            table = torch.randn(self.n_heads, self.positions().num_rows)
            given["position_bias"] = with_mask(self, self.small_bias(table, length, length, 0), mask)
        return given


def adds_mask_to_bias(module: Any) -> bool:
    """Return whether stock layers pass on biases to which the mask is added, and no weights: before transformers 5.21."""
    return not hasattr(sys.modules[type(module).__module__], "eager_attention_forward")


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


class LocalAttention(Attention):
    """q_i . k_j + b[bucket(j - i)], not scaled, in a window; the first layer makes b and passes it on."""

    small = ("position_bias",)

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor,
        position_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (B, N, C), position_bias (H, R), mask bool (B, 1, blocks, size, 3 * size)."""
        passed_on, positions = position_bias, self.positions()
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = BucketedAttention.bias_table(self, hidden_states.device)  # type: ignore[arg-type]
            passed_on = self.small_bias(position_bias, mask)
        real = mask[:, 0].diagonal(self.block_len, dim1=-2, dim2=-1).flatten(1)  # a frame that is not padding sees itself
        out: Any = fused_relative_attention(
            *(split_heads(project(hidden_states), self.key_value_proj_dim) for project in (self.q, self.k, self.v)),
            rel_bias=position_bias,
            positions=None if position_bias is None else positions,
            attn_mask=real[:, None, None, : hidden_states.shape[1]],
            window_size=(self.local_radius, self.local_radius),
            scale=1.0,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.o(join_heads(out)), passed_on

    def positions(self) -> RelativePositions:
        return RelativePositions(-self.local_radius, self.local_radius)

    def small_bias(self, table: torch.Tensor, mask: torch.Tensor) -> Any:
        """Return biases (H, R) for the next layer, of which stock layers make (1, 1, H, size, 3 * size), and add the mask."""
        positions, size = self.positions(), self.block_len

        def make(table: torch.Tensor) -> torch.Tensor:
            bias = rows(table, positions, size, 3 * size, size)[None, None]
            return bias + torch.where(mask > 0, 0.0, -1e10).transpose(1, 2)

        return Compact.of(table, make)

    def serves(self, mask: torch.Tensor | None) -> bool:  # type: ignore[override]
        """Return whether ours computes a call: without a mask stock attention sees all of three blocks."""
        return super().serves() and mask is not None

    def keys_per_query(self, keys: int) -> int:
        return min(keys, 3 * self.block_len)  # type: ignore[no-any-return]

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        real = torch.ones(batch, length).bool() if real is None else real
        mask = _get_local_attention_mask(real, self.block_len, real.device)
        given: dict[str, Any] = {"hidden_states": torch.randn(batch, length, self.d_model), "mask": mask}
        if not self.has_relative_attention_bias:
            given["position_bias"] = self.small_bias(torch.randn(self.n_heads, 2 * self.local_radius + 1), mask)
        return given


MPNET_BUCKETS, MPNET_LAST = 32, 128
"""MPNet's own numbers, whatever its config says: all distances from the last on share one bucket."""
MPNET_POSITIONS = RelativePositions(-MPNET_LAST, MPNET_LAST)


class MPNetSelfAttention(Attention):
    """q_i . k_j, scaled, + b[bucket(j - i)], one table for all layers."""

    small = ("position_bias",)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor]:
        """hidden_states (B, N, C), position_bias (H, R), where the stock encoder has (B, H, N, N)."""
        out: Any = fused_relative_attention(
            *(split_heads(project(hidden_states), self.attention_head_size) for project in (self.q, self.k, self.v)),
            rel_bias=position_bias,
            positions=None if position_bias is None else MPNET_POSITIONS,
            attn_mask=additive_mask(attention_mask, hidden_states.dtype),
            dropout_p=drop_probability(self.dropout),
        )
        return (self.o(join_heads(out)),)

    @property
    def longest(self) -> int:
        return MPNET_LAST + 10

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        states = torch.randn(batch, length, self.q.in_features)
        table = torch.randn(self.num_attention_heads, MPNET_POSITIONS.num_rows)
        mask = None if real is None else torch.zeros(real.shape).masked_fill(~real, torch.finfo(torch.float32).min)[:, None, None]
        return {"hidden_states": states, "attention_mask": mask, "position_bias": mpnet_bias(table, states)}


def mpnet_bias(table: torch.Tensor, states: torch.Tensor) -> Any:
    """Return the biases (H, R) for the layers, of which the stock encoder makes (B, H, N, N)."""
    batch, length = states.shape[:2]
    return Compact.of(table, lambda small: rows(small, MPNET_POSITIONS, length, length).expand(batch, -1, -1, -1))


class MPNetEncoder(Encoder):
    mask_function = None

    def compute_position_bias(self, x: torch.Tensor, position_ids: Any = None, num_buckets: int = MPNET_BUCKETS) -> Any:
        if is_graph() or position_ids is not None:
            return super().compute_position_bias(x, position_ids, num_buckets)  # type: ignore[misc]
        distances = torch.arange(-MPNET_LAST, MPNET_LAST + 1, device=x.device)
        bias: torch.Tensor = self.relative_attention_bias(tables.t5_buckets(distances, num_buckets, MPNET_LAST))
        return mpnet_bias(bias.T, x)

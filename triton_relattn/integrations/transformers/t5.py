"""T5, mT5, UMT5, Switch Transformers, Pop2Piano, Pix2Struct's text decoder, LongT5 and MPNet: biases by bucket of the distance.

Transient-global attention of LongT5's encoder stays stock.
"""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import torch
from transformers.models.longt5.modeling_longt5 import _get_local_attention_mask

from ... import tables
from ...positions import RelativePositions
from ..calls import is_graph
from ..compact import Compact, rows
from ..enabled import IMPLEMENTATION
from ..libraries import with_globals
from ..operators import drop_probability, fused_relative_attention, join_heads, split_heads
from ..packing import Packing, Packs
from . import masks
from .base import Attention, Encoder, additive_mask
from .door import ThroughTheDoor, serve

LONGEST = 500
"""Positions that are compared at most."""


class BucketedAttention(ThroughTheDoor):
    """q_i . k_j + b[bucket(j - i)], not scaled; in cross attention q_i . k_j alone.

    The first layer makes b, biases (H, R) of distances up to relative_attention_max_distance, beyond which they do not change,
    and passes it on to the others, where stock layers pass on (1, H, Nq, Nk). UMT5 has biases in each layer.
    """

    takes_bias = True

    @staticmethod
    def positions(module: Any) -> RelativePositions:
        """Return the relative positions of the biases. Beyond their ends the bias stays the same, in a decoder for all r > 0."""
        last = module.relative_attention_max_distance
        return RelativePositions(-last, 0 if getattr(module, "is_decoder", True) else last)

    @property
    def longest(self) -> int:
        return min(self.relative_attention_max_distance, LONGEST) + 10

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        mask = masks.example(self.config, batch, length, real, is_causal=self.is_causal, name=IMPLEMENTATION)
        states = torch.randn(batch, length, getattr(self, "d_model", None) or self.hidden_size)
        given = {"hidden_states": states, "mask" if self.takes_bias else "attention_mask": mask}
        if self.takes_bias and not self.has_relative_attention_bias:
            positions = BucketedAttention.positions(self)
            table = torch.randn(self.n_heads, positions.num_rows)
            given["position_bias"] = Compact.of(table, lambda small: rows(small, positions, length, length)[None])
        return given


class UMT5Attention(BucketedAttention):
    takes_bias = False


def bias_table(module: Any, positions: RelativePositions, device: torch.device | None) -> torch.Tensor:
    """Return the biases (H, R), a row per position. device: of the input, as weights may be offloaded."""
    table = module.relative_attention_bias
    distances = torch.arange(positions.first, positions.last + 1, device=table.weight.device if device is None else device)
    last, is_full = module.relative_attention_max_distance, positions.last > 0
    return table(tables.t5_buckets(distances, module.relative_attention_num_buckets, last, is_full)).T  # type: ignore[no-any-return]


def small_bias(stock: Any) -> Any:
    """Return a function that makes a table (H, R) in place of a bias (1, H, Nq, Nk)."""

    def compute_bias(module: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Any:
        if not isinstance(past_seen_tokens, int) or past_seen_tokens + query_length != key_length:
            return stock(module, query_length, key_length, device, past_seen_tokens)  # a static cache has keys to come
        positions = BucketedAttention.positions(module)
        table = bias_table(module, positions, device)
        return Compact.of(table, lambda small: rows(small, positions, query_length, key_length, past_seen_tokens)[None])

    return compute_bias


def without_zeros(stock: Any) -> Any:
    """Return a forward in which the bias of cross attention, zeros (1, H, Nq, Nk), is (1, H, 1, 1)."""

    def zeros(size: tuple[int, ...], **options: Any) -> Any:
        return Compact.of(torch.zeros((*size[:2], 1, 1), **options), lambda small: small.expand(size))

    forward = with_globals(inspect.unwrap(stock), torch=types.SimpleNamespace(**{**vars(torch), "zeros": zeros}))

    is_old_name = "past_key_values" not in inspect.signature(forward).parameters  # which decorators warn about

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        if is_old_name and "past_key_values" in kwargs:
            return stock(module, *args, **kwargs)
        return forward(module, *args, **kwargs)

    return run


class T5Encoder(Packs):
    """An encoder's stack: its tokens are unpadded before they are embedded."""

    states, packs_only = ("inputs_embeds", "input_ids"), True

    @staticmethod
    def applies(module: Any) -> bool:
        return not module.is_decoder

    def dense_mask(self, packing: Packing) -> torch.Tensor:
        return packing.blocks()

    def width(self: Any) -> int:
        return int(self.embed_tokens.embedding_dim)


BUCKETED = (
    "t5.T5 mt5.MT5 switch_transformers.SwitchTransformers pop2piano.Pop2Piano longt5.LongT5 umt5.UMT5 pix2struct.Pix2StructText"
)
for folder, prefix in (name.split(".") for name in BUCKETED.split()):
    stock = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    ours = UMT5Attention if folder == "umt5" else BucketedAttention
    model_type = "pix2struct_text_model" if folder == "pix2struct" else folder
    serve(getattr(stock, f"{prefix}Attention"), ours, model_type, forward=without_zeros, compute_bias=small_bias)


class LocalAttention(Attention):
    """q_i . k_j + b[bucket(j - i)], not scaled, in a window; the first layer makes b and passes it on."""

    small = ("position_bias",)
    needs = ("mask",)  # without one, stock attention sees all of three blocks

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor,
        position_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (B, N, C), position_bias (H, R), mask bool (B, 1, blocks, size, 3 * size)."""
        passed_on, positions = position_bias, self.positions()
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = bias_table(self, positions, hidden_states.device)
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


class MPNetEncoder(Packs, Encoder):
    mask_function = None

    def mask_of(self, real: torch.Tensor) -> Any:
        return masks.example(self.config, len(real), real.shape[1], real)

    def compute_position_bias(self, x: torch.Tensor, position_ids: Any = None, num_buckets: int = MPNET_BUCKETS) -> Any:
        if is_graph() or position_ids is not None:
            return super().compute_position_bias(x, position_ids, num_buckets)  # type: ignore[misc]
        distances = torch.arange(-MPNET_LAST, MPNET_LAST + 1, device=x.device)
        bias: torch.Tensor = self.relative_attention_bias(tables.t5_buckets(distances, num_buckets, MPNET_LAST))
        return mpnet_bias(bias.T, x)

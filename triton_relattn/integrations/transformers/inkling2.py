"""The language models of Inkling 2, and of Inkling 2 Loop, some of whose layers run several times."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from transformers.models.inkling2 import modeling_inkling2 as stock
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..calls import is_graph
from ..compact import Compact
from ..libraries import cache_name, with_globals
from ..operators import join_heads
from .base import Attention, Encoder, first_position
from .inkling import InklingAttention

CACHE = cache_name(stock.Inkling2ShortConvolution.forward)
IS_5_23 = not hasattr(stock, "get_relative_distance")


class SinkAttention(InklingAttention):
    """q_i . k_j + r_i . W[i - j], q and k scaled; W (d_rel, extent) zero beyond its ends; a sink per query and head.

    In windows. Queries and keys that are too long are shortened, values are normalised, and the output is gated. From
    transformers 5.24 on these are parts of the projections; the lines for 5.23 have a module for each.
    """

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        key_hidden_states: torch.Tensor | None = None,
        value_hidden_states: torch.Tensor | None = None,
        conv_mask: torch.Tensor | None = None,
        cache: Any = None,
        cache_offset: int = 0,
        position_ids: torch.Tensor | None = None,
        relative_distance: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """All (B, N, C), conv_mask (B, N) and the others as in the stock class; relative_distance is not read."""
        key_states = hidden_states if key_hidden_states is None else key_hidden_states
        value_states = hidden_states if value_hidden_states is None else value_hidden_states
        options: dict[str, Any] = {CACHE: cache, "conv_mask": conv_mask}
        if IS_5_23:
            query, rel_query = self.old_queries(hidden_states, position_ids)
            key = self.k_l2_clip(self.old_convolution("k", key_states, options)).transpose(1, 2)
            value = self.old_convolution("v", value_states, options)
            value = self.v_norm(value.float()).to(value.dtype).transpose(1, 2)
            profiles = self.rel_logits_proj.proj
        else:
            options |= {"cache_offset": cache_offset, "seq_idx": seq_idx}
            query, bias = self.q_proj(hidden_states, position_ids), self.relative_position_bias
            key, value = self.k_proj(key_states, **options), self.v_proj(value_states, **options)
            rel_query = bias.linear(hidden_states).unflatten(-1, (self.num_heads, -1))
            rel_query, profiles = bias.norm(rel_query, position_ids).transpose(1, 2), bias.proj
        sinks = self.sink_proj(hidden_states).mT
        out = join_heads(
            self.attend(query, key, value, rel_query, profiles, attention_mask, cache, is_causal, sinks, cache_offset)
        )
        if not IS_5_23:
            return self.o_proj(out, hidden_states), None
        gate = torch.sigmoid(self.gate_proj(hidden_states).float())
        return self.o_proj((out.float() * gate).to(out.dtype)), None

    def old_convolution(self, name: str, states: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Return the keys ("k") or values ("v"), (B, N, H, D), of transformers 5.23."""
        projected, convolve = getattr(self, f"{name}_proj")(states), getattr(self, f"{name}_sconv")
        convolved = convolve(projected, states, **options) if self.is_dynamic else convolve(projected, **options)
        return convolved.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-any-return]

    def old_queries(self, hidden_states: torch.Tensor, position_ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries of the keys, and of W, of transformers 5.23."""
        query = self.q_l2_clip(self.q_proj(hidden_states).unflatten(-1, (self.num_heads, -1)))
        rel_query = self.rel_l2_clip(self.r_proj(hidden_states).unflatten(-1, (self.num_heads, -1)))
        if self.is_dynamic:
            growth = torch.log(((position_ids + 1).float() / self.config.log_scaling_n_floor).clamp(min=1.0))
            factor = 1.0 + self.config.log_scaling_alpha * growth[..., None, None]
            query, rel_query = ((states.float() * factor).to(states.dtype) for states in (query, rel_query))
        return query.transpose(1, 2), rel_query.transpose(1, 2)

    is_dynamic = False

    def serves(  # type: ignore[override]
        self, attention_mask: Any, cache_offset: int = 0, seq_idx: torch.Tensor | None = None, is_causal: bool | None = None
    ) -> bool:
        is_known = not (IS_5_23 and (cache_offset or seq_idx is not None))
        return Attention.serves(self) and is_known and self.knows_future(attention_mask, is_causal)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        position = torch.arange(length)
        given = {**super().example(batch, length, real), "position_ids": position[None]}
        if not IS_5_23:
            given["relative_distance"] = position[:, None] - position
        if self.is_dynamic:
            given |= {f"{name}_hidden_states": torch.randn_like(given["hidden_states"]) for name in ("key", "value")}
        return given


class FullAttention(SinkAttention):
    """q_i and r_i are multiplied by a factor that grows with the position; convolutions depend on their inputs."""

    is_dynamic = True


def no_distances(*args: Any, **given: Any) -> Any:
    """Return None in place of the distances of all pairs, (Nq, Nk)."""
    if is_graph():
        return stock.get_relative_distance(*args, **given)
    named = inspect.signature(stock.get_relative_distance).bind(*args, **given).arguments
    if named["cache"] is not None:
        named["cache"] = sizes_now(named["cache"], named["inputs_embeds"].shape[1])
    return Compact.of(None, lambda _: stock.get_relative_distance(**named))


def sizes_now(cache: Any, length: int) -> Any:
    """Return a cache with the sizes and offsets that it has now, before the layers of a call with length tokens change it."""
    now, layers = copy.copy(cache), range(max(1, len(cache.layers)))  # of a cache without layers the first one is asked for
    sizes = [cache.get_mask_sizes(length, layer) for layer in layers]
    offsets = [first_position(cache, layer) for layer in layers]
    now.layers, now.get_query_offset = list(cache.layers), offsets.__getitem__
    now.get_mask_sizes = lambda _, layer: sizes[layer]
    return now


class TextModel(Encoder):
    """Model that does not make the distances of all pairs."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if not IS_5_23 and "stock_class" in vars(cls):
            forward = with_globals(inspect.unwrap(cls.stock_class.forward), get_relative_distance=no_distances)
            cls.forward = merge_with_config_defaults(capture_outputs(forward))  # type: ignore[attr-defined]
        super().__init_subclass__(**kwargs)

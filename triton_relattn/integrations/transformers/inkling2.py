"""The language model of Inkling 2."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from transformers.models.inkling2 import modeling_inkling2 as stock
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..calls import is_graph
from ..compact import Compact
from ..replacement import argument_name, with_names
from .encoder import Encoder
from .heads import InPlace, join_heads
from .inkling import attend, example

CACHE = argument_name(stock.Inkling2ShortConvolution.forward, "cache")


class SinkAttention(InPlace):
    """Mixin: q_i . k_j + r_i . W[i - j], q and k scaled; W (d_rel, extent) zero beyond its ends; a sink for each query and head.

    Queries and keys that are too long are shortened, values are normalised, and the output is gated.
    """

    def forward(
        self: Any,
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
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """All (B, N, C), conv_mask (B, N) and the others as in the stock class.

        relative_distance: of each pair of query and key, (Nq, Nk), which the cache says, too.
        """
        key_states = hidden_states if key_hidden_states is None else key_hidden_states
        value_states = hidden_states if value_hidden_states is None else value_hidden_states
        options: dict[str, Any] = {CACHE: cache, "conv_mask": conv_mask}
        if hasattr(self, "k_sconv"):  # transformers 5.23: from 5.24 on, projections have their own convolutions and norms
            if cache_offset or seq_idx is not None:
                raise TypeError(
                    f"cache_offset and seq_idx are not known to {type(self).__name__} of this version of transformers"
                )
            query, rel_query = self._queries(hidden_states, position_ids)
            key = self.k_l2_clip(self._convolved("k", key_states, options).unflatten(-1, (-1, self.head_dim)))
            value = self._convolved("v", value_states, options).unflatten(-1, (-1, self.head_dim))
            value = self.v_norm(value.float()).to(value.dtype)
            key, value, profiles = key.transpose(1, 2), value.transpose(1, 2), self.rel_logits_proj.proj
        else:
            options |= {"cache_offset": cache_offset, "seq_idx": seq_idx}
            query, bias = self.q_proj(hidden_states, position_ids), self.relative_position_bias
            key, value = self.k_proj(key_states, **options), self.v_proj(value_states, **options)
            rel_query = bias.linear(hidden_states).unflatten(-1, (self.num_heads, -1))
            rel_query, profiles = bias.norm(rel_query, position_ids).transpose(1, 2), bias.proj
        out = attend(
            self,
            query,
            key,
            value,
            rel_query,
            profiles,
            attention_mask,
            cache,
            kwargs,
            sinks=self.sink_proj(hidden_states).mT,
            cache_offset=cache_offset,
        )
        if not hasattr(self, "gate_proj"):  # from transformers 5.24 on, it is a part of o_proj
            return self.o_proj(join_heads(out), hidden_states), None
        gate = torch.sigmoid(self.gate_proj(hidden_states).float())
        return self.o_proj((join_heads(out).float() * gate).to(out.dtype)), None

    stock_needs_keys = False

    @property
    def longest(self: Any) -> int:
        return min(self.rel_extent, 500) + 10

    def example(self: Any, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        position = torch.arange(length)
        given = {"position_ids": position[None], "relative_distance": position[:, None] - position}
        if not hasattr(stock, "get_relative_distance"):
            del given["relative_distance"]
        states = example(self, batch, length, real)
        if self.stock_needs_keys:
            states |= {f"{name}_hidden_states": torch.randn_like(states["hidden_states"]) for name in ("key", "value")}
        return {**states, **given}

    def _convolved(self: Any, name: str, states: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Return the keys ("k") or values ("v") of transformers 5.23."""
        projected: torch.Tensor = getattr(self, f"{name}_sconv")(getattr(self, f"{name}_proj")(states), **options)
        return projected

    def _queries(self: Any, hidden_states: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries of the keys, and of W, of transformers 5.23."""
        query = self.q_l2_clip(self.q_proj(hidden_states).unflatten(-1, (self.num_heads, -1)))
        rel_query = self.rel_l2_clip(self.r_proj(hidden_states).unflatten(-1, (self.num_heads, -1)))
        return query.transpose(1, 2), rel_query.transpose(1, 2)


class Inkling2SlidingAttention(SinkAttention, stock.Inkling2SlidingAttention):
    """In a window."""


class Inkling2FullAttention(SinkAttention, stock.Inkling2FullAttention):
    """q_i and r_i are multiplied by a factor that grows with the position; convolutions depend on what they are of."""

    stock_needs_keys = True

    def _convolved(self, name: str, states: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        projected: torch.Tensor = getattr(self, f"{name}_sconv")(getattr(self, f"{name}_proj")(states), states, **options)
        return projected

    def _queries(self, hidden_states: torch.Tensor, position_ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen = (position_ids + 1).float() / self.config.log_scaling_n_floor
        factor = 1.0 + self.config.log_scaling_alpha * torch.log(seen.clamp(min=1.0))[:, None, :, None]
        query, rel_query = ((each.float() * factor).to(each.dtype) for each in super()._queries(hidden_states, position_ids))
        return query, rel_query


def no_distances(*args: Any, **given: Any) -> Any:
    """Return None in place of the distances of all pairs, (Nq, Nk)."""
    if is_graph():
        return stock.get_relative_distance(*args, **given)
    named = inspect.signature(stock.get_relative_distance).bind(*args, **given).arguments
    if (cache := named["cache"]) is not None:  # its sizes now, before the layers change it
        length, layers = named["inputs_embeds"].shape[1], range(len(cache.layers))
        sizes = [cache.get_mask_sizes(length, each) for each in layers]
        offsets = [cache.get_query_offset(each) for each in layers]
        kept = {"layers": cache.layers, "is_sliding": cache.is_sliding, "get_query_offset": offsets.__getitem__}
        named["cache"] = types.SimpleNamespace(**kept, get_mask_sizes=lambda _, layer: sizes[layer])
    return Compact.of(None, lambda _: stock.get_relative_distance(**named))


class Inkling2TextModel(Encoder, stock.Inkling2TextModel):
    if hasattr(stock, "get_relative_distance"):  # from transformers 5.24 on: (Nq, Nk), which no attention here needs
        forward = merge_with_config_defaults(
            capture_outputs(with_names(inspect.unwrap(stock.Inkling2TextModel.forward), get_relative_distance=no_distances))
        )


CLASSES = {
    stock.Inkling2SlidingAttention: Inkling2SlidingAttention,
    stock.Inkling2FullAttention: Inkling2FullAttention,
    stock.Inkling2TextModel: Inkling2TextModel,
}

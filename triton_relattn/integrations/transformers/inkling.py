"""The language model of Inkling."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.cache_utils import StaticCache
from transformers.models.inkling import modeling_inkling as stock

from ... import tables
from ...positions import RelativePositions
from ..replacement import argument_name
from . import masks
from .encoder import Encoder
from .heads import InPlace, attend_to_past, first_position, is_causal, join_heads, split_heads, with_past

CACHE = argument_name(stock.InklingShortConvolution.forward, "cache")


class InklingAttention(InPlace, stock.InklingAttention):
    """q_i . k_j / D + r_i . W[i - j]: r of its own projection, W (d_rel, extent) zero beyond its ends; causal, or in a window.

    In full layers, q_i and r_i are multiplied by a factor that grows with the position.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        conv_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), conv_mask (B, N) and cache as in the stock class."""
        given: dict[str, Any] = {CACHE: cache, "conv_mask": conv_mask}
        query = split_heads(self.q_proj(hidden_states), self.head_dim)
        key = split_heads(self.k_sconv(self.k_proj(hidden_states), **given), self.head_dim)
        value = split_heads(self.v_sconv(self.v_proj(hidden_states), **given), self.head_dim)
        query, key = self.q_norm(query), self.k_norm(key)
        rel_query = split_heads(self.r_proj(hidden_states), self.config.d_rel)

        if not self.is_sliding and self.config.log_scaling_n_floor is not None:
            seen = torch.arange(1, query.shape[2] + 1, device=query.device) + first_position(cache, self.layer_idx)
            growth = torch.log((seen.float() / self.config.log_scaling_n_floor).clamp(min=1.0))
            factor = (1.0 + self.config.log_scaling_alpha * growth)[:, None]
            query, rel_query = ((each.float() * factor).to(each.dtype) for each in (query, rel_query))
        profiles = self.rel_logits_proj.proj
        out = attend(self, query, key, value, rel_query, profiles, attention_mask, cache, kwargs)
        return self.o_proj(join_heads(out)), None

    def serves(self, cache: Any = None, **given: Any) -> bool:
        """Return whether ours computes a call: with a static cache the stock forward's terms are those of later queries."""
        return super().serves(**given) and not isinstance(cache, StaticCache)

    @property
    def longest(self) -> int:
        return min(self.rel_extent, 500) + 10

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        return example(self, batch, length, real)


def example(module: Any, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
    """Return states and masks of a layer."""
    window = module.sliding_window if module.is_sliding else None
    mask = masks.example(module.config, batch, length, real, is_causal=is_causal(None, {}, module.config), window=window)
    return {"hidden_states": torch.randn(batch, length, module.config.hidden_size), "attention_mask": mask, "conv_mask": real}


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_query: torch.Tensor,
    profiles: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Any,
    asked: dict[str, Any],
    sinks: torch.Tensor | None = None,
    cache_offset: int = 0,
) -> torch.Tensor:
    """Compute a layer's attention over new keys and values (B, Hk, Nq, D) and those of its cache, in its window if it has one.

    profiles: W, (d_rel, extent). cache_offset: from the layer's number to that of its part of the cache.
    """
    layer = module.layer_idx + cache_offset
    first_key = 0 if cache is None else cache.get_mask_sizes(query.shape[2], layer)[1]
    key, value, first_query = with_past(cache, layer, key, value)
    to_past = is_causal(attention_mask, asked, module.config)
    return attend_to_past(
        query,
        key,
        value,
        attention_mask,
        sinks=sinks,
        rel_key=tables.from_future_first(profiles.T, dim=-2),
        rel_query=rel_query,
        rel_scale=1.0,
        positions=RelativePositions(-(module.rel_extent - 1), 0, outside="zero"),
        is_causal=to_past,
        window_size=(module.sliding_window - 1, 0) if module.is_sliding and to_past else (-1, -1),
        query_offset=first_query - first_key,
        dropout_p=module.attention_dropout if module.training else 0.0,
        scale=module.scaling,
    )


class InklingTextModel(Encoder, stock.InklingTextModel):
    pass


class InklingModel(Encoder, stock.InklingModel):
    pass

    @functools.wraps(stock.InklingModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("is_causal", None)  # the masks that the model makes for its language model are causal in any case
        return super().forward(*args, **kwargs)


CLASSES = {
    stock.InklingAttention: InklingAttention,
    stock.InklingTextModel: InklingTextModel,
    stock.InklingModel: InklingModel,
}

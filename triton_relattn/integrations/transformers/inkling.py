"""The language model of Inkling."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.cache_utils import StaticCache
from transformers.models.inkling import modeling_inkling as stock

from ... import tables
from ...positions import RelativePositions
from ..libraries import cache_name
from ..operators import join_heads, split_heads
from . import masks
from .base import Attention, Encoder, causal_attention, first_position, hides_future, update_cache

CACHE = cache_name(stock.InklingShortConvolution.forward)


class InklingAttention(Attention):
    """q_i . k_j / D + r_i . W[i - j]: r of its own projection, W (d_rel, extent) zero beyond its ends; causal, or in a window.

    In full layers, q_i and r_i are multiplied by a factor that grows with the position.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        conv_mask: torch.Tensor | None = None,
        cache: Any = None,
        is_causal: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), conv_mask (B, N) and cache as in the stock class."""
        options: dict[str, Any] = {CACHE: cache, "conv_mask": conv_mask}
        query = split_heads(self.q_proj(hidden_states), self.head_dim)
        key = split_heads(self.k_sconv(self.k_proj(hidden_states), **options), self.head_dim)
        value = split_heads(self.v_sconv(self.v_proj(hidden_states), **options), self.head_dim)
        query, key = self.q_norm(query), self.k_norm(key)
        rel_query = split_heads(self.r_proj(hidden_states), self.config.d_rel)

        if not self.is_sliding and self.config.log_scaling_n_floor is not None:
            count = torch.arange(1, query.shape[2] + 1, device=query.device) + first_position(cache, self.layer_idx)
            growth = torch.log((count.float() / self.config.log_scaling_n_floor).clamp(min=1.0))
            factor = (1.0 + self.config.log_scaling_alpha * growth)[:, None]
            query, rel_query = ((states.float() * factor).to(states.dtype) for states in (query, rel_query))
        profiles = self.rel_logits_proj.proj
        out = self.attend(query, key, value, rel_query, profiles, attention_mask, cache, is_causal)
        return self.o_proj(join_heads(out)), None

    def serves(self, attention_mask: Any, cache: Any = None, is_causal: bool | None = None) -> bool:  # type: ignore[override]
        """Return whether ours computes a call: with a static cache the stock forward's terms are those of later queries."""
        return super().serves() and self.knows_future(attention_mask, is_causal) and not isinstance(cache, StaticCache)

    def knows_future(self, attention_mask: Any, is_causal: bool | None) -> bool:
        """Return whether it is known which keys a query sees: without a mask, the stock forward shows the future as well."""
        return attention_mask is not None or not hides_future(None, is_causal, self.config)

    @property
    def longest(self) -> int:
        return min(self.rel_extent, 500) + 10  # type: ignore[no-any-return]

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        window, is_causal = self.sliding_window if self.is_sliding else None, hides_future(None, None, self.config)
        mask = masks.example(self.config, batch, length, real, is_causal=is_causal, window=window)
        return {"hidden_states": torch.randn(batch, length, self.config.hidden_size), "attention_mask": mask, "conv_mask": real}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rel_query: torch.Tensor,
        profiles: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Any,
        is_causal: bool | None,
        sinks: torch.Tensor | None = None,
        cache_offset: int = 0,
    ) -> torch.Tensor:
        """Compute attention over new keys and values (B, Hk, N, D) and its cache; profiles (d_rel, extent), sinks (B, H, N)."""
        layer = self.layer_idx + cache_offset
        first_key = 0 if cache is None else cache.get_mask_sizes(query.shape[2], layer)[1]
        key, value, first_query = update_cache(cache, layer, key, value)
        is_causal = hides_future(attention_mask, is_causal, self.config)
        out = causal_attention(
            query,
            key,
            value,
            attention_mask,
            rel_key=tables.from_future_first(profiles.T, dim=-2),
            rel_query=rel_query,
            rel_scale=1.0,
            positions=RelativePositions(-(self.rel_extent - 1), 0, outside="zero"),
            is_causal=is_causal,
            window_size=(self.sliding_window - 1, 0) if self.is_sliding and is_causal else (-1, -1),
            query_offset=first_query - first_key,
            dropout_p=self.attention_dropout if self.training else 0.0,
            scale=self.scaling,
            return_lse=sinks is not None,
        )
        if sinks is None:
            return out  # type: ignore[no-any-return]
        out, lse = out  # a sink is a further logit of a query with a value of zero: it takes a share of the weights
        return out * torch.sigmoid(lse - sinks).to(out.dtype)[..., None]  # type: ignore[no-any-return]


class InklingModel(Encoder):
    @functools.wraps(stock.InklingModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("is_causal", None)  # the masks that the model makes for its language model are causal in any case
        return super().forward(*args, **kwargs)  # type: ignore[misc]

"""The language model of Inkling 2."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.inkling2 import modeling_inkling2 as stock

from .encoder import Encoder
from .heads import join_heads, refuse_weights
from .inkling import attend


class SinkAttention:
    """Mixin: q_i . k_j + r_i . W[i - j], q and k scaled; W (d_rel, extent) zero beyond its ends; a sink for each query and head.

    Queries and keys that are too long are shortened, values are normalised, and the output is gated.
    """

    def _attend(
        self: Any,
        hidden_states: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Any,
        asked: dict[str, Any],
        factor: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """factor: (B, N, 1, 1), of queries and r."""
        refuse_weights(asked)
        query = self.q_l2_clip(self.q_proj(hidden_states).unflatten(-1, (self.num_heads, -1)))
        rel_query = self.rel_l2_clip(self.r_proj(hidden_states).unflatten(-1, (self.num_heads, -1)))
        if factor is not None:
            query, rel_query = ((each.float() * factor).to(each.dtype) for each in (query, rel_query))
        key = self.k_l2_clip(key.unflatten(-1, (-1, self.head_dim)))
        value = self.v_norm(value.unflatten(-1, (-1, self.head_dim)).float()).to(value.dtype)
        query, key, value, rel_query = (each.transpose(1, 2) for each in (query, key, value, rel_query))
        sinks = self.sink_proj(hidden_states).mT
        out = attend(self, query, key, value, rel_query, attention_mask, cache, asked, sinks)
        gate = torch.sigmoid(self.gate_proj(hidden_states).float())
        return self.o_proj((join_heads(out).float() * gate).to(out.dtype)), None


class Inkling2SlidingAttention(SinkAttention, stock.Inkling2SlidingAttention):
    """In a window."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        conv_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), conv_mask (B, N) and past_key_values as in the stock class."""
        cache: dict[str, Any] = {"past_key_values": past_key_values, "conv_mask": conv_mask}
        key = self.k_sconv(self.k_proj(hidden_states), **cache)
        value = self.v_sconv(self.v_proj(hidden_states), **cache)
        return self._attend(hidden_states, key, value, attention_mask, past_key_values, kwargs)


class Inkling2FullAttention(SinkAttention, stock.Inkling2FullAttention):
    """q_i and r_i are multiplied by a factor that grows with the position."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_hidden_states: torch.Tensor,
        value_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        conv_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """(B, N, C) each; conv_mask (B, N), past_key_values and position_ids as in the stock class."""
        cache: dict[str, Any] = {"past_key_values": past_key_values, "conv_mask": conv_mask}
        key = self.k_sconv(self.k_proj(key_hidden_states), key_hidden_states, **cache)
        value = self.v_sconv(self.v_proj(value_hidden_states), value_hidden_states, **cache)
        seen = (kwargs["position_ids"] + 1).float() / self.config.log_scaling_n_floor
        factor = 1.0 + self.config.log_scaling_alpha * torch.log(seen.clamp(min=1.0))[..., None, None]
        return self._attend(hidden_states, key, value, attention_mask, past_key_values, kwargs, factor)


class Inkling2TextModel(Encoder, stock.Inkling2TextModel):
    attention = Inkling2SlidingAttention, Inkling2FullAttention


CLASSES = {
    stock.Inkling2SlidingAttention: Inkling2SlidingAttention,
    stock.Inkling2FullAttention: Inkling2FullAttention,
    stock.Inkling2TextModel: Inkling2TextModel,
}

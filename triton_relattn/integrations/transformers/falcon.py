"""Falcon with ALiBi (falcon-rw)."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.models.falcon import modeling_falcon as stock

from ..arguments import StockArguments
from .bloom import bias_of_keys
from .encoder import Encoder
from .heads import attend_to_past, join_heads, refuse_weights, with_past
from .masks import SHOWN


class FalconAttention(StockArguments, stock.FalconAttention):
    """q_i . k_j + slope * j, both scaled; causal. The model rounds slopes and biases to bfloat16."""

    @staticmethod
    def applies(module: Any) -> bool:
        """Return whether the model has ALiBi; else it has rotary embeddings."""
        return bool(module.config.alibi)

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: Any = None,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, Nq, C), alibi (B * H, 1, Nk), attention_mask (B, Nk); one (B, H, Nq, Nk) has alibi in it."""
        refuse_weights({"output_attentions": output_attentions})
        states = self._split_heads(self.query_key_value(hidden_states))
        query, key, value = (each.transpose(1, 2) for each in states)
        key, value, offset = with_past(cache, self.layer_idx, key, value)
        to_past = attention_mask.dim() == 2
        if to_past:
            bias = alibi.unflatten(0, (-1, self.num_heads)) / math.sqrt(self.head_dim)
            attention_mask = bias_of_keys(bias, attention_mask)
        out = attend_to_past(
            query,
            key,
            value,
            attention_mask,
            is_causal=to_past,
            query_offset=offset,
            dropout_p=self.attention_dropout.p if self.training else 0.0,
        )
        return self.dense(join_heads(out)), None


class FalconModel(Encoder, stock.FalconModel):
    attention = FalconAttention
    mask_function = SHOWN
    applies = FalconAttention.applies


CLASSES = {stock.FalconAttention: FalconAttention, stock.FalconModel: FalconModel}

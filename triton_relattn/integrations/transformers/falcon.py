"""Falcon with ALiBi (falcon-rw)."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AttentionMaskInterface
from transformers.models.falcon import modeling_falcon as stock

from ..compact import Compact
from . import masks
from .bloom import bias_of_keys
from .encoder import Encoder
from .heads import InPlace, attend_to_past, join_heads, with_past


class FalconAttention(InPlace, stock.FalconAttention):
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

    constants = ("alibi",)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        real = torch.ones(batch, length).bool() if real is None else real
        mask = masks.example(self.config, batch, length, real, is_causal=True, name=NAME)
        alibi = stock.build_alibi_tensor(real.long(), self.num_heads, torch.float64)
        return {
            "hidden_states": torch.randn(batch, length, self.hidden_size),
            "alibi": alibi,
            "attention_mask": mask,
        }


class Mask(Compact):
    """A mask (B, Nk) of a causal model, which adds ALiBi to stock ones: to those of four dimensions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.ndim.__get__:  # type: ignore[attr-defined]
            return 2
        return super().__torch_function__(func, types, args, kwargs)


def shown(**arguments: Any) -> Any:
    """Return the mask (B, Nk), for stock layers ALiBi (B, H, Nq, Nk) with hidden keys at the lowest number."""
    mask = masks.shown(**arguments)
    if not isinstance(mask, Compact) or mask.small is None or mask.small.dim() != 2:
        return mask
    config, dtype = arguments["config"], arguments["dtype"]

    def make(small: torch.Tensor) -> torch.Tensor:
        dense = mask.dense()
        hidden = ~dense if dense.dtype == torch.bool else dense < -1
        alibi = stock.build_alibi_tensor(small.long(), config.num_attention_heads, dtype=dtype)
        bias = alibi.reshape(len(small), -1, *alibi.shape[1:]) / math.sqrt(config.hidden_size // config.num_attention_heads)
        return torch.masked_fill(bias, hidden, torch.finfo(dtype).min)

    return Mask.of(mask.small, make)


NAME = "triton_relattn_alibi"
AttentionMaskInterface.register(NAME, shown)


class FalconModel(Encoder, stock.FalconModel):
    mask_function = NAME
    applies = FalconAttention.applies


CLASSES = {stock.FalconAttention: FalconAttention, stock.FalconModel: FalconModel}

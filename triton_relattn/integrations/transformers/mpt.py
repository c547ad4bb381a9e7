"""MPT."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.mpt import modeling_mpt as stock

from . import masks
from .bloom import bias_of_keys
from .encoder import Encoder
from .heads import InPlace, attend_to_past, join_heads, split_heads, with_past
from .masks import HIDDEN


class MptAttention(InPlace, stock.MptAttention):
    """q_i . k_j, scaled, + slope * j; causal."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_bias: torch.Tensor | None,
        cache: Any = None,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, Nq, C), position_bias (H, 1, longest), attention_mask bool, True of what is hidden, (B, Nk)."""
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (split_heads(each, self.head_dim) for each in mixed.chunk(3, dim=2))
        key, value, offset = with_past(cache, self.layer_idx, key, value)
        to_past = attention_mask is not None and attention_mask.dim() == 2
        mask = None if attention_mask is None else ~attention_mask
        if position_bias is not None:
            bias = position_bias[None, :, :, -key.shape[2] :].to(torch.promote_types(query.dtype, torch.float32))
            mask = bias if mask is None else bias_of_keys(bias, mask)
        out = attend_to_past(
            query,
            key,
            value,
            mask,
            is_causal=to_past,
            query_offset=offset,
            dropout_p=self.attn_dropout_p if self.training else 0.0,
            scale=self.softmax_scale,
        )
        return self.out_proj(join_heads(out)), None

    constants = ("position_bias",)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        bias = stock.build_mpt_alibi_tensor(self.n_heads, length)
        mask = masks.example(None, batch, length, real, is_causal=True, name=HIDDEN).to(torch.bool)
        return {"hidden_states": torch.randn(batch, length, self.hidden_size), "position_bias": bias, "attention_mask": mask}


class MptModel(Encoder, stock.MptModel):
    mask_function = HIDDEN


CLASSES = {stock.MptAttention: MptAttention, stock.MptModel: MptModel}

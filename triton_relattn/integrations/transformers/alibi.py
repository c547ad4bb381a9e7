"""Models with ALiBi: BLOOM, MPT, and Falcon where it has no rotary embeddings (falcon-rw).

slope * (j - i) differs from slope * j by a number that is the same for all keys of a query, and softmax ignores it. So the
models' own bias of keys, with its rounding, is the whole term: an additive mask (B, H, 1, Nk).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionMaskInterface
from transformers.models.falcon.modeling_falcon import build_alibi_tensor

from ..compact import Compact
from ..operators import drop_probability, join_heads, split_heads
from . import masks
from .base import Attention, Encoder, causal_attention, update_cache


class AlibiAttention(Attention):
    """q_i . k_j, scaled, + slope * j; causal."""

    needs: tuple[str, ...] = ("attention_mask",)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Return the attention (B, Nq, C) to all keys; bias (B or 1, H, 1, Nk or more), mask (B, Nk) or (B, 1, Nq, Nk)."""
        key, value, offset = update_cache(cache, self.layer_idx, key, value)
        bias = bias[..., -key.shape[2] :].to(torch.promote_types(query.dtype, torch.float32))
        is_causal = attention_mask.dim() == 2
        mask = attention_mask[:, None, None] if is_causal else attention_mask
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
        return join_heads(causal_attention(query, key, value, bias, is_causal=is_causal, query_offset=offset, **options))


class BloomAttention(AlibiAttention):
    constants = ("alibi",)

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        alibi: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: Any = None,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states and residual (B, Nq, C), alibi (B * H, 1, Nk), attention_mask (B, Nk)."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        bias = alibi.unflatten(0, (-1, self.num_heads))
        options = {"dropout_p": drop_probability(self.attention_dropout), "scale": self.inv_norm_factor}
        out = self.dense(self.attend(query, key, value, bias, attention_mask, cache, **options))
        return residual + functional.dropout(out, self.hidden_dropout, self.training), None

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        states, residual = torch.randn(2, batch, length, self.hidden_size)
        mask = masks.example(getattr(self, "config", None), batch, length, real, is_causal=True, name=masks.SHOWN)
        alibi = torch.randn(batch * self.num_heads, 1, length)
        return {"hidden_states": states, "residual": residual, "alibi": alibi, "attention_mask": mask}


class MptAttention(AlibiAttention):
    constants = ("position_bias",)
    needs = ("position_bias", "attention_mask")
    mask_hides = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_bias: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: Any = None,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, Nq, C), position_bias (H, 1, longest), attention_mask bool, True of what is hidden, (B, Nk)."""
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (split_heads(states, self.head_dim) for states in mixed.chunk(3, dim=2))
        options = {"dropout_p": self.attn_dropout_p if self.training else 0.0, "scale": self.softmax_scale}
        out = self.attend(query, key, value, position_bias[None], self.visible(attention_mask), cache, **options)
        return self.out_proj(out), None

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        mask = masks.example(None, batch, length, real, is_causal=True, name=masks.HIDDEN).to(torch.bool)
        bias = torch.randn(self.n_heads, 1, length)
        return {"hidden_states": torch.randn(batch, length, self.hidden_size), "position_bias": bias, "attention_mask": mask}


class FalconAttention(AlibiAttention):
    """Here the bias is also scaled. The model rounds slopes and biases to bfloat16."""

    constants = ("alibi",)

    @staticmethod
    def applies(module: Any) -> bool:
        """Return whether the model has ALiBi; else it has rotary embeddings."""
        return bool(module.config.alibi)

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: Any = None,
        position_embeddings: Any = None,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, Nq, C), alibi (B * H, 1, Nk), attention_mask (B, Nk), or (B, H, Nq, Nk) with alibi in it."""
        states = self._split_heads(self.query_key_value(hidden_states))
        query, key, value = (part.transpose(1, 2) for part in states)
        bias = alibi.view(-1, self.num_heads, 1, alibi.shape[-1]) / math.sqrt(self.head_dim)
        if attention_mask.dim() == 4:
            bias = torch.zeros_like(bias)
        dropout_p = self.attention_dropout.p if self.training else 0.0
        return self.dense(self.attend(query, key, value, bias, attention_mask, cache, dropout_p=dropout_p)), None

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        real = torch.ones(batch, length).bool() if real is None else real
        mask = masks.example(self.config, batch, length, real, is_causal=True, name=FALCON)
        alibi = build_alibi_tensor(real.long(), self.num_heads, torch.float64)
        return {"hidden_states": torch.randn(batch, length, self.hidden_size), "alibi": alibi, "attention_mask": mask}


class FalconMask(Compact):
    """A mask (B, Nk), of two dimensions: Falcon adds ALiBi to those of four."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.ndim.__get__:  # type: ignore[attr-defined]
            return 2
        return super().__torch_function__(func, types, args, kwargs)


def falcon_mask(**arguments: Any) -> Any:
    """Return the mask (B, Nk); for stock layers ALiBi (B, H, Nq, Nk) with hidden keys at the lowest number."""
    mask = masks.MASK_FUNCTIONS[masks.SHOWN](**arguments)
    if not isinstance(mask, Compact) or mask.small is None or mask.small.dim() != 2:
        return mask
    config, dtype = arguments["config"], arguments["dtype"]

    def make(small: torch.Tensor) -> torch.Tensor:
        dense = mask.dense()
        hidden = ~dense if dense.dtype == torch.bool else dense < -1
        alibi = build_alibi_tensor(small.long(), config.num_attention_heads, dtype=dtype)
        bias = alibi.unflatten(0, (len(small), -1)) / math.sqrt(config.hidden_size // config.num_attention_heads)
        return torch.masked_fill(bias, hidden, torch.finfo(dtype).min)

    return FalconMask.of(mask.small, make)


FALCON = "triton_relattn_alibi"
AttentionMaskInterface.register(FALCON, falcon_mask)


class BloomModel(Encoder):
    mask_function = masks.SHOWN


class MptModel(Encoder):
    mask_function = masks.HIDDEN


class FalconModel(Encoder):
    mask_function = FALCON
    applies = FalconAttention.applies

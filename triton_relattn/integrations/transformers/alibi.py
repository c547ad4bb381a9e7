"""Models with ALiBi: BLOOM, MPT, and Falcon where it has no rotary embeddings (falcon-rw).

slope * (j - i) differs from slope * j by a number that is the same for all keys of a query, and softmax ignores it. So the
models' own bias of keys, with its rounding, is the whole term: a mask of numbers (B, H, 1, Nk).
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
from .attention import Attention, causal_attention, update_cache
from .encoder import Encoder


def masked_bias(bias: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the bias of each key, (B, H, 1, Nk) or (1, H, 1, Nk), with -inf where it is hidden.

    attention_mask: (B, Nk), bool; or (B, 1, Nq, Nk), bool or numbers that are added.
    """
    if attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None, :]
    if attention_mask.dtype != torch.bool:
        return bias + attention_mask
    return bias.masked_fill(~attention_mask, -torch.inf)


class BloomAttention(Attention):
    """q_i . k_j, scaled, + slope * j; causal."""

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
        key, value, offset = update_cache(cache, self.layer_idx, key, value)
        out = causal_attention(
            query,
            key,
            value,
            masked_bias(alibi.unflatten(0, (-1, self.num_heads)), attention_mask),
            is_causal=attention_mask.dim() == 2,
            query_offset=offset,
            dropout_p=drop_probability(self.attention_dropout),
            scale=self.inv_norm_factor,
        )
        dropped = functional.dropout(self.dense(join_heads(out)), self.hidden_dropout, self.training)
        return residual + dropped, None

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        states, residual = torch.randn(2, batch, length, self.hidden_size)
        mask = masks.example(getattr(self, "config", None), batch, length, real, is_causal=True, name=masks.SHOWN)
        alibi = torch.randn(batch * self.num_heads, 1, length)
        return {"hidden_states": states, "residual": residual, "alibi": alibi, "attention_mask": mask}


class MptAttention(Attention):
    """q_i . k_j, scaled, + slope * j; causal."""

    constants = ("position_bias",)

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
        query, key, value = (split_heads(states, self.head_dim) for states in mixed.chunk(3, dim=2))
        key, value, offset = update_cache(cache, self.layer_idx, key, value)
        is_causal = attention_mask is not None and attention_mask.dim() == 2
        mask = None if attention_mask is None else ~attention_mask
        if position_bias is not None:
            bias = position_bias[None, :, :, -key.shape[2] :].to(torch.promote_types(query.dtype, torch.float32))
            mask = bias if mask is None else masked_bias(bias, mask)
        out = causal_attention(
            query,
            key,
            value,
            mask,
            is_causal=is_causal,
            query_offset=offset,
            dropout_p=self.attn_dropout_p if self.training else 0.0,
            scale=self.softmax_scale,
        )
        return self.out_proj(join_heads(out)), None

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        mask = masks.example(None, batch, length, real, is_causal=True, name=masks.HIDDEN).to(torch.bool)
        bias = torch.randn(self.n_heads, 1, length)
        return {"hidden_states": torch.randn(batch, length, self.hidden_size), "position_bias": bias, "attention_mask": mask}


class FalconAttention(Attention):
    """q_i . k_j + slope * j, both scaled; causal. The model rounds slopes and biases to bfloat16."""

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
        """hidden_states (B, Nq, C), alibi (B * H, 1, Nk), attention_mask (B, Nk); one (B, H, Nq, Nk) has alibi in it.

        position_embeddings are passed in any case; the stock class reads them where there is no alibi.
        """
        states = self._split_heads(self.query_key_value(hidden_states))
        query, key, value = (part.transpose(1, 2) for part in states)
        key, value, offset = update_cache(cache, self.layer_idx, key, value)
        is_causal = attention_mask.dim() == 2
        if is_causal:
            bias = alibi.unflatten(0, (-1, self.num_heads)) / math.sqrt(self.head_dim)
            attention_mask = masked_bias(bias, attention_mask)
        dropout_p = self.attention_dropout.p if self.training else 0.0
        out = causal_attention(query, key, value, attention_mask, is_causal=is_causal, query_offset=offset, dropout_p=dropout_p)
        return self.dense(join_heads(out)), None

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

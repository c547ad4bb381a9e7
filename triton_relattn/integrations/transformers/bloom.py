"""BLOOM, and the bias that it shares with Falcon and MPT."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.models.bloom import modeling_bloom as stock

from . import masks
from .encoder import Encoder
from .heads import InPlace, attend_to_past, drop_probability, join_heads, with_past
from .masks import SHOWN


def bias_of_keys(bias: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return ALiBi as a mask of numbers, (B, H, 1, Nk) or (1, H, 1, Nk): the bias of each key, -inf where it is hidden.

    slope * (j - i) differs from slope * j by a number that is the same for all keys of a query, and softmax ignores it. So the
    model's own bias of keys, with its rounding, is the whole term.

    attention_mask: (B, Nk), bool; or (B, 1, Nq, Nk), bool or numbers that are added.
    """
    if attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None, :]
    if attention_mask.dtype != torch.bool:
        return bias + attention_mask
    return bias.masked_fill(~attention_mask, -torch.inf)


class BloomAttention(InPlace, stock.BloomAttention):
    """q_i . k_j, scaled, + slope * j; causal."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        alibi: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states and residual (B, Nq, C), alibi (B * H, 1, Nk), attention_mask (B, Nk)."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        key, value, offset = with_past(cache, self.layer_idx, key, value)
        out = attend_to_past(
            query,
            key,
            value,
            bias_of_keys(alibi.unflatten(0, (-1, self.num_heads)), attention_mask),
            is_causal=attention_mask.dim() == 2,
            query_offset=offset,
            dropout_p=drop_probability(self.attention_dropout),
            scale=self.inv_norm_factor,
        )
        dropped = functional.dropout(self.dense(join_heads(out)), self.hidden_dropout, self.training)
        return residual + dropped, None

    constants = ("alibi",)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        real = torch.ones(batch, length).bool() if real is None else real
        mask = masks.example(getattr(self, "config", None), batch, length, real, is_causal=True, name=SHOWN)
        alibi = stock.build_alibi_tensor(real.long(), self.num_heads, torch.float64)
        return {
            "hidden_states": torch.randn(batch, length, self.hidden_size),
            "residual": torch.randn(batch, length, self.hidden_size),
            "alibi": alibi,
            "attention_mask": mask,
        }


class BloomModel(Encoder, stock.BloomModel):
    mask_function = SHOWN


CLASSES = {stock.BloomAttention: BloomAttention, stock.BloomModel: BloomModel}

"""UMT5."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.umt5 import modeling_umt5 as stock

from .encoder import Encoder
from .t5 import BucketedAttention


class UMT5Attention(BucketedAttention, stock.UMT5Attention):
    """Each layer has biases of its own."""

    mask_name, bias_name = "attention_mask", ""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        cache: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, Nq, C); encoder_hidden_states (B, Nk, C), for cross attention."""
        given = {"mask": attention_mask, "key_value_states": encoder_hidden_states, "cache": cache}
        return super().forward(hidden_states, **given, **kwargs)[0], None


class UMT5Stack(Encoder, stock.UMT5Stack):
    pass


CLASSES = {stock.UMT5Attention: UMT5Attention, stock.UMT5Stack: UMT5Stack}

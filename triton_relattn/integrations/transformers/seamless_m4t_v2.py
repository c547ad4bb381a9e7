"""The speech encoder of Seamless M4T v2, with its adapter."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.seamless_m4t_v2 import modeling_seamless_m4t_v2 as stock

from .conformer import ConformerAttention
from .encoder import Encoder


class SeamlessM4Tv2ConformerSelfAttention(ConformerAttention, stock.SeamlessM4Tv2ConformerSelfAttention):
    pass


class SeamlessM4Tv2ConformerEncoder(Encoder, stock.SeamlessM4Tv2ConformerEncoder):
    """Encoder that passes the chunks, which the stock encoder puts in a mask (B, 1, N, N), to its attention."""

    attention = SeamlessM4Tv2ConformerSelfAttention

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        size, left = self.config.speech_encoder_chunk_size, self.config.speech_encoder_left_chunk_num
        chunks = None if size is None else (size, left)
        return super().forward(hidden_states, attention_mask, chunks=chunks, **kwargs)

    def _apply_chunk_attention(self, attention_mask: torch.Tensor | None, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return attention_mask


class SeamlessM4Tv2ConformerAdapterLayer(Encoder, stock.SeamlessM4Tv2ConformerAdapterLayer):
    attention = SeamlessM4Tv2ConformerSelfAttention


CLASSES = {
    stock.SeamlessM4Tv2ConformerSelfAttention: SeamlessM4Tv2ConformerSelfAttention,
    stock.SeamlessM4Tv2ConformerEncoder: SeamlessM4Tv2ConformerEncoder,
    stock.SeamlessM4Tv2ConformerAdapterLayer: SeamlessM4Tv2ConformerAdapterLayer,
}

"""The speech encoder of Seamless M4T v2, with its adapter."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.seamless_m4t_v2 import modeling_seamless_m4t_v2 as stock

from ..calls import is_graph
from ..compact import Compact
from .conformer import ConformerAttention
from .encoder import Encoder


class SeamlessM4Tv2ConformerSelfAttention(ConformerAttention, stock.SeamlessM4Tv2ConformerSelfAttention):
    pass


class Mask(Compact):
    """A mask of padding, in place of one of chunks (B, 1, N, N), which transformers knows as complete by its four dimensions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.shape.__get__:  # type: ignore[attr-defined]
            return (1, 1, 1, 1) if args[0].is_none else args[0].small.shape
        return super().__torch_function__(func, types, args, kwargs)


class SeamlessM4Tv2ConformerEncoder(Encoder, stock.SeamlessM4Tv2ConformerEncoder):
    """Encoder that passes the chunks, which the stock encoder puts in a mask (B, 1, N, N), to its attention."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        size, left = self.config.speech_encoder_chunk_size, self.config.speech_encoder_left_chunk_num
        chunks = None if size is None else (size, left)
        return super().forward(hidden_states, attention_mask, chunks=chunks, **kwargs)

    def _apply_chunk_attention(self, attention_mask: torch.Tensor | None, hidden_states: torch.Tensor) -> Any:
        in_chunks = super()._apply_chunk_attention
        if is_graph():
            return in_chunks(attention_mask, hidden_states)
        small = None if attention_mask is None else attention_mask[:, None, None].bool()
        return Mask.of(small, lambda _: in_chunks(attention_mask, hidden_states))


class SeamlessM4Tv2ConformerAdapterLayer(Encoder, stock.SeamlessM4Tv2ConformerAdapterLayer):
    pass


CLASSES = {
    stock.SeamlessM4Tv2ConformerSelfAttention: SeamlessM4Tv2ConformerSelfAttention,
    stock.SeamlessM4Tv2ConformerEncoder: SeamlessM4Tv2ConformerEncoder,
    stock.SeamlessM4Tv2ConformerAdapterLayer: SeamlessM4Tv2ConformerAdapterLayer,
}

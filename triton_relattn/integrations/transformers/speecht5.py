"""The encoder of SpeechT5."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.speecht5 import modeling_speecht5 as stock

from ...functional import fused_relative_attention
from ...positions import RelativePositions
from ..arguments import StockArguments
from .encoder import Encoder
from .heads import added, join_heads, query_key_value, refuse_weights


class SpeechT5Attention(StockArguments, stock.SpeechT5Attention):
    """(q_i . k_j + q_i . E[j - i]), scaled, distances clipped; E (R, D) of the encoder, for all layers and heads."""

    @staticmethod
    def applies(module: Any) -> bool:
        """Return whether the attention has a relative term: in the decoder it has none."""
        return not module.is_decoder

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        cache: Any = None,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), position_bias (R, D), where the stock encoder has (N, N, D)."""
        refuse_weights({"output_attentions": output_attentions})
        term: dict[str, Any] = {}
        if position_bias is not None:
            if position_bias.dim() != 2:
                shape = tuple(position_bias.shape)
                raise ValueError(f"position_bias must be (R, D), got {shape}: enable or disable the model as a whole")
            last = len(position_bias) // 2
            term = {"rel_key": position_bias, "positions": RelativePositions(1 - last, last)}
        out: Any = fused_relative_attention(
            *query_key_value(self, hidden_states),
            attn_mask=added(attention_mask, hidden_states.dtype),
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scaling,
            **term,
        )
        return self.out_proj(join_heads(out)), None


class SpeechT5RelativePositionalEncoding(StockArguments, stock.SpeechT5RelativePositionalEncoding):
    """The table itself, most distant past first, instead of a row of it for each pair."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.pe_k(torch.arange(2 * self.max_length - 1, -1, -1, device=hidden_states.device))
        return rows


class SpeechT5Encoder(Encoder, stock.SpeechT5Encoder):
    attention = SpeechT5Attention


CLASSES = {
    stock.SpeechT5Attention: SpeechT5Attention,
    stock.SpeechT5RelativePositionalEncoding: SpeechT5RelativePositionalEncoding,
    stock.SpeechT5Encoder: SpeechT5Encoder,
}

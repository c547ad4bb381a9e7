"""The encoder of SpeechT5."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.speecht5 import modeling_speecht5 as stock

from ...positions import RelativePositions
from ..compact import Compact, rows
from ..operators import fused_relative_attention
from . import masks
from .encoder import Encoder
from .heads import InPlace, added, join_heads, query_key_value


class SpeechT5Attention(InPlace, stock.SpeechT5Attention):
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
        term: dict[str, Any] = {}
        if position_bias is not None:
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

    small = ("position_bias",)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        given = {"hidden_states": torch.randn(batch, length, self.embed_dim)}
        table = torch.randn(20, self.head_dim)
        return {**given, "attention_mask": masks.example(None, batch, length, real), "position_bias": passed_on(table, length)}


def passed_on(table: torch.Tensor, length: int) -> Any:
    """Return the rows (R, D) of distances for the layers, of which the stock encoder makes (N, N, D)."""
    last = len(table) // 2
    return Compact.of(table, lambda small: rows(small.T, RelativePositions(1 - last, last), length, length).permute(1, 2, 0))


class SpeechT5RelativePositionalEncoding(InPlace, stock.SpeechT5RelativePositionalEncoding):
    """The table itself, most distant past first, instead of a row of it for each pair."""

    fewest, passes_on = 0, True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        table: torch.Tensor = self.pe_k(torch.arange(2 * self.max_length - 1, -1, -1, device=hidden_states.device))
        return passed_on(table, hidden_states.shape[1])  # type: ignore[no-any-return]

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        return {"hidden_states": torch.randn(batch, length, self.dim)}


class SpeechT5Encoder(Encoder, stock.SpeechT5Encoder):
    pass


CLASSES = {
    stock.SpeechT5Attention: SpeechT5Attention,
    stock.SpeechT5RelativePositionalEncoding: SpeechT5RelativePositionalEncoding,
    stock.SpeechT5Encoder: SpeechT5Encoder,
}

"""The encoder of SpeechT5."""

from __future__ import annotations

from typing import Any

import torch

from ...positions import RelativePositions
from ..compact import Compact, rows
from ..operators import fused_relative_attention, join_heads
from . import masks
from .attention import Attention, additive_mask, query_key_value


class SpeechT5Attention(Attention):
    """(q_i . k_j + q_i . E[j - i]), scaled, distances clipped; E (R, D) of the encoder, for all layers and heads."""

    small = ("position_bias",)

    @staticmethod
    def applies(module: Any) -> bool:
        """Return whether the attention has a relative term: in the decoder it has none."""
        return not module.is_decoder

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), position_bias (R, D), where the stock encoder has (N, N, D)."""
        out: Any = fused_relative_attention(
            *query_key_value(self, hidden_states),
            rel_key=position_bias,
            positions=None if position_bias is None else clipped_positions(position_bias),
            attn_mask=additive_mask(attention_mask, hidden_states.dtype),
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scaling,
        )
        return self.out_proj(join_heads(out)), None

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(batch, length, self.embed_dim),
            "attention_mask": masks.example(None, batch, length, real),
            "position_bias": small_table(torch.randn(20, self.head_dim), length),
        }


def clipped_positions(table: torch.Tensor) -> RelativePositions:
    """Return the relative positions of the rows of E."""
    last = len(table) // 2
    return RelativePositions(1 - last, last)


def small_table(table: torch.Tensor, length: int) -> Any:
    """Return the rows (R, D) of distances for the layers, of which the stock encoder makes (N, N, D)."""
    positions = clipped_positions(table)
    return Compact.of(table, lambda small: rows(small.T, positions, length, length).permute(1, 2, 0))


class RelativePositionalEncoding(Attention):
    """The table itself, most distant past first, instead of a row of it per pair."""

    fewest, passes_on = 0, True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        table: torch.Tensor = self.pe_k(torch.arange(2 * self.max_length - 1, -1, -1, device=hidden_states.device))
        return small_table(table, hidden_states.shape[1])  # type: ignore[no-any-return]

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        return {"hidden_states": torch.randn(batch, length, self.dim)}

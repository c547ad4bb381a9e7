"""The encoders of VITS, SpeechT5 and WavLM."""

from __future__ import annotations

from typing import Any

import torch

from ...positions import RelativePositions
from ..compact import Compact, rows
from ..operators import fused_relative_attention, join_heads, split_heads
from ..structure import wavlm
from .base import Attention, Encoder, additive_mask, query_key_value


class SpeechAttention(Attention):
    def attend(self, hidden_states: torch.Tensor, attn_mask: torch.Tensor | None, **term: Any) -> torch.Tensor:
        """Return the projected attention of states (B, N, C); term: arguments of the operator."""
        out: Any = fused_relative_attention(
            *query_key_value(self, hidden_states),
            attn_mask=attn_mask,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scaling,
            **term,
        )
        return self.out_proj(join_heads(out))  # type: ignore[no-any-return]


class VitsAttention(SpeechAttention):
    """q_i . E[j - i], scaled as q_i . k_j, and values v_j + A[j - i]; both tables end at the window, zero beyond it."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C)."""
        term: dict[str, Any] = {}
        if self.window_size:
            term = {"rel_key": self.emb_rel_k[0], "rel_value": self.emb_rel_v[0]}
            term["positions"] = RelativePositions(-self.window_size, self.window_size, outside="zero")
        return self.attend(hidden_states, additive_mask(attention_mask, hidden_states.dtype), **term), None


class SpeechT5Attention(SpeechAttention):
    """(q_i . k_j + q_i . E[j - i]), scaled, distances clipped; E (R, D) of the encoder, for all layers and heads."""

    small = casts = ("position_bias",)

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
        positions = None if position_bias is None else clipped_positions(position_bias)
        mask = additive_mask(attention_mask, hidden_states.dtype)
        return self.attend(hidden_states, mask, rel_key=position_bias, positions=positions), None

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        table = small_table(torch.randn(20, self.head_dim), length)
        return {**super().example(batch, length, real), "position_bias": table}


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


class WavLMAttention(SpeechAttention):
    """q_i . k_j, scaled, + gate_i * b[bucket(j - i)]: a gate per query and head. The first layer passes b on."""

    small = casts = ("position_bias",)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        index: int = 0,
    ) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        """hidden_states (B, N, C), attention_mask (B, N), position_bias (H, R); stock layers pass on (B * H, N, N)."""
        passed_on = position_bias
        if position_bias is None:
            position_bias = wavlm.bucket_rows(self, self.rel_attn_embed, hidden_states)
            passed_on = wavlm.small_bias(position_bias, len(hidden_states), hidden_states.shape[1])
        gate = wavlm.gate(split_heads(hidden_states, self.head_dim), self.gru_rel_pos_linear, self.gru_rel_pos_const)
        term: dict[str, Any] = {"rel_key": position_bias[..., None], "rel_query": gate, "rel_scale": 1.0}
        positions = RelativePositions.centred(position_bias.shape[1])  # end rows: from max_distance on
        mask = None if attention_mask is None else attention_mask.eq(1)[:, None, None, :]
        return self.attend(hidden_states, mask, positions=positions, **term), None, passed_on

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        given = {**super().example(batch, length, None), "attention_mask": real}
        if not hasattr(self, "rel_attn_embed"):
            table = torch.randn(self.num_heads, 2 * min(length, self.max_distance + 1) - 1)
            given["position_bias"] = wavlm.small_bias(table, batch, length)
        return given


class WavLMEncoder(Encoder):
    mask_function = None

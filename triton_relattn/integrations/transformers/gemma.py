"""The audio encoders of Gemma 3n and Gemma 4: softcap * tanh((q_i . k_j + q_i . R[j - i]) / softcap) in a window.

R, a row per distance and head, is projected from sinusoids. The stock paths compute it in chunks of queries, each with the keys
around it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ...positions import RelativePositions
from ..calls import is_graph
from ..compact import Compact, is_small, to_dense
from ..operators import fused_relative_attention, join_heads, split_heads
from .base import ChunkedAttention, Encoder, query_key_value
from .masks import PADDING


class SoftcapAttention(ChunkedAttention):
    def prepare(self) -> None:
        super().prepare()
        self.softcap.fill_(self.attention_logits_soft_cap)  # a buffer that is the setting


class Gemma3nAudioAttention(SoftcapAttention):
    mask_hides = True

    def serves(self, mask: torch.Tensor) -> bool:  # type: ignore[override]
        return super().serves() and mask.dtype == torch.bool

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """hidden_states (B, N, C), mask bool (B, N), True of padding; returns (B, N, H, D)."""
        query, key, value = query_key_value(self, hidden_states)
        past, future = self.max_past_horizon, self.max_future_horizon
        positions = self.relative_position_embedding
        distances = torch.arange(past, -future - 1, -1, device=query.device)
        sinusoids = positions._get_timing_signal_1d_pos(distances[None], dtype=query.dtype)
        out: Any = fused_relative_attention(
            query * self.q_scale * functional.softplus(self.per_dim_scale),
            key,
            value,
            rel_key=split_heads(positions.pos_proj(sinusoids), self.head_dim)[0],
            positions=RelativePositions(-past, future),
            attn_mask=self.visible(mask)[:, None, None, :],
            window_size=(past, future),
            scale=1.0,
            softcap=self.attention_logits_soft_cap,
        )
        return out.transpose(1, 2)  # type: ignore[no-any-return]

    @classmethod
    def counted(cls, mask: torch.Tensor) -> torch.Tensor | None:
        return cls.visible(mask)[..., None, None]  # the output is (B, N, H, D)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        mask = torch.zeros(batch, length).bool() if real is None else ~real
        return {"hidden_states": torch.randn(batch, length, self.hidden_size), "mask": mask}


class Gemma4AudioAttention(SoftcapAttention):
    """R is zero beyond its ends."""

    small = needs = ("attention_mask",)

    @staticmethod
    def applies(module: Any) -> bool:
        """Return whether a frame sees itself."""
        return bool(module.max_past_horizon > 0)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), position_embeddings (1, R, C), attention_mask bool (B, 1, 1, N), False of padding."""
        query, key, value = (states.float() for states in query_key_value(self, hidden_states))
        rel_key = split_heads(self.relative_k_proj(position_embeddings), self.head_dim)[0].to(query.dtype)
        first = -self.max_past_horizon
        out: Any = fused_relative_attention(
            query * (self.q_scale * functional.softplus(self.per_dim_scale)),
            key * self.k_scale,
            value,
            rel_key,
            positions=RelativePositions(first, first + rel_key.shape[1] - 1, outside="zero"),
            attn_mask=attention_mask,
            window_size=self.window(),
            scale=1.0,
            softcap=self.attention_logits_soft_cap,
        )
        return self.post(join_heads(out).to(hidden_states.dtype)), None

    def window(self) -> tuple[int, int]:
        return self.max_past_horizon - 1, max(self.max_future_horizon - 1, 0)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioModel as Stock

        (left, right), width = self.window(), self.config.hidden_size
        ahead = torch.arange(length) - torch.arange(length)[:, None]
        in_window = (-ahead <= left) & (ahead <= right)

        def make(small: torch.Tensor | None) -> torch.Tensor:
            visible = in_window[None, None] if small is None else in_window & small
            mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min).expand(batch, -1, -1, -1)
            return Stock._convert_4d_mask_to_blocked_5d(self, mask)  # type: ignore[no-any-return]

        return {
            "hidden_states": torch.randn(batch, length, width),
            "position_embeddings": torch.randn(1, self.max_past_horizon + self.max_future_horizon + 1, width),
            "attention_mask": Compact.of(None if real is None else real[:, None, None], make),
        }


class Gemma4AudioModel(Encoder):
    """Encoder with a mask of padding only: the window is in its attention."""

    mask_function = PADDING

    def _convert_4d_mask_to_blocked_5d(self, mask_4d: torch.Tensor) -> torch.Tensor:
        make = super()._convert_4d_mask_to_blocked_5d  # type: ignore[misc]
        if is_graph() or not is_small(mask_4d):
            return make(mask_4d)  # type: ignore[no-any-return]
        small = mask_4d.small if isinstance(mask_4d, Compact) else mask_4d
        return Compact.of(small, lambda _: make(to_dense(mask_4d)))  # type: ignore[no-any-return]

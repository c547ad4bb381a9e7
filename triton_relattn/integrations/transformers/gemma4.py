"""The audio encoder of Gemma 4."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.models.gemma4 import modeling_gemma4 as stock

from ...positions import RelativePositions
from ..calls import is_graph
from ..compact import Compact, dense_of, is_small
from ..operators import fused_relative_attention
from .chunks import InChunks
from .encoder import Encoder
from .heads import join_heads, query_key_value, split_heads
from .masks import PADDING


class Gemma4AudioAttention(InChunks, stock.Gemma4AudioAttention):
    """softcap * tanh((q_i . k_j + q_i . R[j - i]) / softcap) in a window; R of projected sinusoids, zero beyond its ends.

    The stock path computes it in chunks of queries, each with the keys around it.
    """

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), position_embeddings (1, R, C), attention_mask bool (B, 1, 1, N), False of padding."""
        query, key, value = (each.float() for each in query_key_value(self, hidden_states))
        rel_key = split_heads(self.relative_k_proj(position_embeddings), self.head_dim)[0].to(query.dtype)
        first = -self.max_past_horizon
        out: Any = fused_relative_attention(
            query * (self.q_scale * functional.softplus(self.per_dim_scale)),
            key * self.k_scale,
            value,
            rel_key,
            positions=RelativePositions(first, first + rel_key.shape[1] - 1, outside="zero"),
            attn_mask=attention_mask,
            window_size=(self.max_past_horizon - 1, max(self.max_future_horizon - 1, 0)),
            scale=1.0,
            softcap=self.attention_logits_soft_cap,
        )
        return self.post(join_heads(out).to(hidden_states.dtype)), None

    @staticmethod
    def applies(module: Any) -> bool:
        """Return whether a frame sees itself."""
        return module.max_past_horizon > 0

    small = ("attention_mask",)

    def prepare(self) -> None:
        super().prepare()
        self.softcap.fill_(self.attention_logits_soft_cap)  # a buffer that is the setting

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        rows = self.max_past_horizon + self.max_future_horizon + 1
        given = {"hidden_states": torch.randn(batch, length, self.config.hidden_size)}
        mask = None if real is None else real[:, None, None]
        position = torch.arange(length)
        ahead = position - position[:, None]
        in_window = (-ahead <= max(self.max_past_horizon - 1, 0)) & (ahead <= max(self.max_future_horizon - 1, 0))

        def make(small: torch.Tensor | None) -> torch.Tensor:
            seen = in_window[None, None] if small is None else in_window & small
            hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min).expand(batch, -1, -1, -1)
            return stock.Gemma4AudioModel._convert_4d_mask_to_blocked_5d(self, hidden)  # type: ignore[arg-type]

        mask = Compact.of(mask, make)
        return {**given, "position_embeddings": torch.randn(1, rows, self.config.hidden_size), "attention_mask": mask}


class Gemma4AudioModel(Encoder, stock.Gemma4AudioModel):
    """Encoder with a mask of padding only: the window is in its attention."""

    mask_function = PADDING

    def _convert_4d_mask_to_blocked_5d(self, mask_4d: torch.Tensor) -> torch.Tensor:
        in_blocks = super()._convert_4d_mask_to_blocked_5d
        if is_graph() or not is_small(mask_4d):
            return in_blocks(mask_4d)
        small = mask_4d.small if isinstance(mask_4d, Compact) else mask_4d
        return Compact.of(small, lambda _: in_blocks(dense_of(mask_4d)))  # type: ignore[no-any-return]


CLASSES = {
    stock.Gemma4AudioAttention: Gemma4AudioAttention,
    stock.Gemma4AudioModel: Gemma4AudioModel,
}

"""Conformers of Wav2Vec2-BERT, Wav2Vec2-Conformer and both Seamless M4T."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...positions import RelativePositions
from ..calls import is_graph
from ..compact import Compact
from ..masks import ChunkedWindow
from ..operators import folded, fused_relative_attention, join_heads, split_heads
from .base import Attention, Encoder, additive_mask, attend_evenly, sees_a_key


class ConformerAttention(Attention):
    """Attention by ``position_embeddings_type``:

    .. code-block:: text

        "relative_key"   q_i . E[clamp(j - i, -left, right)], scaled as q_i . k_j; E (left + right + 1, D), shared by the heads
        "relative"       (q_i + u) . k_j + (q_i + v) . R[j - i], scaled; R, a row per distance and head, projected sinusoids
        "rotary", None   plain attention
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        relative_position_embeddings: torch.Tensor | None = None,
        chunks: tuple[int, int] | None = None,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), relative_position_embeddings (1, 2N - 1, C), chunks: size, number seen before (-1: all)."""
        rotated = hidden_states
        if self.position_embeddings_type == "rotary":
            rotated = self._apply_rotary_embedding(hidden_states, relative_position_embeddings)
        query = split_heads(self.linear_q(rotated), self.head_size)
        key = split_heads(self.linear_k(rotated), self.head_size)
        value = split_heads(self.linear_v(hidden_states), self.head_size)

        scale = getattr(self, "scaling", self.head_size**-0.5)  # transformers 5.20 and earlier have none
        term: dict[str, Any] = {}
        if self.position_embeddings_type == "relative_key":
            rows = torch.arange(self.distance_embedding.num_embeddings, device=query.device)
            term["rel_key"] = self.distance_embedding(rows).to(query.dtype)
            term["positions"] = RelativePositions(-self.left_max_position_embeddings, self.right_max_position_embeddings)
        elif self.position_embeddings_type == "relative":
            rel_key = split_heads(self.linear_pos(relative_position_embeddings), self.head_size)[0]
            last = hidden_states.shape[1] - 1
            query, term = folded(query, rel_key, self.pos_bias_u, self.pos_bias_v, RelativePositions(-last, last), scale)

        term |= {"dropout_p": self.dropout.p if self.training else 0.0, "scale": scale}
        if chunks is None or chunks[0] >= query.shape[2]:
            out: Any = fused_relative_attention(query, key, value, attn_mask=additive_mask(attention_mask, query.dtype), **term)
        else:
            size, left = chunks
            real = None if attention_mask is None else attention_mask[:, 0, 0]
            window = ChunkedWindow(real=real, left=max(left * size, -1), right=0, chunk=size)
            out = window.attend(functools.partial(fused_relative_attention, **term), query, key, value)
            if real is not None:
                # The adapter's convolution mixes queries from which padding hides all with real ones: they see all keys evenly,
                # also those of other chunks.
                visible = sees_a_key(window, query.shape[2])[:, None, :, None]
                out = torch.where(visible, out, attend_evenly(query, key, value, scale))
        return self.linear_out(join_heads(out)), None

    def serves(self, relative_position_embeddings: Any = None) -> bool:  # type: ignore[override]
        needs_embeddings = self.position_embeddings_type in ("relative", "rotary")
        return super().serves() and (not needs_embeddings or relative_position_embeddings is not None)

    @property
    def longest(self) -> int:
        return max(getattr(self, "left_max_position_embeddings", 0) or 0, 30) + 10

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        given = super().example(batch, length, real)
        if self.position_embeddings_type == "relative":
            given["relative_position_embeddings"] = torch.randn(1, 2 * length - 1, self.linear_q.in_features)
        if self.position_embeddings_type == "rotary":
            given["relative_position_embeddings"] = torch.randn(2, length, 1, 1, self.head_size)
        return given


class SeamlessMask(Compact):
    """A mask of padding, in place of one of chunks (B, 1, N, N), which transformers knows as complete by its four dimensions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.shape.__get__:  # type: ignore[attr-defined]
            return (1, 1, 1, 1) if args[0].is_none else args[0].small.shape
        return super().__torch_function__(func, types, args, kwargs)


class SeamlessM4Tv2Encoder(Encoder):
    """Encoder that passes the chunks, which the stock encoder puts in a mask (B, 1, N, N), to its attention."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        size, left = self.config.speech_encoder_chunk_size, self.config.speech_encoder_left_chunk_num
        chunks = None if size is None else (size, left)
        return super().forward(hidden_states, attention_mask, chunks=chunks, **kwargs)  # type: ignore[misc]

    def _apply_chunk_attention(self, attention_mask: torch.Tensor | None, hidden_states: torch.Tensor) -> Any:
        make = super()._apply_chunk_attention  # type: ignore[misc]
        if is_graph():
            return make(attention_mask, hidden_states)
        small = None if attention_mask is None else attention_mask[:, None, None].bool()
        return SeamlessMask.of(small, lambda _: make(attention_mask, hidden_states))

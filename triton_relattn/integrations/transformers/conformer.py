"""The self-attention that the Conformers of transformers share: Wav2Vec2-BERT, Wav2Vec2-Conformer, both Seamless M4T."""

from __future__ import annotations

from typing import Any

import torch

from ...positions import RelativePositions
from ..operators import folded, fused_relative_attention
from . import masks
from .heads import InPlace, added, attend_evenly, join_heads, split_heads


class ConformerAttention(InPlace):
    """Mixin: the forward, for each ``position_embeddings_type``.

    .. code-block:: text

        "relative_key"   q_i . E[clamp(j - i, -left, right)], scaled as q_i . k_j; E (left + right + 1, D), shared by the heads
        "relative"       (q_i + u) . k_j + (q_i + v) . R[j - i], scaled; R, a row per distance and head, projected sinusoids
        "rotary", None   plain attention
    """

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        relative_position_embeddings: torch.Tensor | None = None,
        chunks: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), relative_position_embeddings (1, 2N - 1, C), chunks: size, left of attend_in_chunks."""
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
            out: Any = fused_relative_attention(query, key, value, attn_mask=added(attention_mask, query.dtype), **term)
        else:
            out = attend_in_chunks(query, key, value, attention_mask, *chunks, **term)
        return self.linear_out(join_heads(out)), None

    def serves(self: Any, relative_position_embeddings: torch.Tensor | None = None, **given: Any) -> bool:
        return super().serves(**given) and (
            relative_position_embeddings is not None or self.position_embeddings_type not in ("relative", "rotary")
        )

    @property
    def longest(self: Any) -> int:
        return max(getattr(self, "left_max_position_embeddings", 0) or 0, 30) + 10

    def example(self: Any, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        width = self.linear_q.in_features
        mask = masks.example(getattr(self, "config", None), batch, length, real)
        given = {"hidden_states": torch.randn(batch, length, width), "attention_mask": mask}
        if self.position_embeddings_type == "relative":
            given["relative_position_embeddings"] = torch.randn(1, 2 * length - 1, width)
        if self.position_embeddings_type == "rotary":
            given["relative_position_embeddings"] = torch.randn(2, length, 1, 1, self.head_size)
        return given


def attend_in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    size: int,
    left: int,
    **term: Any,
) -> torch.Tensor:
    """Compute attention in which a query sees its own chunk of ``size`` keys and ``left`` chunks before it; left = -1: all.

    A query from which padding hides all of these sees all keys evenly, those of other chunks, too. The adapter of Seamless M4T v2
    depends on it: its convolution mixes such frames with real ones.
    """
    length = query.shape[2]
    parts: list[Any] = []
    for start in range(0, length, size):
        stop, first = min(start + size, length), max(start - left * size, 0) if left >= 0 else 0
        seen = slice(first, stop)
        mask = None if attention_mask is None else attention_mask[..., seen]
        parts.append(
            fused_relative_attention(
                query[:, :, start:stop],
                key[:, :, seen],
                value[:, :, seen],
                attn_mask=mask,
                query_offset=start - first,
                return_lse=True,
                **term,
            )
        )
    out, lse = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    if attention_mask is None:
        return out
    return torch.where(torch.isneginf(lse)[..., None], attend_evenly(query, key, value, term["scale"]), out)

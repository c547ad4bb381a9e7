"""NeMo's attention with relative positions, and the Conformer encoder that makes its masks."""

from __future__ import annotations

from typing import Any

import torch
from nemo.collections.asr.parts.submodules import multi_head_attention as attention

from ...positions import RelativePositions
from ..calls import is_graph
from ..enabled import PassesOn
from ..in_place import InPlace
from ..masks import ChunkedWindow
from ..operators import join_heads, module_attention


class Mask(ChunkedWindow):
    """A mask of an enabled encoder."""

    def __getitem__(self, index: tuple[slice, slice]) -> Mask:
        """Return the mask of the queries from a position on, [:, first:], where the keys before are a cache's."""
        first = index[1].start
        sizes = {"left": self.left, "right": self.right, "chunk": self.chunk, "first": first}
        return Mask(self.lengths, self.real, **sizes, make=lambda: self.dense()[index])

    def padding(self, queries: int, device: torch.device) -> torch.Tensor:
        """Return (B, Nq), True of queries that are padding. All keys are hidden from them, so that they get zero."""
        if self.real is not None:
            return ~self.real[:, self.first : self.first + queries]
        position = torch.arange(self.first, self.first + queries, device=device)
        return position >= self.lengths[:, None]  # type: ignore[index]


LEFT, RIGHT = 5, 3
"""The window of a comparison."""


class RelPositionMultiHeadAttention(InPlace):
    """(q_i + u) . k_j + (q_i + v) . R[j - i], both scaled; R, a row per distance and head, projected sinusoids."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | Mask | None,
        pos_emb: torch.Tensor,
        cache: torch.Tensor | None = None,
    ) -> Any:
        """query (B, Nq, C), key and value (B, Nk, C), pos_emb (1, 2Nk - 1, C), mask bool (B, Nq, Nk), True of what is hidden."""
        key, value, query, cache = self.update_cache(key=key, value=value, query=query, cache=cache)
        if torch.is_autocast_enabled():
            query, key, value = (states.to(torch.float32) for states in (query, key, value))
        with attention.avoid_float16_autocast_context():
            query, key, value = self.forward_qkv(query, key, value)
            queries, keys = query.shape[2], key.shape[2]
            # Row 0 is of the most distant past: stock attention shifts query i's row for key j to j - i + Nq - 1.
            first, last = 1 - keys, pos_emb.shape[1] - keys
            if isinstance(mask, Mask):  # of the rows only those of distances in the window are projected
                left, right = mask.window
                nearest = first if left < 0 else max(first, -left)
                last = last if right < 0 else min(last, right)
                pos_emb, first = pos_emb[:, nearest - first : last - first + 1], nearest
            operator = module_attention(self, pos_emb, RelativePositions(first, last, "error"))
            if isinstance(mask, Mask):
                out = mask.attend(operator, query, key, value)
                out = out.masked_fill(mask.padding(queries, out.device)[:, None, :, None], 0.0)
            else:
                visible = None if mask is None else ~mask[:, None]
                out = operator(query, key, value, attn_mask=visible, query_offset=keys - queries)
            out = self.linear_out(join_heads(out))
        return out if cache is None else (out, cache)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        states = torch.randn(batch, length, self.linear_q.in_features)
        rows = torch.randn(1, 2 * length - 1, self.linear_pos.in_features)
        mask = None
        if real is not None:
            behind = torch.arange(length)[:, None] - torch.arange(length)
            hidden = (behind > LEFT) | (behind < -RIGHT) | ~(real[:, None] & real[:, :, None])
            mask = Mask(real.sum(1), left=LEFT, right=RIGHT, make=lambda: hidden)
        return {"query": states, "key": states, "value": states, "mask": mask, "pos_emb": rows}


MOST_CHUNKS = 10000
"""Chunks that stock masks show if the context has no end to the left."""


class ConformerEncoder(PassesOn):
    """Encoder that passes lengths, windows and chunks to its attention, instead of a mask (B, T, T)."""

    @staticmethod
    def applies(module: Any) -> bool:
        return bool(module.self_attention_model == "rel_pos")

    def _create_masks(
        self,
        att_context_size: list[int],
        padding_length: torch.Tensor,
        max_audio_length: int,
        offset: torch.Tensor | None,
        device: torch.device,
    ) -> tuple[torch.Tensor, Any]:
        """Return (B, T), True of padding, and the mask of attention."""
        context = self._context(att_context_size)

        def make() -> tuple[torch.Tensor, Any]:
            return super(ConformerEncoder, self)._create_masks(  # type: ignore[misc, no-any-return]
                att_context_size, padding_length, max_audio_length, offset, device
            )

        parts = (module for module in self.modules() if isinstance(module, attention.MultiHeadAttention))
        if is_graph() or context is None or not all(isinstance(module, RelPositionMultiHeadAttention) for module in parts):
            return make()
        positions = torch.arange(max_audio_length, device=device)
        real = positions < padding_length[:, None]
        if offset is None:
            return ~real, Mask(padding_length.long().clamp(max=max_audio_length), **context, make=lambda: make()[1])
        real = real & (positions >= offset[:, None])
        return ~real, Mask(real=real, **context, make=lambda: make()[1])

    def _context(self, sizes: list[int]) -> dict[str, Any] | None:
        """Return the arguments of a mask, or None if only a stock mask says what is visible."""
        if self.att_context_style == "regular":
            return {"left": max(sizes[0], -1), "right": max(sizes[1], -1)}
        if self.att_context_style == "chunked_limited":
            if sizes[1] == -1:
                return {"left": max(sizes[0], -1)}
            chunk = sizes[1] + 1
            return {"left": (sizes[0] // chunk if sizes[0] >= 0 else MOST_CHUNKS) * chunk, "right": 0, "chunk": chunk}
        if self.att_context_style == "chunked_limited_with_rc":
            if sum(sizes) == -3:
                return {}
            if min(sizes[0], sizes[2]) >= 0:
                return {"left": sizes[0], "right": sizes[2], "chunk": sizes[1]}
        return None

"""NeMo's Conformer encoder, which makes the masks."""

from __future__ import annotations

from typing import Any

import torch
from nemo.collections.asr.modules import conformer_encoder as stock
from nemo.collections.asr.parts.submodules.multi_head_attention import MultiHeadAttention

from ..calls import is_graph
from ..replacement import PassesOn
from .attention import Mask, RelPositionMultiHeadAttention

MOST_CHUNKS = 10000
"""Chunks that stock masks show if the context has no end to the left."""


class ConformerEncoder(PassesOn, stock.ConformerEncoder):
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
            return super(ConformerEncoder, self)._create_masks(  # type: ignore[no-any-return]
                att_context_size, padding_length, max_audio_length, offset, device
            )

        attention = (module for module in self.modules() if isinstance(module, MultiHeadAttention))
        if is_graph() or context is None or not all(isinstance(module, RelPositionMultiHeadAttention) for module in attention):
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

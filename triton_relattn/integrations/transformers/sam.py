"""The vision encoder of SAM."""

from __future__ import annotations

from transformers.models.sam import modeling_sam as stock

from .grid_attention import SamAttention


class SamVisionAttention(SamAttention, stock.SamVisionAttention):
    """Attention on a grid, as SAM's."""


class SamVisionSdpaAttention(SamAttention, stock.SamVisionSdpaAttention):
    """The same without dropout."""

    drops = False


CLASSES = {stock.SamVisionAttention: SamVisionAttention, stock.SamVisionSdpaAttention: SamVisionSdpaAttention}

"""The vision encoder of SAM-HQ."""

from __future__ import annotations

from transformers.models.sam_hq import modeling_sam_hq as stock

from .grid_attention import SamAttention


class SamHQVisionAttention(SamAttention, stock.SamHQVisionAttention):
    """Attention on a grid, as SAM's."""


class SamHQVisionSdpaAttention(SamAttention, stock.SamHQVisionSdpaAttention):
    """The same without dropout."""

    drops = False


CLASSES = {stock.SamHQVisionAttention: SamHQVisionAttention, stock.SamHQVisionSdpaAttention: SamHQVisionSdpaAttention}

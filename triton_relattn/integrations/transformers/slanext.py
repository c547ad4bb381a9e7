"""The vision encoder of SLANeXt."""

from __future__ import annotations

from transformers.models.slanext import modeling_slanext as stock

from .grid_attention import SamAttention


class SLANeXtVisionAttention(SamAttention, stock.SLANeXtVisionAttention):
    """Attention on a grid, as SAM's."""


CLASSES = {stock.SLANeXtVisionAttention: SLANeXtVisionAttention}

"""The vision encoder of GOT-OCR2."""

from __future__ import annotations

from transformers.models.got_ocr2 import modeling_got_ocr2 as stock

from .grid_attention import SamAttention


class GotOcr2VisionAttention(SamAttention, stock.GotOcr2VisionAttention):
    """Attention on a grid, as SAM's."""


CLASSES = {stock.GotOcr2VisionAttention: GotOcr2VisionAttention}

"""The first vision encoder of Unlimited-OCR."""

from __future__ import annotations

from transformers.models.unlimited_ocr import modeling_unlimited_ocr as stock

from .grid_attention import SamAttention


class UnlimitedOcrSamVisionAttention(SamAttention, stock.UnlimitedOcrSamVisionAttention):
    """Attention on a grid, as SAM's."""


class UnlimitedOcrSamVisionSdpaAttention(SamAttention, stock.UnlimitedOcrSamVisionSdpaAttention):
    """The same without dropout."""

    drops = False


CLASSES = {
    stock.UnlimitedOcrSamVisionAttention: UnlimitedOcrSamVisionAttention,
    stock.UnlimitedOcrSamVisionSdpaAttention: UnlimitedOcrSamVisionSdpaAttention,
}

"""The first vision encoder of DeepSeek-OCR2."""

from __future__ import annotations

from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as stock

from .grid_attention import SamAttention


class DeepseekOcr2SamVisionAttention(SamAttention, stock.DeepseekOcr2SamVisionAttention):
    """Attention on a grid, as SAM's."""


class DeepseekOcr2SamVisionSdpaAttention(SamAttention, stock.DeepseekOcr2SamVisionSdpaAttention):
    """The same without dropout."""

    drops = False


CLASSES = {
    stock.DeepseekOcr2SamVisionAttention: DeepseekOcr2SamVisionAttention,
    stock.DeepseekOcr2SamVisionSdpaAttention: DeepseekOcr2SamVisionSdpaAttention,
}

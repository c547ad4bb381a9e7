"""NeMo's ``RelPositionMultiHeadAttention``, and its encoder's masks, on :func:`triton_relattn.fused_relative_attention`."""

from __future__ import annotations

from ..enable import disable, enable
from ..libraries import Library, Source

__all__ = ["disable", "enable"]

SOURCES = (
    Source(
        "nemo.collections.asr.parts.submodules.multi_head_attention",
        "NeMo's Conformer",
        {"RelPositionMultiHeadAttention": "conformer.RelPositionMultiHeadAttention"},
    ),
    Source(
        "nemo.collections.asr.modules.conformer_encoder",
        "NeMo's Conformer",
        {"ConformerEncoder": "conformer.ConformerEncoder"},
    ),
    Source(
        "nemo.collections.asr.modules.transformer_encoder",
        "NeMo's TransformerEncoder",
        {"MultiHeadAttention": "transformer.MultiHeadAttention", "TransformerEncoder": "transformer.TransformerEncoder"},
    ),
)
LIBRARY = Library("nemo_toolkit", __name__, SOURCES)

"""ESPnet's Conformers, and CosyVoice's copy of their attention, on :func:`triton_relattn.fused_relative_attention`."""

from __future__ import annotations

from typing import Any

from ..enable import disable, enable
from ..libraries import Library, Source
from ..structure.transformer_xl import ProjectedPositions

__all__ = ["disable", "enable"]


class PastPositions(ProjectedPositions):
    """The older class, whose rows are of the past alone; without zero_triu its terms of the future are those of other queries."""

    @staticmethod
    def applies(module: Any) -> bool:
        return bool(module.zero_triu)


SOURCES = (
    Source(
        "espnet.nets.pytorch_backend.transformer.attention",
        "ESPnet's Conformer",
        {"RelPositionMultiHeadedAttention": ProjectedPositions, "LegacyRelPositionMultiHeadedAttention": PastPositions},
    ),
    Source("espnet2.asr.encoder.conformer_encoder", "ESPnet's Conformer", {"ConformerEncoder": "conformer.ConformerEncoder"}),
    Source("cosyvoice.transformer.attention", "CosyVoice's attention", {"RelPositionMultiHeadedAttention": ProjectedPositions}),
)
LIBRARY = Library("espnet", __name__, SOURCES)

"""ESPnet's Conformers, and CosyVoice's copy of their attention, on :func:`triton_relattn.fused_relative_attention`."""

from __future__ import annotations

from typing import Any

from ..enable import disable, enable
from ..libraries import Library, Source
from ..structure.transformer_xl import ProjectedPositions

__all__ = ["disable", "enable"]


class PastPositions(ProjectedPositions):
    """The older class, whose rows are of the past alone."""

    @staticmethod
    def why_not(module: Any) -> str:
        if module.zero_triu:
            return ""
        return (
            "without zero_triu its older shift adds another query's term to keys of the future, and trained models depend on it; "
            "layers with rel_pos_type: latest are served"
        )


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

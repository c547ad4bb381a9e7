"""ESPnet's Conformers, and CosyVoice's copy of their attention, on :func:`triton_relattn.fused_relative_attention`.

Attention is of a kind that ``structure`` knows; the encoder makes the mask of padding.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .enable import disable, enable
from .libraries import Library, Source, WithFunctions
from .structure.transformer_xl import ProjectedPositions

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


def make_pad_mask(lengths: Any) -> torch.Tensor:
    """Return what the stock function does, (B, T), True of padding, T the largest length, without a (T, T)."""
    lengths = torch.as_tensor(lengths)
    mask: torch.Tensor = torch.arange(int(lengths.max()), device=lengths.device) >= lengths[:, None]
    return mask


class ConformerEncoder(WithFunctions):
    """Encoder whose mask of padding takes no memory but its own."""

    functions: ClassVar[dict[str, Any]] = {"make_pad_mask": make_pad_mask}


SOURCES = (
    Source(
        "espnet.nets.pytorch_backend.transformer.attention",
        "ESPnet's Conformer",
        {"RelPositionMultiHeadedAttention": ProjectedPositions, "LegacyRelPositionMultiHeadedAttention": PastPositions},
    ),
    Source("espnet2.asr.encoder.conformer_encoder", "ESPnet's Conformer", {"ConformerEncoder": ConformerEncoder}),
    Source("cosyvoice.transformer.attention", "CosyVoice's attention", {"RelPositionMultiHeadedAttention": ProjectedPositions}),
)
LIBRARY = Library("espnet", __name__, SOURCES)

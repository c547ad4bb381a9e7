"""ESPnet's Conformers, and CosyVoice's copy of their attention, on :func:`triton_relattn.fused_relative_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._core.names import with_names
from ..enable import disable, enable_in
from ..libraries import Library, Source
from ..report import Report
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


@with_names
def enable(module: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
    """Let relative attention of ESPnet and CosyVoice run on :func:`triton_relattn.fused_relative_attention`.

    The arguments, results and errors are those of :func:`triton_relattn.enable`, for the classes that docs/libraries.md lists.

    Example:
        >>> from espnet2.asr.encoder.conformer_encoder import ConformerEncoder  # doctest: +SKIP
        >>> encoder = ConformerEncoder(80, num_blocks=1, macaron_style=True, rel_pos_type="latest")  # doctest: +SKIP
        >>> enable(encoder)  # doctest: +SKIP
        {'': 'ConformerEncoder', 'encoders.0.self_attn': 'RelPositionMultiHeadedAttention'}
    """
    return enable_in(module, lengths, check_calls, ("espnet",), structures=False)

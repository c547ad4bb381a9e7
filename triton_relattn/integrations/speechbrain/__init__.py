"""SpeechBrain's ``RelPosMHAXL`` on :func:`triton_relattn.fused_relative_attention`, and the masks of its ``TransformerASR``."""

from __future__ import annotations

from ..enable import disable, enable
from ..libraries import Library, Source

__all__ = ["disable", "enable"]

SOURCES = (
    Source("speechbrain.nnet.attention", "SpeechBrain's Conformer", {"RelPosMHAXL": "conformer.RelPosMHAXL"}),
    Source(
        "speechbrain.lobes.models.transformer.TransformerASR",
        "SpeechBrain's Conformer",
        {"TransformerASR": "conformer.TransformerASR"},
    ),
)
LIBRARY = Library("speechbrain", __name__, SOURCES)

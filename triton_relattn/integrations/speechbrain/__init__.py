"""SpeechBrain's ``RelPosMHAXL`` on :func:`triton_relattn.fused_relative_attention`, and the masks of its ``TransformerASR``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._core.names import with_names
from ..enable import disable, enable_in
from ..libraries import Library, Source
from ..report import Report

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


@with_names
def enable(module: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
    """Let SpeechBrain's ``RelPosMHAXL`` run on :func:`triton_relattn.fused_relative_attention`.

    The arguments, results and errors are those of :func:`triton_relattn.enable`, for the classes that docs/libraries.md lists.

    Example:
        >>> from speechbrain.nnet.attention import RelPosMHAXL  # doctest: +SKIP
        >>> enable(RelPosMHAXL(embed_dim=64, num_heads=4))  # doctest: +SKIP
        {'': 'RelPosMHAXL'}
    """
    return enable_in(module, lengths, check_calls, ("speechbrain",), structures=False)

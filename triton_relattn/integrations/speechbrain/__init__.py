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
    Source("speechbrain.nnet.attention", "SpeechBrain's Conformer", {"RelPosMHAXL": "attention.RelPosMHAXL"}),
    Source(
        "speechbrain.lobes.models.transformer.TransformerASR",
        "SpeechBrain's Conformer",
        {"TransformerASR": "transformer_asr.TransformerASR"},
    ),
)
LIBRARY = Library("speechbrain", __name__, SOURCES)


@with_names
def enable(module: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
    """Let SpeechBrain's ``RelPosMHAXL`` run on :func:`triton_relattn.fused_relative_attention`.

    :func:`triton_relattn.enable` does the same for models of all libraries, and says how modules are compared before.

    Outputs and gradients are those of the stock class, with its scale 1/sqrt(embed_dim), masks and dropout. An enabled
    ``TransformerASR`` with a Conformer passes causality and chunks (``DynChunkTrainConfig``) to its encoder's attention instead
    of a mask (T, T): memory is linear in T. A mask that is given is used as it is.

    What differs: which probabilities dropout drops: the same rate, another random stream. Weights are None, which stock attention
    returns by default. ``mask_pos_future`` has no effect, as in the stock class.

    Args:
        module: a model, or any part of it: a ``TransformerASR``, an encoder, one attention.
        lengths, check_calls: as there.

    Returns, Raises: as there, of these classes alone.

    Example:
        >>> from speechbrain.nnet.attention import RelPosMHAXL  # doctest: +SKIP
        >>> enable(RelPosMHAXL(embed_dim=64, num_heads=4))  # doctest: +SKIP
        {'': 'RelPosMHAXL'}
    """
    return enable_in(module, lengths, check_calls, ("speechbrain",), structures=False)

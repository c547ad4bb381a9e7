"""ESPnet's Conformers, and CosyVoice's copy of their attention, on :func:`triton_relattn.fused_relative_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._core.names import with_names
from ..enable import disable, enable_in
from ..libraries import Library, Source
from ..report import Report

__all__ = ["disable", "enable"]

SOURCES = (
    Source(
        "espnet.nets.pytorch_backend.transformer.attention",
        "ESPnet's Conformer",
        {
            "RelPositionMultiHeadedAttention": "conformer.RelPositionMultiHeadedAttention",
            "LegacyRelPositionMultiHeadedAttention": "conformer.LegacyRelPositionMultiHeadedAttention",
        },
    ),
    Source("espnet2.asr.encoder.conformer_encoder", "ESPnet's Conformer", {"ConformerEncoder": "conformer.ConformerEncoder"}),
    Source(
        "cosyvoice.transformer.attention",
        "CosyVoice's attention",
        {"RelPositionMultiHeadedAttention": "cosyvoice.RelPositionMultiHeadedAttention"},
    ),
)
LIBRARY = Library("espnet", __name__, SOURCES)


@with_names
def enable(module: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
    """Let relative attention of ESPnet and CosyVoice run on :func:`triton_relattn.fused_relative_attention`.

    :func:`triton_relattn.enable` does the same for models of all libraries, and says how modules are compared before.

    Outputs and gradients are those of the stock classes, with ``zero_triu``, masks and dropout, and CosyVoice's caches. A mask of
    padding stays (B, 1, 1, T), and an enabled ``ConformerEncoder`` makes it without the (T, T) that the stock one makes it of. A
    mask for all pairs, (B, T, T), as CosyVoice makes one of chunks, is used as it is.

    What differs: which probabilities dropout drops: the same rate, another random stream. ``attn``, the weights that stock
    attention leaves in the module for pictures and for guided attention, is None. ``LegacyRelPositionMultiHeadedAttention`` is
    replaced if it has ``zero_triu``: without, its terms of the future are those of other queries.

    WeNet's class of this name has no relative term, and stays as it is.

    Args:
        module: a model, or any part of it: an encoder, a layer, one attention.
        lengths, check_calls: as there.

    Returns, Raises: as there, of these classes alone.

    Example:
        >>> from espnet2.asr.encoder.conformer_encoder import ConformerEncoder  # doctest: +SKIP
        >>> encoder = ConformerEncoder(80, num_blocks=1, macaron_style=True, rel_pos_type="latest")  # doctest: +SKIP
        >>> enable(encoder)  # doctest: +SKIP
        {'': 'ConformerEncoder', 'encoders.0.self_attn': 'RelPositionMultiHeadedAttention'}
    """
    return enable_in(module, lengths, check_calls, ("espnet",), structures=False)

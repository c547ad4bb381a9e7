"""ESPnet's Conformers, and CosyVoice's copy of their attention, on :func:`triton_relattn.fused_relative_attention`."""

from __future__ import annotations

from .. import replacement
from ..enable import functions

__all__ = ["disable", "enable"]

SOURCES = (
    replacement.Source("espnet.nets.pytorch_backend.transformer.attention", f"{__name__}.conformer", "ESPnet's Conformer"),
    replacement.Source("espnet2.asr.encoder.conformer_encoder", f"{__name__}.conformer", "ESPnet's Conformer"),
    replacement.Source("cosyvoice.transformer.attention", f"{__name__}.cosyvoice", "CosyVoice's attention"),
)

LIBRARY = replacement.Library("espnet", SOURCES)

enable, disable = functions(
    __name__,
    summary="Let relative attention of ESPnet and CosyVoice run on :func:`triton_relattn.fused_relative_attention`.",
    module="a model, or any part of it: an encoder, a layer, one attention.",
    text="""
Outputs and gradients are those of the stock classes, with ``zero_triu``, masks and dropout, and CosyVoice's caches. A mask of
padding stays (B, 1, 1, T), and an enabled ``ConformerEncoder`` makes it without the (T, T) that the stock one makes it of. A
mask for all pairs, (B, T, T), as CosyVoice makes one of chunks, is used as it is.

What differs: which probabilities dropout drops: the same rate, another random stream. ``attn``, the weights that stock attention
leaves in the module for pictures and for guided attention, is None. ``LegacyRelPositionMultiHeadedAttention`` is replaced if
it has ``zero_triu``: without, its terms of the future are those of other queries.

WeNet's class of this name has no relative term, and stays as it is.
""",
    example="""
>>> from espnet2.asr.encoder.conformer_encoder import ConformerEncoder  # doctest: +SKIP
>>> encoder = ConformerEncoder(80, num_blocks=1, macaron_style=True, rel_pos_type="latest")  # doctest: +SKIP
>>> enable(encoder)  # doctest: +SKIP
{'': 'ConformerEncoder', 'encoders.0.self_attn': 'RelPositionMultiHeadedAttention'}
""",
)

"""SpeechBrain's ``RelPosMHAXL`` on :func:`triton_relattn.fused_relative_attention`, and the masks of its ``TransformerASR``."""

from __future__ import annotations

from .. import replacement
from ..enable import functions

__all__ = ["disable", "enable"]

TITLE = "SpeechBrain's Conformer"
SOURCES = (
    replacement.Source("speechbrain.nnet.attention", f"{__name__}.attention", TITLE),
    replacement.Source("speechbrain.lobes.models.transformer.TransformerASR", f"{__name__}.transformer_asr", TITLE),
)

LIBRARY = replacement.Library("speechbrain", SOURCES)

enable, disable = functions(
    __name__,
    summary="Let SpeechBrain's ``RelPosMHAXL`` run on :func:`triton_relattn.fused_relative_attention`.",
    module="a model, or any part of it: a ``TransformerASR``, an encoder, one attention.",
    text="""
Outputs and gradients are those of the stock class, with its scale 1/sqrt(embed_dim), masks and dropout. An enabled
``TransformerASR`` with a Conformer passes causality and chunks (``DynChunkTrainConfig``) to its encoder's attention instead of
a mask (T, T): memory is linear in T. A mask that is given is used as it is.

What differs: which probabilities dropout drops: the same rate, another random stream. Weights are None, which stock attention
returns by default. ``mask_pos_future`` has no effect, as in the stock class.
""",
    example="""
>>> from speechbrain.nnet.attention import RelPosMHAXL  # doctest: +SKIP
>>> enable(RelPosMHAXL(embed_dim=64, num_heads=4))  # doctest: +SKIP
{'': 'RelPosMHAXL'}
""",
)

"""NeMo's ``RelPositionMultiHeadAttention``, and its encoder's masks, on :func:`triton_relattn.fused_relative_attention`."""

from __future__ import annotations

from .. import replacement
from ..enable import functions

__all__ = ["disable", "enable"]

SOURCES = (
    replacement.Source("nemo.collections.asr.parts.submodules.multi_head_attention", f"{__name__}.attention", "NeMo's Conformer"),
    replacement.Source("nemo.collections.asr.modules.conformer_encoder", f"{__name__}.encoder", "NeMo's Conformer"),
)

LIBRARY = replacement.Library("nemo_toolkit", SOURCES)

enable, disable = functions(
    __name__,
    summary="Let NeMo's ``RelPositionMultiHeadAttention`` run on :func:`triton_relattn.fused_relative_attention`.",
    module="a model, or any part of it: a ``ConformerEncoder``, a layer, one attention.",
    text="""
Outputs and gradients are those of the stock classes, with either ``use_pytorch_sdpa``, padding, dropout, caches for streaming
and all contexts (``att_context_size`` regular, ``chunked_limited`` and ``chunked_limited_with_rc``). An enabled
``ConformerEncoder`` passes lengths, windows and chunks to its attention instead of a mask (B, T, T): memory is linear in T. A
mask that another encoder makes is used as it is.

What differs: which probabilities dropout drops: the same rate, another random stream. Attention that is local
(``rel_pos_local_attn``) or has another kind of position, and encoders with adapters (``ConformerEncoderAdapter``), keep their
own classes (of the latter, all but the attention). To export a model, disable it first.
""",
    example="""
>>> from triton_relattn.integrations.nemo import enable  # doctest: +SKIP
>>> model = ASRModel.from_pretrained("nvidia/parakeet-ctc-1.1b")  # doctest: +SKIP
>>> enable(model)  # doctest: +SKIP
{'encoder': 'ConformerEncoder', 'encoder.layers.0.self_attn': 'RelPositionMultiHeadAttention', ...}
""",
)

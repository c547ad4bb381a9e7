"""fairseq2's relative attention on :func:`triton_relattn.fused_relative_attention`: Shaw's, and Transformer-XL's."""

from __future__ import annotations

from .. import replacement

__all__ = ["disable", "enable"]

SOURCES = (
    replacement.Source("fairseq2.models.transformer.sdpa.shaw", f"{__name__}.shaw", "fairseq2's Shaw attention"),
    replacement.Source(
        "fairseq2.models.transformer.sdpa.relative", f"{__name__}.relative", "fairseq2's Transformer-XL attention"
    ),
)

LIBRARY = replacement.Library(SOURCES, "class of fairseq2: ShawRelativePositionSDPA, RelativePositionSDPA", f"{__name__}.small")

enable, disable = replacement.functions(
    LIBRARY,
    __name__,
    summary="Let fairseq2's Shaw and Transformer-XL attention run on :func:`triton_relattn.fused_relative_attention`.",
    module="a model, or any part of it: an encoder, a layer, one of these.",
    text="""
Outputs and gradients are those of the stock classes. ``IdentityBias`` and ``CausalAttentionBias`` become lengths and
windows; another bias is added as the tensor that it makes. Packed batches, which the stock classes refuse, are taken with the
first two.

What differs: queries that are padding see real keys, where in the stock classes they see padding. A call with
``needs_weights=True`` is left to the stock class.
""",
    example="""
>>> from fairseq2.models.transformer import IdentityBias, ShawRelativePositionSDPA  # doctest: +SKIP
>>> enable(ShawRelativePositionSDPA(64, 4, IdentityBias(), 16))  # doctest: +SKIP
{'': 'ShawRelativePositionSDPA'}
""",
)

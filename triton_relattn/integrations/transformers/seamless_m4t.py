"""The speech encoder of Seamless M4T v1, with its adapter."""

from __future__ import annotations

from transformers.models.seamless_m4t import modeling_seamless_m4t as stock

from .conformer import ConformerAttention
from .masks import AsksForPadding


class SeamlessM4TConformerSelfAttention(ConformerAttention, stock.SeamlessM4TConformerSelfAttention):
    pass


class SeamlessM4TConformerEncoder(AsksForPadding, stock.SeamlessM4TConformerEncoder):
    pass


class SeamlessM4TConformerAdapterLayer(AsksForPadding, stock.SeamlessM4TConformerAdapterLayer):
    pass


CLASSES = {
    stock.SeamlessM4TConformerSelfAttention: SeamlessM4TConformerSelfAttention,
    stock.SeamlessM4TConformerEncoder: SeamlessM4TConformerEncoder,
    stock.SeamlessM4TConformerAdapterLayer: SeamlessM4TConformerAdapterLayer,
}

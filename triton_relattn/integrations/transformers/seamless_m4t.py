"""The speech encoder of Seamless M4T v1, with its adapter."""

from __future__ import annotations

from transformers.models.seamless_m4t import modeling_seamless_m4t as stock

from .conformer import ConformerAttention
from .encoder import Encoder


class SeamlessM4TConformerSelfAttention(ConformerAttention, stock.SeamlessM4TConformerSelfAttention):
    pass


class SeamlessM4TConformerEncoder(Encoder, stock.SeamlessM4TConformerEncoder):
    attention = SeamlessM4TConformerSelfAttention


class SeamlessM4TConformerAdapterLayer(Encoder, stock.SeamlessM4TConformerAdapterLayer):
    attention = SeamlessM4TConformerSelfAttention


CLASSES = {
    stock.SeamlessM4TConformerSelfAttention: SeamlessM4TConformerSelfAttention,
    stock.SeamlessM4TConformerEncoder: SeamlessM4TConformerEncoder,
    stock.SeamlessM4TConformerAdapterLayer: SeamlessM4TConformerAdapterLayer,
}

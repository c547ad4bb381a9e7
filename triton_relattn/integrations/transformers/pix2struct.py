"""The text decoder of Pix2Struct."""

from __future__ import annotations

from transformers.models.pix2struct import modeling_pix2struct as stock

from .encoder import Encoder
from .t5 import BucketedAttention


class Pix2StructTextAttention(BucketedAttention, stock.Pix2StructTextAttention):
    projections = ("query", "key", "value", "output")


class Pix2StructTextModel(Encoder, stock.Pix2StructTextModel):
    attention = Pix2StructTextAttention


CLASSES = {
    stock.Pix2StructTextAttention: Pix2StructTextAttention,
    stock.Pix2StructTextModel: Pix2StructTextModel,
}

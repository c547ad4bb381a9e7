"""Wav2Vec2-BERT, with its adapter."""

from __future__ import annotations

from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as stock

from .conformer import ConformerAttention
from .encoder import Encoder


class Wav2Vec2BertSelfAttention(ConformerAttention, stock.Wav2Vec2BertSelfAttention):
    pass


class Wav2Vec2BertEncoder(Encoder, stock.Wav2Vec2BertEncoder):
    attention = Wav2Vec2BertSelfAttention


class Wav2Vec2BertAdapterLayer(Encoder, stock.Wav2Vec2BertAdapterLayer):
    attention = Wav2Vec2BertSelfAttention


CLASSES = {
    stock.Wav2Vec2BertSelfAttention: Wav2Vec2BertSelfAttention,
    stock.Wav2Vec2BertEncoder: Wav2Vec2BertEncoder,
    stock.Wav2Vec2BertAdapterLayer: Wav2Vec2BertAdapterLayer,
}

"""Wav2Vec2-Conformer."""

from __future__ import annotations

from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as stock

from .conformer import ConformerAttention
from .encoder import Encoder


class Wav2Vec2ConformerSelfAttention(ConformerAttention, stock.Wav2Vec2ConformerSelfAttention):
    pass


class Wav2Vec2ConformerEncoder(Encoder, stock.Wav2Vec2ConformerEncoder):
    attention = Wav2Vec2ConformerSelfAttention


CLASSES = {
    stock.Wav2Vec2ConformerSelfAttention: Wav2Vec2ConformerSelfAttention,
    stock.Wav2Vec2ConformerEncoder: Wav2Vec2ConformerEncoder,
}

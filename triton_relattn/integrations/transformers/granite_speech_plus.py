"""The speech encoder of Granite Speech Plus."""

from __future__ import annotations

from transformers.models.granite_speech_plus import modeling_granite_speech_plus as stock

from .granite_speech import BlockAttention


class GraniteSpeechPlusConformerAttention(BlockAttention, stock.GraniteSpeechPlusConformerAttention):
    pass


CLASSES = {stock.GraniteSpeechPlusConformerAttention: GraniteSpeechPlusConformerAttention}

"""Pop2Piano."""

from __future__ import annotations

from transformers.models.pop2piano import modeling_pop2piano as stock

from .encoder import Encoder
from .t5 import BucketedAttention


class Pop2PianoAttention(BucketedAttention, stock.Pop2PianoAttention):
    pass


class Pop2PianoStack(Encoder, stock.Pop2PianoStack):
    attention = Pop2PianoAttention


CLASSES = {stock.Pop2PianoAttention: Pop2PianoAttention, stock.Pop2PianoStack: Pop2PianoStack}

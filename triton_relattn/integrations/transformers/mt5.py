"""mT5."""

from __future__ import annotations

from transformers.models.mt5 import modeling_mt5 as stock

from .encoder import Encoder
from .t5 import BucketedAttention


class MT5Attention(BucketedAttention, stock.MT5Attention):
    pass


class MT5Stack(Encoder, stock.MT5Stack):
    attention = MT5Attention


CLASSES = {stock.MT5Attention: MT5Attention, stock.MT5Stack: MT5Stack}

"""Switch Transformers."""

from __future__ import annotations

from transformers.models.switch_transformers import modeling_switch_transformers as stock

from .encoder import Encoder
from .t5 import BucketedAttention


class SwitchTransformersAttention(BucketedAttention, stock.SwitchTransformersAttention):
    pass


class SwitchTransformersStack(Encoder, stock.SwitchTransformersStack):
    attention = SwitchTransformersAttention


CLASSES = {stock.SwitchTransformersAttention: SwitchTransformersAttention, stock.SwitchTransformersStack: SwitchTransformersStack}

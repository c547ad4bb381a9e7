"""Inkling 2 Loop's language model, some of whose layers run several times; its attention is Inkling 2's."""

from __future__ import annotations

from transformers.models.inkling2_loop import modeling_inkling2_loop as stock

from .base import Encoder
from .inkling2 import without_distances


class TextModel(Encoder):
    forward = without_distances(stock.Inkling2LoopTextModel)

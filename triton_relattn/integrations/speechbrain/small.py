"""Small encoders of SpeechBrain."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .. import small
from ..proof import Case
from ..small import HEADS, MEL, WIDTH

SETTINGS: dict[str, dict[str, Any]] = {
    "speechbrain": {},
    "speechbrain causal": {"causal": True},
    "speechbrain chunks": {"chunks": (4, 2)},
}


def build(chunks: tuple[int, int | None] | None = None, **settings: Any) -> nn.Module:
    stock = importlib.import_module("speechbrain.lobes.models.transformer.TransformerASR")
    sizes = {"tgt_vocab": 11, "input_size": MEL, "d_model": WIDTH, "nhead": HEADS, "num_encoder_layers": 2, "d_ffn": 48}
    kind = {"encoder_module": "conformer", "attention_type": "RelPosMHAXL", "kernel_size": 7, "normalize_before": True}
    model = stock.TransformerASR(**{**sizes, **kind, "num_decoder_layers": 0, "dropout": 0.0, "causal": False, **settings})
    return Encoder(model, chunks and stock.DynChunkTrainConfig(*chunks))


class Encoder(nn.Module):
    """A ``TransformerASR`` that only encodes."""

    model: Any

    def __init__(self, model: nn.Module, chunks: Any) -> None:
        super().__init__()
        self.model, self.chunks = model, chunks

    def forward(self, **given: Any) -> Any:
        self.model.positional_encoding.emb_dtype = given["src"].dtype
        return self.model.encode(**given, dynchunktrain_config=self.chunks)


def given(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"src": torch.randn(len(lengths), length, MEL), "wav_len": torch.tensor(lengths) / length}


def cases(stock: str) -> tuple[Case, ...]:
    return small.cases(build, given, SETTINGS)

"""Small encoders of ESPnet, and of CosyVoice."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .. import small
from ..proof import Case
from ..small import HEADS, MEL, WIDTH

SIZES = {"input_size": MEL, "output_size": WIDTH, "attention_heads": HEADS, "linear_units": 48, "num_blocks": 2}
NO_DROPOUT = dict.fromkeys(("dropout_rate", "positional_dropout_rate", "attention_dropout_rate"), 0.0)
OF_ESPNET: dict[str, dict[str, Any]] = {
    "espnet": {},
    "espnet zero_triu": {"zero_triu": True},
    "espnet legacy": {"zero_triu": True, "rel_pos_type": "legacy"},
}
OF_COSYVOICE: dict[str, dict[str, Any]] = {"cosyvoice": {}, "cosyvoice chunks": {"static_chunk_size": 4}}


def espnet(**settings: Any) -> nn.Module:
    stock = importlib.import_module("espnet2.asr.encoder.conformer_encoder")
    kind = {"input_layer": "linear", "rel_pos_type": "latest", "macaron_style": True, "cnn_module_kernel": 7}
    encoder: nn.Module = stock.ConformerEncoder(**{**SIZES, **kind, **NO_DROPOUT, **settings})
    if settings.get("rel_pos_type") == "legacy":  # whose encoder does not hand it on
        for layer in encoder.encoders:  # type: ignore[union-attr]
            layer.self_attn.zero_triu = settings["zero_triu"]  # type: ignore[union-attr]
    return encoder


def cosyvoice(**settings: Any) -> nn.Module:
    stock = importlib.import_module("cosyvoice.transformer.encoder")
    kind = {"input_layer": "linear", "pos_enc_layer_type": "rel_pos_espnet", "selfattention_layer_type": "rel_selfattn"}
    encoder: nn.Module = stock.ConformerEncoder(**{**SIZES, **kind, **NO_DROPOUT, "cnn_module_kernel": 7, **settings})
    return encoder


def of_espnet(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"xs_pad": torch.randn(len(lengths), length, MEL), "ilens": torch.tensor(lengths)}


def of_cosyvoice(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"xs": torch.randn(len(lengths), length, MEL), "xs_lens": torch.tensor(lengths)}


def cases(stock: str) -> tuple[Case, ...]:
    if stock.startswith("cosyvoice."):
        return small.cases(cosyvoice, of_cosyvoice, OF_COSYVOICE)
    return small.cases(espnet, of_espnet, OF_ESPNET)

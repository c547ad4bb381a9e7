"""Small encoders of NeMo."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .. import small
from ..proof import Case
from ..small import HEADS, MEL, WIDTH

IN_CHUNKS = {"att_context_style": "chunked_limited"}
SETTINGS: dict[str, dict[str, Any]] = {
    "nemo": {},
    "nemo sdpa": {"use_pytorch_sdpa": True, "untie_biases": False},
    "nemo window": {"att_context_size": [5, 3]},
    "nemo chunks": {"att_context_size": [8, 3], **IN_CHUNKS},
    "nemo chunks and more": {"context": [7, 4, 3]},
}


def build(context: list[int] | None = None, **settings: Any) -> nn.Module:
    """Make an encoder. context: of chunks that see frames after them, which is set once the encoder is made."""
    stock = importlib.import_module("nemo.collections.asr.modules.conformer_encoder")
    sizes = {"feat_in": MEL, "n_layers": 2, "d_model": WIDTH, "n_heads": HEADS, "subsampling_factor": 1, "conv_kernel_size": 7}
    dropout = dict.fromkeys(("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att"), 0.0)
    style = {"att_context_style": "chunked_limited_with_rc"} if context else {}
    encoder: Any = stock.ConformerEncoder(**{**sizes, **dropout, **style, **settings})
    if context:
        encoder.att_context_size = context
    made: nn.Module = encoder
    return made


def given(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"audio_signal": torch.randn(len(lengths), MEL, length), "length": torch.tensor(lengths)}


def cases(stock: str) -> tuple[Case, ...]:
    return small.cases(build, given, SETTINGS)

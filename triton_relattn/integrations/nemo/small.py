"""Small encoders of NeMo."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .. import proof, small
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


def streamed(model: Any) -> proof.Results:
    """Return the outputs of parts of a sequence, with caches of keys and of convolutions; that of one sequence has no key yet."""
    torch.default_generator.manual_seed(1)
    model.setup_streaming_params(chunk_size=4, shift_size=4)
    cache = list(model.get_initial_cache_state(batch_size=2, dtype=torch.float64))
    cache[2] = torch.tensor([3, 0])
    names = ("cache_last_channel", "cache_last_time", "cache_last_channel_len")
    outs: proof.Results = {}
    with torch.no_grad(), proof.float32_is_float64():
        for number in range(6):
            part = {"audio_signal": torch.randn(2, MEL, 4, dtype=torch.float64), "length": torch.tensor([4, 4])}
            out, _, *cache = model(**part, **dict(zip(names, cache, strict=True)))
            outs[f"the output of part {number}"] = out
    return outs


def streaming() -> nn.Module:
    settings: dict[str, Any] = {"att_context_size": [8, 3], **IN_CHUNKS, "conv_context_size": "causal"}
    made: nn.Module = proof.varied(build(**settings, causal_downsampling=True))
    return made


def cases(stock: str) -> tuple[Case, ...]:
    return (*small.cases(build, given, SETTINGS), Case("nemo with a cache", streaming, {"part by part": streamed}))

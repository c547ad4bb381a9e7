"""Small models of libraries, and their arguments for sequences of some lengths that are padded to one."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

WIDTH, HEADS, MEL = 32, 4, 20


def nemo(context: list[int] | None = None, **settings: Any) -> nn.Module:
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


def of_nemo(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"audio_signal": torch.randn(len(lengths), MEL, length), "length": torch.tensor(lengths)}


def speechbrain(chunks: tuple[int, int | None] | None = None, **settings: Any) -> nn.Module:
    stock = importlib.import_module("speechbrain.lobes.models.transformer.TransformerASR")
    sizes = {"tgt_vocab": 11, "input_size": MEL, "d_model": WIDTH, "nhead": HEADS, "num_encoder_layers": 2, "d_ffn": 48}
    kind = {"encoder_module": "conformer", "attention_type": "RelPosMHAXL", "kernel_size": 7, "normalize_before": True}
    model = stock.TransformerASR(**{**sizes, **kind, "num_decoder_layers": 0, "dropout": 0.0, "causal": False, **settings})
    return OnlyEncoder(model, chunks and stock.DynChunkTrainConfig(*chunks))


class OnlyEncoder(nn.Module):
    """A ``TransformerASR`` that only encodes."""

    model: Any

    def __init__(self, model: nn.Module, chunks: Any) -> None:
        super().__init__()
        self.model, self.chunks = model, chunks

    def forward(self, **given: Any) -> Any:
        self.model.positional_encoding.emb_dtype = given["src"].dtype
        return self.model.encode(**given, dynchunktrain_config=self.chunks)


def of_speechbrain(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"src": torch.randn(len(lengths), length, MEL), "wav_len": torch.tensor(lengths) / length}


SIZES = {"input_size": MEL, "output_size": WIDTH, "attention_heads": HEADS, "linear_units": 48, "num_blocks": 2}
NO_DROPOUT = dict.fromkeys(("dropout_rate", "positional_dropout_rate", "attention_dropout_rate"), 0.0)


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


def x_transformers(causal: bool = False, **settings: Any) -> nn.Module:
    stock = importlib.import_module("x_transformers")
    kind = stock.Decoder if causal else stock.Encoder
    layers: nn.Module = kind(**{"dim": WIDTH, "depth": 2, "heads": HEADS, "attn_dim_head": 8, **settings})
    return layers


def of_x_transformers(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"x": torch.randn(len(lengths), length, WIDTH), "mask": torch.arange(length) < torch.tensor(lengths)[:, None]}

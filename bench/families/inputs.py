"""Arguments of models: of a config, the length that attention counts, and the lengths of sequences padded to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def exist(lengths: torch.Tensor, length: int) -> torch.Tensor:
    """(B, length) bool: True of what is no padding."""
    return torch.arange(length) < lengths[:, None]


def features(name: str, reduction: int = 1) -> Callable[[Any, int, torch.Tensor], dict[str, Any]]:
    """Frames of as many numbers as the config says under name, reduction of them for each that the attention sees."""

    def inputs(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
        features = torch.randn(len(lengths), length * reduction, getattr(config, name))
        return {"input_features": features, "attention_mask": exist(lengths * reduction, length * reduction).long()}

    return inputs


def spectrogram(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    features = torch.randn(len(lengths), 4 * length, config.subsampling_conv_channels[0])
    return {"input_features": features, "attention_mask": exist(4 * lengths, 4 * length)}


def hidden(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(len(lengths), length, config.hidden_size),
        "attention_mask": exist(lengths, length),
    }


def squeezed(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    factor = config.squeeze_factor
    given = hidden(config, factor * length, factor * lengths)
    return {**given, "attention_mask": given["attention_mask"].long()}


def hidden_alone(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    """Without a mask: of sequences that are as long as the longest."""
    return {"hidden_states": torch.randn(len(lengths), length, config.hidden_size)}


def tokens(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    numbers = torch.randint(1, config.vocab_size, (len(lengths), length))
    return {"input_ids": numbers, "attention_mask": exist(lengths, length).long()}


def translation(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    """Make the inputs of an encoder and a decoder; the longest of the encoder's sequences is the shortest of the decoder's."""
    decoder = {f"decoder_{name}": each for name, each in tokens(config, length, lengths).items()}
    return {**tokens(config, length, lengths.flip(0)), **decoder}


def encoded(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    """Make the inputs of a decoder alone."""
    encoder = {"encoder_hidden_states": torch.randn(len(lengths), length, config.hidden_size)}
    encoder["encoder_attention_mask"] = exist(lengths.flip(0), length).long()
    return {**tokens(config, length, lengths), **encoder}


def phonemes(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    arguments = tokens(config, length, lengths)
    return {**arguments, "padding_mask": arguments["attention_mask"][..., None].float()}


def frames(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    return {
        "input_tensor": torch.randn(len(lengths), length, config.hidden_size),
        "attention_mask": exist(lengths, length)[:, None].long(),
    }


def causal_spectrogram(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    """Frames that causal convolutions make length of."""
    length, lengths = 8 * length - 7, (8 * lengths - 7).clamp(min=0)
    features = torch.randn(len(lengths), length, config.num_mel_bins)
    return {"input_features": features, "attention_mask": exist(lengths, length)}


def blocks_of_frames(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    return {"hidden_states": torch.randn(len(lengths), length, config.input_dim)}


def stacked_frames(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    features = torch.randn(len(lengths), length, 4 * config.num_mel_bins)
    return {"input_features": features, "attention_mask": exist(lengths, length)}


def mel(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    features = torch.randn(len(lengths), 4 * length, config.input_feat_size)
    return {"audio_mel": features, "audio_mel_mask": ~exist(4 * lengths, 4 * length)}


def audio(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    features = torch.randn(len(lengths), config.time_reduction * length, config.input_size)
    return {"hidden_states": features, "mask": exist(config.time_reduction * lengths, config.time_reduction * length)}


def grid(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    """Tokens on a grid, about as high as it is wide, of at least length: images have no padding."""
    width = math.isqrt(length)
    return {"hidden_states": torch.randn(len(lengths), -(-length // width), width, config.hidden_size)}

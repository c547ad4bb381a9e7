"""Arguments of models: of a config, the length that attention counts, and the lengths of sequences padded to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Make = Callable[[Any, int, torch.Tensor], dict[str, Any]]


def is_real(lengths: torch.Tensor, length: int) -> torch.Tensor:
    """(B, length) bool: False at padding."""
    return torch.arange(length) < lengths[:, None]


def features(
    width: str | Callable[[Any], int],
    factor: int | str = 1,
    name: str = "input_features",
    mask_name: str = "attention_mask",
    mask_dtype: torch.dtype = torch.bool,
) -> Make:
    """Frames and their mask.

    width: features per frame, or the setting that has them. factor: frames per position of the attention, likewise.
    """

    def make(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
        count = factor if isinstance(factor, int) else getattr(config, factor)
        size = getattr(config, width) if isinstance(width, str) else width(config)
        frames = torch.randn(len(lengths), length * count, size)
        return {name: frames, mask_name: is_real(lengths * count, length * count).to(mask_dtype)}

    return make


def mel(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    arguments = features("input_feat_size", 4, "audio_mel", "audio_mel_mask")(config, length, lengths)
    return {**arguments, "audio_mel_mask": ~arguments["audio_mel_mask"]}


def phoneme_frames(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    arguments = features("hidden_size", name="input_tensor", mask_dtype=torch.long)(config, length, lengths)
    return {**arguments, "attention_mask": arguments["attention_mask"][:, None]}


def without_mask(width: str) -> Make:
    """Hidden states of sequences that are as long as the longest."""
    return lambda config, length, lengths: {"hidden_states": torch.randn(len(lengths), length, getattr(config, width))}


def causal_spectrogram(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    """Frames that causal convolutions make length of."""
    length, lengths = 8 * length - 7, (8 * lengths - 7).clamp(min=0)
    frames = torch.randn(len(lengths), length, config.num_mel_bins)
    return {"input_features": frames, "attention_mask": is_real(lengths, length)}


def tokens(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    numbers = torch.randint(1, config.vocab_size, (len(lengths), length))
    return {"input_ids": numbers, "attention_mask": is_real(lengths, length).long()}


def translation(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    """Inputs of an encoder and a decoder; the longest of the encoder's sequences is the shortest of the decoder's."""
    decoder = {f"decoder_{name}": value for name, value in tokens(config, length, lengths).items()}
    return {**tokens(config, length, lengths.flip(0)), **decoder}


def encoded(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    """Inputs of a decoder alone."""
    encoder = {"encoder_hidden_states": torch.randn(len(lengths), length, config.hidden_size)}
    encoder["encoder_attention_mask"] = is_real(lengths.flip(0), length).long()
    return {**tokens(config, length, lengths), **encoder}


def phonemes(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    arguments = tokens(config, length, lengths)
    return {**arguments, "padding_mask": arguments["attention_mask"][..., None].float()}


def grid(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    """Tokens on a grid, about as high as it is wide, of at least length: images have no padding."""
    width = math.isqrt(length)
    return {"hidden_states": torch.randn(len(lengths), -(-length // width), width, config.hidden_size)}
